"""Base of the writers for OpenAI's completions and chat: objects with a list of one choice."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from cato.wire.answer import Delta, Ending, Part, Problem
from cato.wire.events import DONE_EVENT, Event

# A finish reason, or output other than text. Quotes within JSON strings are escaped, so these marks
# cannot occur in text.
_NOT_PLAIN = re.compile(
    rb'"finish_reason":\s*"|"(?:tool_calls|reasoning|reasoning_content)":(?!\s*(?:null|\[\]|""))'
)


class UsageIn(Enum):
    """Where a stream reports its token counts."""

    NO_CHUNK = "none"
    LAST_CHUNK = "last"
    """In the chunk with the finish reason, as Mistral does: users of its SDK read a choice of every
    chunk."""
    OWN_CHUNK = "own"
    """In a later chunk without choices, as `stream_options.include_usage` asks."""


@dataclass(slots=True)
class ChoicesWriter(ABC):
    """Writes one answer; `created` is Unix time, `extra` are more fields for each object."""

    id: str
    model: str
    created: int
    usage_in: UsageIn = UsageIn.OWN_CHUNK
    extra: Mapping[str, object] = field(default_factory=dict)

    # For an adopted stream: the fields of its chunks, and whether its finish reason was sent.
    _adopted: dict[str, Any] | None = None
    _is_finished: bool = False

    done: ClassVar[bytes] = DONE_EVENT
    sign: ClassVar[bytes] = b""
    ends_of_parts: ClassVar[frozenset[str]] = frozenset()
    _id_prefix: ClassVar[str]
    _kind: ClassVar[str]
    _chunk_kind: ClassVar[str]

    @abstractmethod
    def opening(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> list[Event]: ...

    @abstractmethod
    def text(self, delta: str) -> list[Event]: ...

    @abstractmethod
    def thinking(self, delta: str) -> list[Event]: ...

    @abstractmethod
    def tool_call(self, id: str, name: str) -> list[Event]: ...

    @abstractmethod
    def arguments(self, delta: str) -> list[Event]: ...

    @staticmethod
    def is_plain(raw: bytes) -> bool:
        return _NOT_PLAIN.search(raw) is None

    @staticmethod
    @abstractmethod
    def deltas(event: Event) -> list[Delta]: ...

    @staticmethod
    def finish_reason(event: Event) -> str:
        return first_choice(event).get("finish_reason") or ""

    @abstractmethod
    def _content(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The output fields of a whole answer's choice."""

    @abstractmethod
    def _no_output(self) -> dict[str, Any]:
        """The output fields of a chunk that only ends a stream."""

    def whole(self, parts: Sequence[Part], ending: Ending) -> dict[str, Any]:
        choice = _choice(self._content(parts), ending.finish_reason)
        return {**self._object(self._kind, [choice]), "usage": usage_of(ending)}

    def closing(self, ending: Ending) -> list[Event]:
        last = self.chunk(self._no_output(), ending.finish_reason)
        match self.usage_in:
            case UsageIn.NO_CHUNK:
                return [last]
            case UsageIn.LAST_CHUNK:
                return [{**last, "usage": usage_of(ending)}]
            case UsageIn.OWN_CHUNK:
                usage = {**self.without_choices(), "usage": usage_of(ending)}
                return [usage] if self._is_finished else [last, usage]

    def failed(self, problem: Problem) -> list[Event]:
        return [openai_error(problem)]

    def adopt(self, event: Event) -> None:
        if self._adopted is None:
            self._adopted = {k: v for k, v in event.items() if k not in ("choices", "usage")}
        choice = first_choice(event)
        self._is_finished = self._is_finished or choice.get("finish_reason") is not None

    def adopt_text(self, text: str, events: int) -> None:
        return  # later chunks do not depend on the text

    def receipt_place(self, last: Event) -> Event:
        return last

    def without_choices(self) -> Event:
        """A chunk without output."""
        return self._object(self._chunk_kind, [])

    def chunk(self, output: Mapping[str, Any], finish_reason: str | None = None) -> Event:
        return self._object(self._chunk_kind, [_choice(output, finish_reason)])

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> Event:
        if self._adopted is not None:
            return {**self._adopted, "choices": choices}
        return {
            "id": f"{self._id_prefix}{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **self.extra,
        }


def _choice(output: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, **output, "logprobs": None, "finish_reason": finish_reason}


def first_choice(event: Event) -> dict[str, Any]:
    """The one choice of a chunk; empty if it has none."""
    choices = event.get("choices")
    choice: dict[str, Any] = choices[0] if choices else {}
    return choice


def usage_of(ending: Ending) -> dict[str, Any]:
    return {
        "prompt_tokens": ending.prompt_tokens,
        "completion_tokens": ending.output_tokens,
        "total_tokens": ending.prompt_tokens + ending.output_tokens,
        "prompt_tokens_details": {"cached_tokens": ending.cached_tokens},
    }


def openai_error(problem: Problem, *, in_conversation: bool = False) -> Event:
    """The error object of OpenAI's API."""
    return {
        "error": {
            "message": (problem.to_openai if in_conversation else "") or problem.message,
            "type": problem.type,
            "param": problem.param,
            "code": problem.code,
        }
    }
