"""What an answer consists of, and the protocol of those who write it in a dialect."""

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
    """`arguments` is JSON text; an answer that was cut may hold the beginning of it only."""

    id: str
    name: str
    arguments: str


Part = Text | Thinking | ToolCall


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the call that was begun last."""

    text: str


Delta = Text | Thinking | ToolCall | Arguments
"""What an event adds to an answer; a `ToolCall` begins one, and its arguments follow."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended; `finish_reason` is OpenAI's: `stop`, `length` or `tool_calls`.

    `cached_tokens` are among `prompt_tokens`.
    """

    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


class Problem(Protocol):
    """Why there is no answer; `status` is the HTTP status that it has before a stream begins.

    `with_numbers` and `to_anthropic` are other words of `message`, for conversations in OpenAI's
    dialects and in Anthropic's; empty where these are told `message` itself.
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
    def with_numbers(self) -> str: ...
    @property
    def to_anthropic(self) -> str: ...


class AnswerWriter(Protocol):
    """Writes one answer in one dialect: whole, or as events in the order in which they are sent.

    A stream is `opening`, then the output as it comes, then `closing` or `failed`, then the bytes
    of `done`. While nothing comes, `sign` between two events shows that the stream lives; it is
    empty where clients want none. A tool call is begun with its id and name; `arguments` go on with
    the call that was begun last.

    It may also go on with a stream that another has begun: see `adopt`.
    """

    done: ClassVar[bytes]
    sign: ClassVar[bytes]
    # Types of events after which the part before them gets no more.
    ends_of_parts: ClassVar[frozenset[str]]

    def whole(self, parts: Sequence[Part], ending: Ending) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        ...

    def opening(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> list[Event]:
        """Before the first output; the counts where they are known by then."""
        ...

    def text(self, delta: str) -> list[Event]: ...

    def thinking(self, delta: str) -> list[Event]: ...

    def tool_call(self, id: str, name: str) -> list[Event]: ...

    def arguments(self, delta: str) -> list[Event]: ...

    def closing(self, ending: Ending) -> list[Event]:
        """After all output; the last event alone has or follows the counts. What of it was adopted
        is left out."""
        ...

    def failed(self, problem: Problem) -> list[Event]:
        """The end of a stream that cannot go on."""
        ...

    @staticmethod
    def is_plain(raw: bytes) -> bool:
        """Whether these events only add text; cheap, since they are not parsed."""
        ...

    @staticmethod
    def deltas(event: Event) -> list[Delta]:
        """What an event of this dialect adds."""
        ...

    @staticmethod
    def finish_reason(event: Event) -> str:
        """OpenAI's finish reason that an event of this dialect tells before the last one does;
        empty for any other."""
        ...

    def adopt(self, event: Event) -> None:
        """An event of this answer that was sent, written by another: what follows goes on from it,
        with its ids."""
        ...

    def adopt_text(self, text: str, events: int) -> None:
        """The same for so many events of text, unread."""
        ...

    def receipt_place(self, last: Event) -> Event:
        """The object inside the last event of `closing` that takes fields of our own."""
        ...
