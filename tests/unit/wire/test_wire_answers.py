"""What the writers write is what the makers' SDKs read: types, streams put together, counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from wire_kit import SAID, a_claude, an_openai, counts_in, final, finish_in, parts_in

from cato.wire.answer import AnswerWriter, Ending, Part, Text, Thinking, ToolCall
from cato.wire.choices import UsageIn
from cato.wire.endpoint import Endpoint
from cato.wire.events import Event, events_bytes, to_json
from cato.wire.messages import anthropic_error
from cato.wire.writers import writer_of

ARGUMENTS = '{"path": "a.py", "limit": 3}'
PARTS: tuple[Part, ...] = (
    Thinking("Hm, read it."),
    Text("I read the file."),
    ToolCall("call_1", "read", ARGUMENTS),
    ToolCall("call_2", "grep", "{}"),
)
ENDING = Ending("tool_calls", 100, 20, 64)
KINDS: dict[Endpoint, tuple[Any, Any]] = {
    Endpoint.COMPLETIONS: (Completion, Completion),
    Endpoint.CHAT: (ChatCompletion, ChatCompletionChunk),
    Endpoint.RESPONSES: (Response, ResponseStreamEvent),
    Endpoint.MESSAGES: (Message, RawMessageStreamEvent),
}


@dataclass(frozen=True)
class ALostEngine:
    """A failure as the ingress knows it."""

    status: int = 503
    message: str = "The engine was lost."
    type: str = "server_error"
    code: str | None = "engine_lost"
    param: str | None = None
    to_openai: str = ""
    to_anthropic: str = ""


def a_writer(endpoint: Endpoint, usage_in: UsageIn = UsageIn.OWN_CHUNK) -> AnswerWriter:
    return writer_of(endpoint, "r1", "m", 1_700_000_000, {}, usage_in=usage_in)


def stream(writer: AnswerWriter, parts: Sequence[Part], ending: Ending = ENDING) -> list[Event]:
    """The events of `parts`, in pieces of five characters."""
    events = writer.opening(ending.prompt_tokens, ending.cached_tokens)
    for part in parts:
        if isinstance(part, ToolCall):
            events += writer.tool_call(part.id, part.name)
            for piece in pieces(part.arguments):
                events += writer.arguments(piece)
        else:
            say = writer.text if isinstance(part, Text) else writer.thinking
            for piece in pieces(part.text):
                events += say(piece)
    return [*events, *writer.closing(ending)]


def pieces(text: str) -> list[str]:
    return [text[i : i + 5] for i in range(0, len(text), 5)]


def strict(kind: Any, value: Any) -> Any:
    """`value` as `kind`, from JSON: fails unless every field has exactly the declared type."""
    return TypeAdapter(kind).validate_json(to_json(value), strict=True)


def parts_for(endpoint: Endpoint) -> tuple[Part, ...]:
    return PARTS[1:2] if endpoint is Endpoint.COMPLETIONS else PARTS


@pytest.mark.parametrize("endpoint", list(KINDS))
def test_answers_and_events_have_the_types_of_the_makers_sdk(endpoint: Endpoint) -> None:
    whole, event = KINDS[endpoint]
    parts, ending = PARTS, ENDING
    if endpoint is Endpoint.COMPLETIONS:
        parts, ending = PARTS[1:2], Ending("stop", 100, 20, 64)
    events = stream(a_writer(endpoint), parts, ending)
    strict(whole, a_writer(endpoint).whole(parts, ending))
    for value in events:
        strict(event, finished(value) if endpoint is Endpoint.COMPLETIONS else value)


def finished(chunk: Event) -> Event:
    """The SDK has one type for completions and their chunks, which have no finish reason yet."""
    choices = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in chunk["choices"]]
    return {**chunk, "choices": choices}


MIXES = [PARTS, PARTS[:2], PARTS[2:], PARTS[1:2], PARTS[1:3], ()]


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES])
@pytest.mark.parametrize("parts", MIXES)
def test_a_stream_is_put_together_by_the_makers_sdk(
    endpoint: Endpoint, parts: tuple[Part, ...]
) -> None:
    whole = strict(KINDS[endpoint][0], a_writer(endpoint).whole(parts, ENDING))
    answer = final(endpoint, events_bytes(stream(a_writer(endpoint), parts)))
    for told in (answer, whole):
        assert parts_in(endpoint, told) == list(parts)
        assert counts_in(endpoint, told) == (100, 64, 20)
    assert finish_in(endpoint, answer) == finish_in(endpoint, whole)


@pytest.mark.parametrize("parts", MIXES)
def test_a_streamed_response_ends_with_the_whole_one(parts: tuple[Part, ...]) -> None:
    events = stream(a_writer(Endpoint.RESPONSES), parts)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[-1]["response"] == a_writer(Endpoint.RESPONSES).whole(parts, ENDING)


@pytest.mark.parametrize("name", ["spawn", "agents__spawn"])
def test_a_call_of_a_tool_in_a_namespace_names_both(name: str) -> None:
    offered = {"type": "namespace", "name": "agents", "tools": [{"name": "spawn"}]}
    asked = {"tools": [{"type": "function", "name": "read"}, offered]}
    writer = writer_of(Endpoint.RESPONSES, "r1", "m", 0, asked)
    parts = (ToolCall("c1", name, "{}"), ToolCall("c2", "read", "{}"))
    events = stream(writer, parts)
    items = [e["item"] for e in events if e["type"].startswith("response.output_item.")]
    told = [(item["name"], item.get("namespace")) for item in items]
    assert told == [("spawn", "agents")] * 2 + [("read", None)] * 2
    assert events[-1]["response"]["output"] == items[1::2]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("git__read", ("read", "git")),
        ("files__read", ("read", "files")),
        ("read", ("read", None)),  # offered outside as well
        ("find", ("find", None)),  # in two namespaces: which one is not known
        ("spawn", ("spawn", "git")),
    ],
)
def test_a_call_goes_to_the_namespace_that_it_names(name: str, told: tuple[str, str]) -> None:
    files = {"type": "namespace", "name": "files", "tools": [{"name": "read"}, {"name": "find"}]}
    git = {"type": "namespace", "name": "git", "tools": [{"name": "read"}, {"name": "find"}]}
    git = {**git, "tools": [*git["tools"], {"name": "spawn"}]}
    asked = {"tools": [{"type": "function", "name": "read"}, files, git]}
    writer = writer_of(Endpoint.RESPONSES, "r1", "m", 0, asked)
    events = stream(writer, [ToolCall("c1", name, "{}")])
    items = [e["item"] for e in events if e["type"].startswith("response.output_item.")]
    assert [(item["name"], item.get("namespace")) for item in items] == [told] * 2
    (done,) = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert done["name"] == told[0], "as in the item"


def test_a_call_of_a_custom_tool_has_free_text_as_its_input() -> None:
    asked = {"tools": [{"type": "custom", "name": "patch"}]}
    said = "*** Begin Patch"
    writer = writer_of(Endpoint.RESPONSES, "r1", "m", 0, asked)
    events = stream(writer, [ToolCall("c1", "patch", said)])
    for event in events:
        strict(ResponseStreamEvent, event)
    kinds = [e["type"] for e in events if "tool_call" in e["type"]]
    field = "response.custom_tool_call_input"
    assert kinds == [f"{field}.delta"] * len(pieces(said)) + [f"{field}.done"]
    (item,) = final(Endpoint.RESPONSES, events_bytes(events)).output
    assert (item.type, item.call_id, item.name, item.input) == (
        *("custom_tool_call", "c1", "patch"),
        said,
    )


def test_each_dialect_says_that_tools_are_called() -> None:
    said = {
        endpoint: finish_in(endpoint, final(endpoint, events_bytes(stream(a_writer(endpoint), ()))))
        for endpoint in (Endpoint.CHAT, Endpoint.MESSAGES)
    }
    assert said == {Endpoint.CHAT: "tool_calls", Endpoint.MESSAGES: "tool_use"}


def test_a_chat_says_its_counts_where_it_is_asked_to() -> None:
    def ends(usage_in: UsageIn) -> list[tuple[bool, bool]]:
        """Of the last two chunks: whether each has a choice, and counts."""
        events = stream(a_writer(Endpoint.CHAT, usage_in), PARTS[1:2])
        return [(bool(e["choices"]), "usage" in e) for e in events[-2:]]

    assert ends(UsageIn.NO_CHUNK) == [(True, False), (True, False)]
    assert ends(UsageIn.LAST_CHUNK) == [(True, False), (True, True)]
    assert ends(UsageIn.OWN_CHUNK) == [(True, False), (False, True)]


def test_a_message_that_was_cut_inside_a_call_has_no_input_for_it() -> None:
    cut = (ToolCall("call_1", "read", '{"path": "a'),)
    value = a_writer(Endpoint.MESSAGES).whole(cut, Ending("length", 9, 9))
    assert (value["content"][0]["input"], value["stop_reason"]) == ({}, "max_tokens")


def test_a_response_that_was_cut_is_incomplete() -> None:
    value = a_writer(Endpoint.RESPONSES).whole(PARTS[1:2], Ending("length", 9, 9))
    assert value["status"] == "incomplete"
    assert value["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("endpoint", list(KINDS))
def test_a_stream_that_failed_makes_the_sdk_raise(endpoint: Endpoint) -> None:
    writer = a_writer(endpoint)
    begun = [*writer.opening(), *writer.text("a"), *writer.failed(ALostEngine())]
    data = events_bytes(begun) + writer.done
    sdk = an_openai(data)
    ask: dict[Endpoint, Callable[[], Any]] = {
        Endpoint.COMPLETIONS: lambda: sdk.completions.create(model="m", prompt="x", stream=True),
        Endpoint.CHAT: lambda: sdk.chat.completions.create(model="m", messages=SAID, stream=True),
        Endpoint.RESPONSES: lambda: sdk.responses.create(model="m", input="x", stream=True),
        Endpoint.MESSAGES: lambda: a_claude(data).messages.create(
            model="m", max_tokens=9, messages=SAID, stream=True
        ),
    }
    answer = ask[endpoint]()
    if endpoint is Endpoint.RESPONSES:  # its SDK hands the event on
        *_, told = answer
        assert (told.type, told.response.error.code) == ("response.failed", "server_error")
        assert told.response.error.message == "The engine was lost."
        return
    with pytest.raises((openai.APIError, anthropic.APIError), match="The engine was lost"):
        list(answer)


def test_a_response_that_fails_before_its_first_output_is_opened_for_the_sdks_helper() -> None:
    events = a_writer(Endpoint.RESPONSES).failed(ALostEngine())
    assert [e["sequence_number"] for e in events] == [0, 1, 2]
    with an_openai(events_bytes(events)).responses.stream(model="m", input="x") as stream:
        told = [event.type for event in stream]
    assert told == ["response.created", "response.in_progress", "response.failed"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "api_error"),
        (501, "api_error"),
        (502, "api_error"),
        (503, "api_error"),
        (504, "timeout_error"),
    ],
)
def test_an_error_of_messages_has_the_documented_kind(status: int, kind: str) -> None:
    assert anthropic_error(ALostEngine(status=status))["error"]["type"] == kind


def test_claude_code_asks_for_the_rest_of_a_stream_whose_engine_was_lost() -> None:
    """It ends its turn at a `rate_limit_error` in a stream, and goes on after this one."""
    [event] = a_writer(Endpoint.MESSAGES).failed(ALostEngine(status=429))
    assert event["error"]["type"] == "overloaded_error"


@given(st.text())
def test_any_text_can_be_sent(text: str) -> None:
    data = events_bytes(a_writer(Endpoint.COMPLETIONS).text(f"{text}\ud800"))
    value = json.loads(data.removeprefix(b"data: "))
    assert value["choices"][0]["text"] == f"{text}?"
