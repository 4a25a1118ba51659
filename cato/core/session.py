"""Sessions: the successive LLM calls of one conversation or agent, and what is known of a prompt
before an engine has seen it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TurnKind(StrEnum):
    """What a call is to its session: its main loop, or a call beside it."""

    MAIN = "main"
    TITLE = "title"
    """Names the conversation for a list; a person waits for nothing."""
    COMPACTION = "compaction"
    """Sums up the history; the main loop waits for it."""
    COUNT = "count"
    """Counts tokens; nothing is generated."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Which call of which session a request is.

    `session` is unique within a tenant; `parent` is the session whose tool call started this one
    (empty: none). `number` counts from 1: the answers that the conversation holds, and this one.
    `client` is the agent's name, empty where it is not known. `changes` name the rules that made
    the prompt stable (`cato.wire.stable`). `think_s` is the time since the turn before, None where
    none is known.
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
    """A prompt as estimated before an engine has it.

    Of its `tokens`, `new_tokens` were not in the session's previous prompt. `prefix` holds hashes
    of its beginnings, as `Invocation.prefix` does, the first `shared_blocks` of them as in the
    session's previous prompt; `session` is the session's name across tenants (empty: none).
    """

    tokens: int
    new_tokens: int
    prefix: tuple[int, ...] = ()
    session: str = ""
    shared_blocks: int = 0
