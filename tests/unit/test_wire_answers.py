"""What the writers write is what the makers' SDKs read: types, streams put together, counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cato.wire.answer import AnswerWriter, Ending, Part, Text, Thinking, ToolCall
from cato.wire.choices import UsageIn
from cato.wire.endpoint import Endpoint
from cato.wire.events import Event, events_bytes, to_json
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
    with_numbers: str = ""
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


def an_http(events: list[Event], done: bytes = b"", library: Any = httpx) -> Any:
    """A client that gets these events, whatever it asks for."""
    data = events_bytes(events) + done
    headers = {"Content-Type": "text/event-stream"}
    reply = library.Response(200, content=data, headers=headers)
    return library.Client(transport=library.MockTransport(lambda request: reply))


def a_claude(events: list[Event]) -> anthropic.Anthropic:
    http = an_http(events, library=httpx2)
    return anthropic.Anthropic(base_url="http://x", api_key="x", http_client=http, max_retries=0)


def text_in(parts: Sequence[Part], kind: type[Text] | type[Thinking] = Text) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def calls_in(parts: Sequence[Part]) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]


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


@pytest.mark.parametrize("parts", MIXES)
def test_a_streamed_response_is_put_together_by_its_sdk(parts: tuple[Part, ...]) -> None:
    whole = a_writer(Endpoint.RESPONSES).whole(parts, ENDING)
    events = stream(a_writer(Endpoint.RESPONSES), parts)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[-1]["response"] == whole
    sdk = openai.OpenAI(base_url="http://x", api_key="x", http_client=an_http(events))
    with sdk.responses.stream(model="m", input="x") as answer:
        final = answer.get_final_response()
    assert final.output_text == text_in(parts)
    calls = [item for item in final.output if item.type == "function_call"]
    told = [ToolCall(c.call_id, c.name, c.arguments) for c in calls]
    assert told == calls_in(parts)
    thoughts = [item for item in final.output if item.type == "reasoning"]
    assert "".join(c.text for t in thoughts for c in t.content or ()) == text_in(parts, Thinking)
    assert final.usage is not None
    assert final.usage.input_tokens_details.cached_tokens == 64
    assert (final.usage.input_tokens, final.usage.output_tokens) == (100, 20)


@pytest.mark.parametrize("parts", MIXES)
def test_a_streamed_message_is_put_together_by_its_sdk(parts: tuple[Part, ...]) -> None:
    events = stream(a_writer(Endpoint.MESSAGES), parts)
    ask: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    with a_claude(events).messages.stream(**ask) as answer:
        final = answer.get_final_message()
    whole = strict(Message, a_writer(Endpoint.MESSAGES).whole(parts, ENDING))
    assert [b.to_dict() for b in final.content] == [b.to_dict() for b in whole.content]
    assert (final.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    # Anthropic's count is without what was cached.
    usage = final.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (36, 64)
    assert usage.output_tokens == whole.usage.output_tokens == 20


@pytest.mark.parametrize("parts", MIXES)
def test_a_streamed_chat_is_put_together_by_its_sdk(parts: tuple[Part, ...]) -> None:
    writer = a_writer(Endpoint.CHAT)
    http = an_http(stream(writer, parts), writer.done)
    sdk = openai.OpenAI(base_url="http://x", api_key="x", http_client=http)
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with sdk.chat.completions.stream(**ask) as answer:
        final = answer.get_final_completion()
    message = final.choices[0].message
    whole = strict(ChatCompletion, a_writer(Endpoint.CHAT).whole(parts, ENDING))
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert (message.content or "") == (whole.choices[0].message.content or "") == text_in(parts)
    for said in (message, whole.choices[0].message):
        calls: Any = said.tool_calls or ()
        told = [ToolCall(c.id, c.function.name, c.function.arguments) for c in calls]
        assert told == calls_in(parts)
        assert (said.model_extra or {}).get("reasoning", "") == text_in(parts, Thinking)
    assert final.usage is not None
    assert final.usage.prompt_tokens_details is not None
    assert final.usage.prompt_tokens_details.cached_tokens == 64
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (100, 20)


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
    sdk = openai.OpenAI(
        base_url="http://x", api_key="x", http_client=an_http(begun, writer.done), max_retries=0
    )
    said: Any = [{"role": "user", "content": "x"}]
    ask: dict[Endpoint, Callable[[], Any]] = {
        Endpoint.COMPLETIONS: lambda: sdk.completions.create(model="m", prompt="x", stream=True),
        Endpoint.CHAT: lambda: sdk.chat.completions.create(model="m", messages=said, stream=True),
        Endpoint.RESPONSES: lambda: sdk.responses.create(model="m", input="x", stream=True),
        Endpoint.MESSAGES: lambda: a_claude(begun).messages.create(
            model="m", max_tokens=9, messages=said, stream=True
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


@given(st.text())
def test_any_text_can_be_sent(text: str) -> None:
    data = events_bytes(a_writer(Endpoint.COMPLETIONS).text(f"{text}\ud800"))
    value = json.loads(data.removeprefix(b"data: "))
    assert value["choices"][0]["text"] == f"{text}?"
