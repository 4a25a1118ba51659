"""OpenAI's completions: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cato.wire.answer import Delta, Part, Text
from cato.wire.choices import ChoicesWriter, first_choice
from cato.wire.events import Event

COMPLETION_ID_PREFIX = "cmpl-"


@dataclass(slots=True)
class CompletionsWriter(ChoicesWriter):
    """A completion can hold text only; anything else raises `ValueError`."""

    _id_prefix: ClassVar[str] = COMPLETION_ID_PREFIX
    _kind: ClassVar[str] = "text_completion"
    _chunk_kind: ClassVar[str] = "text_completion"

    def opening(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> list[Event]:
        return []

    def text(self, delta: str) -> list[Event]:
        return [self.chunk({"text": delta})]

    def thinking(self, delta: str) -> list[Event]:
        raise ValueError("a completion cannot hold thinking")

    def tool_call(self, id: str, name: str) -> list[Event]:
        raise ValueError("a completion cannot hold a tool call")

    def arguments(self, delta: str) -> list[Event]:
        raise ValueError("a completion cannot hold a tool call")

    def _content(self, parts: Sequence[Part]) -> dict[str, Any]:
        texts = [part for part in parts if isinstance(part, Text)]
        if len(texts) != len(parts):
            raise ValueError("a completion can hold text only")
        return {"text": "".join(part.text for part in texts)}

    @staticmethod
    def deltas(event: Event) -> list[Delta]:
        text = first_choice(event).get("text")
        return [Text(text)] if text else []

    def _no_output(self) -> dict[str, Any]:
        return {"text": ""}
