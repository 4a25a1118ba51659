"""Answers of one text in the dialects Responses and Messages, for whoever writes them itself.

OpenAI's event stream: https://platform.openai.com/docs/api-reference/responses-streaming;
Anthropic's: https://docs.anthropic.com/en/api/messages-streaming. A Response that ran into its
token limit ends as `response.completed` with status `incomplete`, as vLLM's does: clients take a
stream without that event for a broken one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Event = dict[str, Any]
"""The data of one server-sent event; its `type` is the event's name."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended; `finish_reason` is OpenAI's: `stop` or `length`."""

    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


class TypedAnswer(Protocol):
    """One answer of a dialect whose events have types."""

    def whole(self, text: str, ending: Ending) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        ...

    def opening(self) -> list[Event]:
        """Before the first text."""
        ...

    def delta(self, text: str) -> list[Event]: ...

    def closing(self, text: str, ending: Ending) -> list[Event]:
        """After all of `text`; the last event has the counts or ends the stream."""
        ...


def event_bytes(event: Mapping[str, Any]) -> bytes:
    """A typed event as it is sent; a lone surrogate becomes '?'."""
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode("utf-8", "replace")


@dataclass(slots=True)
class ResponsesAnswer:
    """OpenAI's Responses; `created` is Unix time, `asked` the body that fields are echoed from."""

    id: str
    model: str
    created: int
    asked: Mapping[str, Any] = field(default_factory=dict)
    _sequence: int = 0

    def whole(self, text: str, ending: Ending) -> dict[str, Any]:
        return self._response([self._item("completed", [_part(text)])], ending)

    def opening(self) -> list[Event]:
        response, item = self._response([], None), self._item("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=_part("")),
        ]

    def delta(self, text: str) -> list[Event]:
        return [self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])]

    def closing(self, text: str, ending: Ending) -> list[Event]:
        item = self._item("completed", [_part(text)])
        return [
            self._event("response.output_text.done", **self._place, text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event("response.completed", response=self.whole(text, ending)),
        ]

    def failed(self, code: str, message: str) -> Event:
        response = {**self._response([], None), "status": "failed"}
        response["error"] = {"code": code, "message": message}
        return self._event("response.failed", response=response)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}

    def _event(self, type: str, **fields: Any) -> Event:
        event = {"type": type, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

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
            "output": output,
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "service_tier": asked.get("service_tier"),
            "temperature": asked.get("temperature"),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
            "usage": None if ending is None else _responses_usage(ending),
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _responses_usage(ending: Ending) -> dict[str, Any]:
    return {
        "input_tokens": ending.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": ending.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": ending.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": ending.prompt_tokens + ending.output_tokens,
    }


@dataclass(slots=True)
class MessagesAnswer:
    """Anthropic's Messages."""

    id: str
    model: str

    def whole(self, text: str, ending: Ending) -> dict[str, Any]:
        usage = _messages_usage(ending.prompt_tokens, ending.output_tokens, ending.cached_tokens)
        return {
            **self._message([{"type": "text", "text": text}]),
            "stop_reason": _stop_reason(ending),
            "usage": usage,
        }

    def opening(self) -> list[Event]:
        # The prompt is not counted yet; `message_delta` has the counts.
        message = {**self._message([]), "stop_reason": None, "usage": _messages_usage(0, 0, 0)}
        block = {"type": "text", "text": ""}
        return [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": block},
        ]

    def delta(self, text: str) -> list[Event]:
        delta = {"type": "text_delta", "text": text}
        return [{"type": "content_block_delta", "index": 0, "delta": delta}]

    def closing(self, text: str, ending: Ending) -> list[Event]:
        stop = {"stop_reason": _stop_reason(ending), "stop_sequence": None}
        usage = _messages_usage(ending.prompt_tokens, ending.output_tokens, ending.cached_tokens)
        return [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": stop, "usage": usage},
            {"type": "message_stop"},
        ]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_sequence": None,
        }


def _stop_reason(ending: Ending) -> str:
    return "max_tokens" if ending.finish_reason == "length" else "end_turn"


def _messages_usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, int]:
    # Anthropic counts cached tokens beside the others, not among them.
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "output_tokens": output_tokens,
        "cache_read_input_tokens": cached_tokens,
    }
