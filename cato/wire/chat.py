"""OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat.

Thinking is vLLM's field `reasoning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cato.wire.answer import Arguments, Delta, Part, Problem, Text, Thinking, ToolCall
from cato.wire.choices import ChoicesWriter, first_choice, openai_error
from cato.wire.events import KEEP_ALIVE, Event


@dataclass(slots=True)
class ChatWriter(ChoicesWriter):
    sign: ClassVar[bytes] = KEEP_ALIVE
    _id_prefix: ClassVar[str] = "chatcmpl-"
    _kind: ClassVar[str] = "chat.completion"
    _chunk_kind: ClassVar[str] = "chat.completion.chunk"

    _calls: int = 0

    def opening(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> list[Event]:
        return [self._delta({"role": "assistant", "content": ""})]

    def text(self, delta: str) -> list[Event]:
        return [self._delta({"content": delta})]

    def thinking(self, delta: str) -> list[Event]:
        return [self._delta({"reasoning": delta})]

    def tool_call(self, id: str, name: str) -> list[Event]:
        call = {"index": self._calls, **_call(ToolCall(id, name, ""))}
        self._calls += 1
        return [self._delta({"tool_calls": [call]})]

    def arguments(self, delta: str) -> list[Event]:
        more = {"index": self._calls - 1, "function": {"arguments": delta}}
        return [self._delta({"tool_calls": [more]})]

    def failed(self, problem: Problem) -> list[Event]:
        return [openai_error(problem, in_conversation=True)]

    def adopt(self, event: Event) -> None:
        ChoicesWriter.adopt(self, event)
        self._calls += sum(isinstance(delta, ToolCall) for delta in self.deltas(event))

    @staticmethod
    def deltas(event: Event) -> list[Delta]:
        delta = first_choice(event).get("delta") or {}
        found: list[Delta] = []
        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
            found.append(Thinking(thought))
        if text := delta.get("content"):
            found.append(Text(text))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if name := function.get("name"):
                found.append(ToolCall(call.get("id") or "", name, ""))
            if arguments := function.get("arguments"):
                found.append(Arguments(arguments))
        return found

    def _delta(self, delta: dict[str, Any]) -> Event:
        return self.chunk({"delta": delta})

    def _no_output(self) -> dict[str, Any]:
        return {"delta": {}}

    def _content(self, parts: Sequence[Part]) -> dict[str, Any]:
        calls = [_call(part) for part in parts if isinstance(part, ToolCall)]
        text = "".join(part.text for part in parts if isinstance(part, Text))
        thought = "".join(part.text for part in parts if isinstance(part, Thinking))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if thought:
            message["reasoning"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
