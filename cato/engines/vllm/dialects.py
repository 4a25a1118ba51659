"""Parse vLLM's answers in dialects with typed events, and answers without tokens. Pure.

They are passed through, so only text, counts, the end and errors are read.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from cato.core.errors import EngineError
from cato.engines.base import Endpoint, EngineChunk
from cato.engines.vllm.stream import EventStream, aborted, stream_error, whole_answer
from cato.wire.answer import Delta, Text
from cato.wire.events import Event
from cato.wire.messages import MessagesWriter, finish_reason_of
from cato.wire.responses import ResponsesWriter


class TypedEvents(ABC):
    """Turns the bytes of a typed event stream into chunks with those bytes; see `EventStream`.

    Events before the first output are held back until it comes: they carry no output, and a
    request that fails meanwhile can still be refused or moved to another replica. Each output
    event counts as one token until the engine reports a count. The last event has its own chunk.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._has_output = False
        self._passed: list[bytes] = []
        self._text = ""
        self._output_tokens = 0
        self._prompt_tokens = -1
        self._cached_tokens = -1
        self._finish_reason = "stop"
        self.is_finished = False

    def feed(self, data: bytes) -> list[EngineChunk]:
        """Zero to two chunks; raises the `EngineError` that the stream reports."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        chunks: list[EngineChunk] = []
        for event in events:
            _, _, text = event.partition(b"data: ")
            if not text:
                continue  # a comment
            is_last = self._read(json.loads(text))
            if is_last:
                chunks += self._take()
                self.is_finished = True
            self._passed.append(event + b"\n\n")
            if is_last:
                chunks.append(self._last())
        return [*chunks, *(self._take() if self._has_output else ())]

    @abstractmethod
    def _read(self, event: Event) -> bool:
        """Record the contents of `event`; returns whether it is the last."""

    def _note_output(self, deltas: Iterable[Delta]) -> None:
        self._has_output = True
        self._output_tokens += 1
        self._text += "".join(delta.text for delta in deltas if isinstance(delta, Text))

    def _take(self) -> list[EngineChunk]:
        if not self._passed:
            return []
        raw, self._passed = b"".join(self._passed), []
        text, self._text = self._text, ""
        return [
            EngineChunk(
                text, self._output_tokens, self._prompt_tokens, self._cached_tokens, None, raw
            )
        ]

    def _last(self) -> EngineChunk:
        raw, self._passed = b"".join(self._passed), []
        return EngineChunk(
            "",
            self._output_tokens,
            max(0, self._prompt_tokens),
            max(0, self._cached_tokens),
            self._finish_reason,
            raw,
        )


class ResponsesEvents(TypedEvents):
    """OpenAI's Responses."""

    def _read(self, event: Event) -> bool:
        kind = str(event.get("type"))
        if kind.endswith(".delta"):
            self._note_output(ResponsesWriter.deltas(event))
        elif kind == "response.failed":
            raise stream_error(event["response"].get("error"))
        elif kind == "error" or "error" in event:
            raise stream_error(event.get("error", event))
        elif kind in ("response.completed", "response.incomplete"):
            response = event["response"]
            self._prompt_tokens, self._output_tokens, self._cached_tokens = _counts(
                response.get("usage") or {}
            )
            self._finish_reason = _responses_finish(response)
            return True
        return False


class MessagesEvents(TypedEvents):
    """Anthropic's Messages."""

    def _read(self, event: Event) -> bool:
        match event.get("type"):
            case "content_block_delta":
                self._note_output(MessagesWriter.deltas(event))
            case "message_start":
                self._prompt_tokens, _, self._cached_tokens = _counts(
                    event["message"].get("usage") or {}
                )
            case "message_delta":
                self._prompt_tokens, self._output_tokens, self._cached_tokens = _counts(
                    event["usage"]
                )
                self._finish_reason = _messages_finish(event["delta"])
            case "message_stop":
                return True
            case "error":
                raise stream_error(event.get("error"))
        return False


def _counts(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Prompt, output and cached tokens from any dialect's usage."""
    names = ("input_tokens", "prompt_tokens", "count")
    prompt = next((usage[name] for name in names if name in usage), 0) or 0
    output = usage.get("output_tokens", usage.get("completion_tokens")) or 0
    # Anthropic's `input_tokens` excludes tokens read from the cache and tokens written to it.
    read = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    details = usage.get("input_tokens_details") or {}
    return prompt + read + written, output, read or details.get("cached_tokens") or 0


def _responses_finish(response: Mapping[str, Any]) -> str:
    if response.get("status") == "cancelled":
        raise aborted()
    return "length" if response.get("status") == "incomplete" else "stop"


def _messages_finish(ended: Mapping[str, Any]) -> str:
    reason = ended.get("stop_reason")
    if reason is None:  # vLLM has no other word for it in this dialect
        raise aborted()
    return finish_reason_of(reason)


def events_of(
    endpoint: Endpoint, *, raw: bool, continuous_usage: bool
) -> EventStream | TypedEvents:
    """The parser for a streamed answer of `endpoint`."""
    match endpoint:
        case Endpoint.RESPONSES:
            return ResponsesEvents()
        case Endpoint.MESSAGES:
            return MessagesEvents()
        case _:
            return EventStream(raw=raw, continuous_usage=continuous_usage)


def answer_of(endpoint: Endpoint, body: bytes) -> EngineChunk:
    """The single chunk of an answer of `endpoint` that was not streamed."""
    if endpoint.has_choices:
        return whole_answer(body)
    try:
        value = json.loads(body)
        prompt, output, cached = _counts(value.get("usage") or value)
        match endpoint:
            case Endpoint.RESPONSES:
                items = [item for item in value["output"] if item["type"] == "message"]
                parts = [part for item in items for part in item["content"]]
                finish_reason = _responses_finish(value)
            case Endpoint.MESSAGES:
                parts = value["content"]
                finish_reason = _messages_finish(value)
            case _:
                parts, finish_reason = [], "stop"
        text = "".join(part.get("text") or "" for part in parts)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise EngineError(f"unreadable answer from the engine: {body[:200]!r}") from exc
    return EngineChunk(text, output, prompt, cached, finish_reason, body)
