#!/bin/sh
# Claude Code with a model of your own.
export ANTHROPIC_BASE_URL=http://127.0.0.1:8000
export ANTHROPIC_AUTH_TOKEN=none
export ANTHROPIC_MODEL=cato-auto
export ANTHROPIC_SMALL_FAST_MODEL=cato-auto
exec claude "$@"
