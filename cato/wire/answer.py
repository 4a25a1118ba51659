"""The parts of an answer, and the protocol of the writers for each dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from cato.wire.events import Event


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text, which may be incomplete if the answer was cut.

    `is_custom`: a custom tool of Responses, whose arguments are free text.
    """

    id: str
    name: str
    arguments: str
    is_custom: bool = False


Part = Text | Thinking | ToolCall


@dataclass(frozen=True, slots=True)
class Arguments:
    """More arguments of the latest tool call."""

    text: str


Delta = Text | Thinking | ToolCall | Arguments
"""What an event adds to an answer. A `ToolCall` starts a call; its arguments follow."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended; `finish_reason` is OpenAI's: `stop`, `length` or `tool_calls`.

    `cached_tokens` are included in `prompt_tokens`. `stop_sequence`: the client's own at which it
    stopped, where the engine tells it.
    """

    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    stop_sequence: str = ""


class Problem(Protocol):
    """Why there is no answer; `status` is the HTTP status if no stream has begun.

    `to_openai` and `to_anthropic` replace `message` for conversations, in OpenAI's dialects and
    in Anthropic's. Empty: `message` itself.
    """

    @property
    def status(self) -> int: ...
    @property
    def message(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def code(self) -> str | None: ...
    @property
    def param(self) -> str | None: ...
    @property
    def to_openai(self) -> str: ...
    @property
    def to_anthropic(self) -> str: ...


class AnswerWriter(Protocol):
    """Writes one answer in one dialect: whole, or as events in the order in which they are sent.

    A stream is `opening`, the output, `closing` or `failed`, and then the bytes of `done`. `sign`
    is the keep-alive between two events; empty for clients that cannot handle one. A tool call
    starts with its id and name; `arguments` extend the latest call.

    It can also continue a stream that another writer has begun: see `adopt`.
    """

    done: ClassVar[bytes]
    sign: ClassVar[bytes]
    # Types of events that end the part before them.
    ends_of_parts: ClassVar[frozenset[str]]

    def whole(self, parts: Sequence[Part], ending: Ending) -> dict[str, Any]:
        """The whole answer to a request without streaming."""
        ...

    def opening(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> list[Event]:
        """Events before the first output, with the token counts if they are known by then."""
        ...

    def text(self, delta: str) -> list[Event]: ...

    def thinking(self, delta: str) -> list[Event]: ...

    def tool_call(self, id: str, name: str) -> list[Event]: ...

    def arguments(self, delta: str) -> list[Event]: ...

    def closing(self, ending: Ending) -> list[Event]:
        """Events after all output; only the last one carries or follows the counts. Events that
        were adopted are left out."""
        ...

    def failed(self, problem: Problem) -> list[Event]:
        """Events that end a stream after an error, and open it where the dialect needs that."""
        ...

    @staticmethod
    def is_plain(raw: bytes) -> bool:
        """Whether these events only add text; cheap, since it does not parse them."""
        ...

    @staticmethod
    def deltas(event: Event) -> list[Delta]:
        """What an event of this dialect adds."""
        ...

    @staticmethod
    def finish_reason(event: Event) -> str:
        """OpenAI's finish reason, if an event of this dialect states it before the last event does;
        else empty."""
        ...

    def adopt(self, event: Event) -> None:
        """Continue after this sent event of another writer, with its ids."""
        ...

    def adopt_text(self, text: str, events: int) -> None:
        """Continue after this many events that only added `text`, without reading them."""
        ...

    def receipt_place(self, last: Event) -> Event:
        """The object in the last event of `closing` to which CATO adds its own fields."""
        ...
