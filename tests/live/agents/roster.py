"""All agents that are tested."""

from __future__ import annotations

from tests.live.agents.agent import Agent
from tests.live.agents.aider import Aider
from tests.live.agents.claude import Claude
from tests.live.agents.codex import Codex
from tests.live.agents.continue_cli import Continue
from tests.live.agents.opencode import Opencode
from tests.live.agents.qwen import Qwen

AGENTS: tuple[Agent, ...] = (Claude(), Codex(), Opencode(), Qwen(), Continue(), Aider())
# Small enough to be installed for every run of the tests.
SMALL = frozenset({"qwen", "cn"})
