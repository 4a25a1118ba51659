"""OpenAI's Responses: https://platform.openai.com/docs/api-reference/responses-streaming.

A response that reached its token limit ends with `response.completed` and status `incomplete`, as
in vLLM: clients treat a stream without that event as broken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, assert_never

from cato.wire.answer import Arguments, Delta, Ending, Part, Problem, Text, Thinking, ToolCall
from cato.wire.events import KEEP_ALIVE, Event

# The dialect has few error codes; all but server errors forbid a retry.
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
# Codex recognizes these: it stops and shows the reason.
_KEPT_CODES = ("context_length_exceeded", "insufficient_quota")
# The item of a call to a custom tool, which has free text as its `input` instead of arguments.
_CUSTOM = "custom_tool_call"
_DELTAS: dict[str, Callable[[str], Delta]] = {
    "response.output_text.delta": Text,
    "response.reasoning_text.delta": Thinking,
    "response.function_call_arguments.delta": Arguments,
    "response.custom_tool_call_input.delta": Arguments,
}


@dataclass(slots=True)
class ResponsesWriter:
    """`created` is Unix time; fields are echoed from the request body `asked`."""

    id: str
    model: str
    created: int
    asked: Mapping[str, Any] = field(default_factory=dict)
    _sequence: int = 0
    _items: list[dict[str, Any]] = field(default_factory=list)  # finished items
    _open: Part | None = None  # without its content
    _said: list[str] = field(default_factory=list)
    _open_item: dict[str, Any] = field(default_factory=dict)
    # For an adopted stream: its response, and the events that were sent of the open item's end.
    _adopted: Mapping[str, Any] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)

    done: ClassVar[bytes] = b""
    sign: ClassVar[bytes] = KEEP_ALIVE
    ends_of_parts: ClassVar[frozenset[str]] = frozenset(
        {
            "response.function_call_arguments.done",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        }
    )

    def whole(self, parts: Sequence[Part], ending: Ending) -> dict[str, Any]:
        said = parts or (Text(""),)
        items = [_ended(self._item(i, part), part) for i, part in enumerate(said)]
        return self._response(items, ending)

    def opening(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> list[Event]:
        response = self._response([], None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def text(self, delta: str) -> list[Event]:
        is_open = isinstance(self._open, Text) and not self._ended
        begun = [] if is_open else self._begin(Text(""))
        self._said.append(delta)
        kind = "response.output_text.delta"
        return [*begun, self._event(kind, **self._place(), delta=delta, logprobs=[])]

    def thinking(self, delta: str) -> list[Event]:
        is_open = isinstance(self._open, Thinking) and not self._ended
        begun = [] if is_open else self._begin(Thinking(""))
        self._said.append(delta)
        kind = "response.reasoning_text.delta"
        return [*begun, self._event(kind, **self._place(), delta=delta)]

    def tool_call(self, id: str, name: str) -> list[Event]:
        return self._begin(ToolCall(id, name, ""))

    def arguments(self, delta: str) -> list[Event]:
        self._said.append(delta)
        is_custom = self._open_item["type"] == _CUSTOM
        field = "custom_tool_call_input" if is_custom else "function_call_arguments"
        return [self._event(f"response.{field}.delta", **self._item_place(), delta=delta)]

    def closing(self, ending: Ending) -> list[Event]:
        nothing: list[Event] = [] if self._open or self._items else self._begin(Text(""))
        ended = self._end()
        response = self._response(self._items, ending)
        return [*nothing, *ended, self._event("response.completed", response=response)]

    def failed(self, problem: Problem) -> list[Event]:
        code = "server_error"
        if problem.code in _KEPT_CODES:
            code = problem.code
        elif problem.type != code:  # a lost engine is also a 429
            code = _CODES.get(problem.status, code)
        error = {"code": code, "message": problem.to_openai or problem.message}
        # OpenAI's SDK reads no stream that does not begin with `response.created`.
        opening = [] if self._sequence else self.opening()
        response = {**self._response([], None), "status": "failed", "error": error}
        return [*opening, self._event("response.failed", response=response)]

    def adopt(self, event: Event) -> None:
        self._sequence = event.get("sequence_number", self._sequence) + 1
        match event["type"]:
            case "response.created":
                self._adopted = event["response"]
            case "response.output_item.added":
                self._open, self._open_item = _part_of(event["item"]), event["item"]
                self._said.clear()
                self._ended.clear()
            case "response.output_item.done":
                self._close(event["item"])
            case str(kind) if kind in _DELTAS:
                self._said.append(event["delta"])
            case str(kind) if kind.endswith(".done"):
                self._ended.add(kind)

    def adopt_text(self, text: str, events: int) -> None:
        self._sequence += events
        self._said.append(text)

    @staticmethod
    def is_plain(raw: bytes) -> bool:
        return raw.count(b"event: response.output_text.delta\n") == raw.count(b"\n\n")

    @staticmethod
    def deltas(event: Event) -> list[Delta]:
        kind = event.get("type")
        if kind == "response.output_item.added":
            part = _part_of(event["item"])
            return [part] if isinstance(part, ToolCall) else []
        return [_DELTAS[kind](event["delta"])] if kind in _DELTAS else []

    @staticmethod
    def finish_reason(event: Event) -> str:
        return ""  # only the last event states it

    def receipt_place(self, last: Event) -> Event:
        response: Event = last["response"]
        return response

    def _begin(self, part: Part) -> list[Event]:
        ended = self._end()
        index = len(self._items)
        self._open, self._open_item = part, self._item(index, part)
        kind = "response.output_item.added"
        events = [self._event(kind, output_index=index, item=self._open_item)]
        if not isinstance(part, ToolCall):
            kind = "response.content_part.added"
            events.append(self._event(kind, **self._place(), part=_content(part)))
        return [*ended, *events]

    def _end(self) -> list[Event]:
        """Events that end the open item, if there is one."""
        part, said = self._open, "".join(self._said)
        ends: dict[str, dict[str, Any]] = {}
        match part:
            case None:
                return []
            case Text():
                part = Text(said)
                ends["response.output_text.done"] = {**self._place(), "text": said, "logprobs": []}
            case Thinking():
                part = Thinking(said)
                ends["response.reasoning_text.done"] = {**self._place(), "text": said}
            case ToolCall(id, name):
                part = ToolCall(id, name, said)
                place, item = self._item_place(), self._open_item
                if item["type"] == _CUSTOM:
                    ends["response.custom_tool_call_input.done"] = {**place, "input": said}
                else:
                    fields = {**place, "name": item.get("name") or name, "arguments": said}
                    ends["response.function_call_arguments.done"] = fields
            case _:
                assert_never(part)
        if not isinstance(part, ToolCall):
            ends["response.content_part.done"] = {**self._place(), "part": _content(part)}
        events = [self._event(k, **fields) for k, fields in ends.items() if k not in self._ended]
        index, item = len(self._items), _ended(self._open_item, part)
        events.append(self._event("response.output_item.done", output_index=index, item=item))
        self._close(item)
        return events

    def _close(self, item: dict[str, Any]) -> None:
        self._items.append(item)
        self._open = None
        self._said.clear()
        self._ended.clear()

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self._open_item["id"], "output_index": len(self._items)}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}

    def _event(self, type: str, **fields: Any) -> Event:
        event = {"type": type, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _item(self, index: int, part: Part) -> dict[str, Any]:
        """A new item without content."""
        prefixes: dict[type[Part], str] = {Text: "msg", Thinking: "rs", ToolCall: "fc"}
        head = {"id": f"{prefixes[type(part)]}_{self.id}_{index}", "status": "in_progress"}
        match part:
            case Text():
                return {**head, "type": "message", "role": "assistant", "content": []}
            case Thinking():
                return {**head, "type": "reasoning", "summary": [], "content": []}
            case ToolCall(call_id, name):
                call = {"call_id": call_id, **self._tool(name)}
                if self._is_custom(name):
                    return {"id": f"ctc_{self.id}_{index}", "type": _CUSTOM, **call, "input": ""}
                return {**head, "type": "function_call", **call, "arguments": ""}
            case _:
                assert_never(part)

    def _tool(self, name: str) -> dict[str, str]:
        """The name of a tool, and its namespace if it was offered inside one.

        Codex uses both. The model knows the tool as vLLM writes it, `namespace__name`. Some models
        leave the namespace out: then the tool is found only if no other one has this name.
        """
        tools = self.asked.get("tools") or ()
        inner = [
            {"name": str(one.get("name")), "namespace": str(tool.get("name"))}
            for tool in tools
            if tool.get("type") == "namespace"
            for one in tool.get("tools") or ()
        ]
        if whole := [one for one in inner if name == f"{one['namespace']}__{one['name']}"]:
            return whole[-1]  # the last one, as in vLLM
        bare = [one for one in inner if name == one["name"]]
        is_outside = any(t.get("name") == name for t in tools if t.get("type") != "namespace")
        return bare[0] if len(bare) == 1 and not is_outside else {"name": name}

    def _is_custom(self, name: str) -> bool:
        tools = self.asked.get("tools") or ()
        return any(t.get("type") == "custom" and t.get("name") == name for t in tools)

    def _response(self, output: list[dict[str, Any]], ending: Ending | None) -> dict[str, Any]:
        is_cut = ending is not None and ending.finish_reason == "length"
        status = "in_progress" if ending is None else "incomplete" if is_cut else "completed"
        if self._adopted:
            end: dict[str, Any] = {"status": status, "output": [*output]}
            if ending is not None:
                end["usage"] = _usage(ending)
                end["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
            return {**self._adopted, **end}
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


def _part_of(item: Mapping[str, Any]) -> Part:
    """The part that an item starts; tool calls of every kind become `ToolCall`."""
    match item["type"]:
        case "message":
            return Text("")
        case "reasoning":
            return Thinking("")
        case kind:
            # With its namespace, as the model called it: the same name may exist in several.
            names = (item.get("namespace"), item.get("name") or kind)
            name = "__".join(part for part in names if part)
            return ToolCall(item.get("call_id") or item["id"], name, "", kind == _CUSTOM)


def _ended(item: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """A finished item with its content."""
    if isinstance(part, ToolCall):
        if item["type"] == _CUSTOM:
            return {**item, "input": part.arguments}
        return {**item, "status": "completed", "arguments": part.arguments}
    return {**item, "status": "completed", "content": [_content(part)]}


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
