"""Sessions: the successive LLM calls of one conversation or agent, and estimates of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TurnKind(StrEnum):
    """A call's role in its session: the main loop, or a side call."""

    MAIN = "main"
    TITLE = "title"
    """Names the conversation for a list; no person waits for it."""
    COMPACTION = "compaction"
    """Summarizes the history; the main loop waits for it."""
    COUNT = "count"
    """Counts tokens; nothing is generated."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a request in its session.

    `session` is unique within a tenant; `parent` is the session whose tool call started this one
    (empty: none). `number` counts from 1: the answers in the conversation, plus this one. `client`
    is the agent's name, empty if unknown. `changes` name the rules that made the prompt stable
    (`cato.wire.stable`). `think_s` is the time since the previous turn, None if unknown.
    """

    session: str
    number: int = 1
    parent: str = ""
    client: str = ""
    kind: TurnKind = TurnKind.MAIN
    changes: tuple[str, ...] = ()
    think_s: float | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Estimate of a prompt before an engine has it.

    Of its `tokens`, `new_tokens` were not in the session's previous prompt. `prefix` holds hashes
    of its prefixes, as `Invocation.prefix` does; the first `shared_blocks` of them equal those of
    the session's previous prompt. `session` is the session's name across tenants (empty: none).
    """

    tokens: int
    new_tokens: int
    prefix: tuple[int, ...] = ()
    session: str = ""
    shared_blocks: int = 0
