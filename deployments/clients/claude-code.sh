#!/bin/sh
# Claude Code with a model of your own.
export ANTHROPIC_BASE_URL=http://127.0.0.1:8000
export ANTHROPIC_AUTH_TOKEN=none
export ANTHROPIC_MODEL=cato-auto
# For titles, /model, and sub-agents that ask for a smaller or larger model; each may be another.
export ANTHROPIC_DEFAULT_HAIKU_MODEL=cato-auto
export ANTHROPIC_DEFAULT_SONNET_MODEL=cato-auto
export ANTHROPIC_DEFAULT_OPUS_MODEL=cato-auto
export ANTHROPIC_DEFAULT_FABLE_MODEL=cato-auto
exec claude "$@"
