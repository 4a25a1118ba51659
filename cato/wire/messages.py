"""Anthropic's Messages: https://docs.anthropic.com/en/api/messages-streaming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, assert_never

from cato.wire.answer import Arguments, Delta, Ending, Part, Problem, Text, Thinking, ToolCall
from cato.wire.events import PING_EVENT, Event

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
# Of other statuses below 500, `invalid_request_error`; of others, `api_error`:
# https://docs.anthropic.com/en/api/errors
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
# Anthropic's SDKs then send the whole conversation, without a thread.
NO_THREADS = "thread_unsupported_request"


@dataclass(slots=True)
class MessagesWriter:
    id: str
    model: str
    _index: int = 0
    _open: type[Part] | None = None
    # For an adopted stream: its `message_delta` was sent.
    _is_finished: bool = False

    done: ClassVar[bytes] = b""
    sign: ClassVar[bytes] = PING_EVENT
    ends_of_parts: ClassVar[frozenset[str]] = frozenset({"content_block_stop"})

    def whole(self, parts: Sequence[Part], ending: Ending) -> dict[str, Any]:
        said = parts or (Text(""),)
        content = [self._block(i, part) for i, part in enumerate(said)]
        stop = _stop(ending)
        return {**self._message(content), **stop, "usage": _usage(ending)}

    def opening(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> list[Event]:
        usage = _usage(Ending("", prompt_tokens, 0, cached_tokens))
        stop = {"stop_reason": None, "stop_sequence": None}
        message = {**self._message([]), **stop, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def text(self, delta: str) -> list[Event]:
        begun = [] if self._open is Text else self._begin(Text(""))
        return [*begun, self._delta({"type": "text_delta", "text": delta})]

    def thinking(self, delta: str) -> list[Event]:
        begun = [] if self._open is Thinking else self._begin(Thinking(""))
        return [*begun, self._delta({"type": "thinking_delta", "thinking": delta})]

    def tool_call(self, id: str, name: str) -> list[Event]:
        return self._begin(ToolCall(id, name, ""))

    def arguments(self, delta: str) -> list[Event]:
        return [self._delta({"type": "input_json_delta", "partial_json": delta})]

    def closing(self, ending: Ending) -> list[Event]:
        if self._is_finished:
            return [{"type": "message_stop"}]
        nothing = [] if self._open or self._index else self._begin(Text(""))
        return [
            *nothing,
            *self._end(),
            {"type": "message_delta", "delta": _stop(ending), "usage": _usage(ending)},
            {"type": "message_stop"},
        ]

    def failed(self, problem: Problem) -> list[Event]:
        event = anthropic_error(problem)
        if problem.status == 429:
            # Claude Code 2.1.330 ends its turn on a `rate_limit_error` inside a stream; after this
            # type it asks for the rest of the answer.
            event["error"]["type"] = "overloaded_error"
        return [event]

    def adopt(self, event: Event) -> None:
        match event["type"]:
            case "content_block_start":
                self._index, self._open = event["index"], type(_part_of(event["content_block"]))
            case "content_block_stop":
                self._index, self._open = event["index"] + 1, None
            case "message_delta":
                self._is_finished = True

    def adopt_text(self, text: str, events: int) -> None:
        pass  # later events do not depend on the text

    @staticmethod
    def is_plain(raw: bytes) -> bool:
        # Quotes in JSON strings are escaped, so this matches only the type of a delta.
        return raw.count(b'"text_delta"') == raw.count(b"\n\n")

    @staticmethod
    def deltas(event: Event) -> list[Delta]:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                part = _part_of(block)
                return [part] if isinstance(part, ToolCall) else []
            case {"delta": {"type": "text_delta", "text": text}}:
                return [Text(text)]
            case {"delta": {"type": "thinking_delta", "thinking": text}}:
                return [Thinking(text)]
            case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                return [Arguments(text)]
        return []

    @staticmethod
    def finish_reason(event: Event) -> str:
        if event["type"] != "message_delta":
            return ""
        return finish_reason_of(event["delta"].get("stop_reason"))

    def receipt_place(self, last: Event) -> Event:
        return last

    def _begin(self, part: Part) -> list[Event]:
        ended = self._end()
        self._open = type(part)
        block = self._block(self._index, part)
        if isinstance(part, Thinking):
            block["signature"] = ""  # sent at the block's end
        return [
            *ended,
            {"type": "content_block_start", "index": self._index, "content_block": block},
        ]

    def _end(self) -> list[Event]:
        if self._open is None:
            return []
        events: list[Event] = []
        if self._open is Thinking:
            signature = self._signature(self._index)
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
        events.append({"type": "content_block_stop", "index": self._index})
        self._open = None
        self._index += 1
        return events

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _signature(self, index: int) -> str:
        # Clients return thinking only if it has a signature; CATO does not check it.
        return f"{self.id}-{index}"

    def _block(self, index: int, part: Part) -> dict[str, Any]:
        match part:
            case Text(text):
                return {"type": "text", "text": text}
            case Thinking(text):
                return {"type": "thinking", "thinking": text, "signature": self._signature(index)}
            case ToolCall(id, name, arguments):
                return {"type": "tool_use", "id": id, "name": name, "input": _object(arguments)}
            case _:
                assert_never(part)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
        }


def _part_of(block: dict[str, Any]) -> Part:
    """The part that a block starts; tool calls of every kind become `ToolCall`."""
    match block["type"]:
        case "text":
            return Text("")
        case "thinking" | "redacted_thinking":
            return Thinking("")
        case kind:
            return ToolCall(block.get("id") or "", block.get("name") or kind, "")


def anthropic_error(problem: Problem) -> Event:
    """The error object of Anthropic's API."""
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    kind = _ERROR_TYPES.get(problem.status, other)
    error: Event = {"type": kind, "message": problem.to_anthropic or problem.message}
    if problem.code == NO_THREADS:
        error["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": error}


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object, as this dialect requires; empty if the arguments were cut."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def finish_reason_of(stop_reason: str | None) -> str:
    """OpenAI's finish reason for a stop reason."""
    reasons = {stop: finish for finish, stop in _STOP_REASONS.items()}
    return reasons.get(stop_reason or "", "stop")


def _stop(ending: Ending) -> dict[str, Any]:
    if ending.finish_reason == "stop" and ending.stop_sequence:
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop_sequence}
    reason = _STOP_REASONS.get(ending.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(ending: Ending) -> dict[str, int]:
    # Anthropic counts cached tokens separately, not within the input tokens.
    return {
        "input_tokens": ending.prompt_tokens - ending.cached_tokens,
        "output_tokens": ending.output_tokens,
        "cache_read_input_tokens": ending.cached_tokens,
    }
