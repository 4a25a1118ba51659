"""OpenAI's Responses: https://platform.openai.com/docs/api-reference/responses-streaming.

A Response that ran into its token limit ends as `response.completed` with status `incomplete`, as
vLLM's does: clients take a stream without that event for a broken one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, assert_never

from cato.wire.answer import Ending, Part, Problem, Text, Thinking, ToolCall
from cato.wire.events import KEEP_ALIVE, Event

# The dialect knows few codes; one that is not the server's forbids a retry.
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
# Codex knows these by name: it stops, and says why.
_KEPT_CODES = ("context_length_exceeded", "insufficient_quota")


@dataclass(slots=True)
class ResponsesWriter:
    """`created` is Unix time, `asked` the body that fields are echoed from."""

    id: str
    model: str
    created: int
    asked: Mapping[str, Any] = field(default_factory=dict)
    _sequence: int = 0
    _items: list[dict[str, Any]] = field(default_factory=list)  # the ended ones
    _open: Part | None = None  # without what it says
    _said: list[str] = field(default_factory=list)

    done: ClassVar[bytes] = b""
    sign: ClassVar[bytes] = KEEP_ALIVE

    def whole(self, parts: Sequence[Part], ending: Ending) -> dict[str, Any]:
        said = parts or (Text(""),)
        items = [self._item(i, part, "completed") for i, part in enumerate(said)]
        return self._response(items, ending)

    def opening(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> list[Event]:
        response = self._response([], None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def text(self, delta: str) -> list[Event]:
        begun = [] if isinstance(self._open, Text) else self._begin(Text(""))
        self._said.append(delta)
        kind = "response.output_text.delta"
        return [*begun, self._event(kind, **self._place(), delta=delta, logprobs=[])]

    def thinking(self, delta: str) -> list[Event]:
        begun = [] if isinstance(self._open, Thinking) else self._begin(Thinking(""))
        self._said.append(delta)
        kind = "response.reasoning_text.delta"
        return [*begun, self._event(kind, **self._place(), delta=delta)]

    def tool_call(self, id: str, name: str) -> list[Event]:
        return self._begin(ToolCall(id, name, ""))

    def arguments(self, delta: str) -> list[Event]:
        self._said.append(delta)
        kind = "response.function_call_arguments.delta"
        return [self._event(kind, **self._item_place(), delta=delta)]

    def closing(self, ending: Ending) -> list[Event]:
        nothing = [] if self._open or self._items else self._begin(Text(""))
        ended = self._end()
        response = self._response(self._items, ending)
        return [*nothing, *ended, self._event("response.completed", response=response)]

    def failed(self, problem: Problem) -> list[Event]:
        code = "server_error"
        if problem.code in _KEPT_CODES:
            code = problem.code
        elif problem.type != code:  # a lost engine is 429, too
            code = _CODES.get(problem.status, code)
        error = {"code": code, "message": problem.with_numbers or problem.message}
        response = {**self._response([], None), "status": "failed", "error": error}
        return [self._event("response.failed", response=response)]

    def receipt_place(self, last: Event) -> Event:
        response: Event = last["response"]
        return response

    def _begin(self, part: Part) -> list[Event]:
        ended = self._end()
        self._open = part
        index = len(self._items)
        item = self._item(index, part, "in_progress")
        events = [self._event("response.output_item.added", output_index=index, item=item)]
        if not isinstance(part, ToolCall):
            kind = "response.content_part.added"
            events.append(self._event(kind, **self._place(), part=_content(part)))
        return [*ended, *events]

    def _end(self) -> list[Event]:
        part, said = self._open, "".join(self._said)
        if part is None:
            return []
        index, place = len(self._items), self._place()
        match part:
            case Text():
                whole: Part = Text(said)
                kind = "response.output_text.done"
                events = [self._event(kind, **place, text=said, logprobs=[])]
            case Thinking():
                whole = Thinking(said)
                events = [self._event("response.reasoning_text.done", **place, text=said)]
            case ToolCall():
                whole = ToolCall(part.id, part.name, said)
                kind = "response.function_call_arguments.done"
                fields = {**self._item_place(), "name": part.name, "arguments": said}
                events = [self._event(kind, **fields)]
            case _:
                assert_never(part)
        if not isinstance(whole, ToolCall):
            kind = "response.content_part.done"
            events.append(self._event(kind, **place, part=_content(whole)))
        item = self._item(index, whole, "completed")
        events.append(self._event("response.output_item.done", output_index=index, item=item))
        self._items.append(item)
        self._open = None
        self._said.clear()
        return events

    def _item_place(self) -> dict[str, Any]:
        assert self._open is not None, "no item is open"
        index = len(self._items)
        return {"item_id": self._item_id(index, self._open), "output_index": index}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}

    def _event(self, type: str, **fields: Any) -> Event:
        event = {"type": type, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _item_id(self, index: int, part: Part) -> str:
        prefixes = {Text: "msg", Thinking: "rs", ToolCall: "fc"}
        return f"{prefixes[type(part)]}_{self.id}_{index}"

    def _item(self, index: int, part: Part, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(index, part), "status": status}
        is_done = status == "completed"
        match part:
            case Text():
                content = [_content(part)] if is_done else []
                return {**head, "type": "message", "role": "assistant", "content": content}
            case Thinking():
                content = [_content(part)] if is_done else []
                return {**head, "type": "reasoning", "summary": [], "content": content}
            case ToolCall(id, name, arguments):
                call = {"call_id": id, "name": name, "arguments": arguments}
                return {**head, "type": "function_call", **call}
            case _:
                assert_never(part)

    def _response(self, output: list[dict[str, Any]], ending: Ending | None) -> dict[str, Any]:
        is_cut = ending is not None and ending.finish_reason == "length"
        status = "in_progress" if ending is None else "incomplete" if is_cut else "completed"
        asked = self.asked
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": self.model,
            "output": [*output],
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "service_tier": asked.get("service_tier"),
            "temperature": asked.get("temperature"),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
            "usage": None if ending is None else _usage(ending),
        }


def _content(part: Text | Thinking) -> dict[str, Any]:
    if isinstance(part, Thinking):
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _usage(ending: Ending) -> dict[str, Any]:
    return {
        "input_tokens": ending.prompt_tokens,
        "input_tokens_details": {"cached_tokens": ending.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": ending.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": ending.prompt_tokens + ending.output_tokens,
    }
