"""An answer whose streams are lost, wherever they are, reads like one that was not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingress_kit import a_profile, sse_events
from wire_kit import counts_in, final, finish_in, parts_in

from cato.core.ids import ModelName
from cato.core.topology import EngineSpec
from cato.engines.base import EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine, simulated_text
from cato.serve import continuation
from cato.serve.continuation import Answer, can_continue
from cato.serve.prompts import EngineCall
from cato.wire.answer import Ending, Part, Text, Thinking, ToolCall
from cato.wire.begun import begun_chat
from cato.wire.endpoint import Endpoint
from cato.wire.events import Event, event_bytes, events_bytes
from cato.wire.limits import limits_of
from cato.wire.reading import conversation_of
from cato.wire.transcript import deltas_of
from cato.wire.writers import writer_of

TOKENS = 14


async def test_a_long_stream_is_read_in_between_and_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(continuation, "MAX_UNREAD_BYTES", 300)
    call = a_call(Endpoint.CHAT)
    answer, sent = await with_losses(call, [9])
    whole, unbroken = await with_losses(call, [])
    assert (answer.text, answer.is_whole) == (whole.text, True)
    said, expected = events_of(sent), events_of(unbroken)
    assert told(call.endpoint, said) == told(call.endpoint, expected)
    assert {event["id"] for event in said} == {said[0]["id"]}


def a_call(
    endpoint: Endpoint = Endpoint.COMPLETIONS, *, raw: bool = True, **fields: object
) -> EngineCall:
    said = [{"role": "user", "content": "sort"}]
    asked: dict[Endpoint, dict[str, object]] = {
        Endpoint.COMPLETIONS: {"prompt": "def f(", "max_tokens": TOKENS},
        Endpoint.RESPONSES: {"input": said, "max_output_tokens": TOKENS},
    }
    body = asked.get(endpoint, {"messages": said, "max_tokens": TOKENS})
    body = {**body, "ignore_eos": True, **fields}
    return EngineCall(endpoint, body, 4, TOKENS, TOKENS, ModelName("m"), raw=raw)


async def attempt(
    answer: Answer, call: EngineCall, number: int, chunks_left: int | None
) -> list[EngineChunk]:
    """What a client gets of one attempt that is lost after so many chunks; all, if that is None."""
    engine = SimulatedEngine(a_profile(), EngineSpec(kind="simulated"), "sim")
    await engine.start()
    asked = answer.next_call(call)
    request = EngineRequest(f"r.{number}", asked.endpoint, asked.body, raw=asked.raw)
    sent: list[EngineChunk] = []
    taken = 0
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            if chunks_left is not None and taken >= chunks_left:
                break
            sent += answer.add(chunk)
            taken += 1
    await engine.stop()
    return sent


async def with_losses(call: EngineCall, losses: list[int]) -> tuple[Answer, list[EngineChunk]]:
    """The answer to `call` when attempt `i` is lost after `losses[i]` chunks."""
    answer, sent = Answer(), []
    for number, chunks_left in enumerate(losses):
        sent += await attempt(answer, call, number, chunks_left)
        assert answer.can_go_on(call)
        if answer.is_whole:
            return answer, sent
        if rest := answer.rest(call):
            return answer, [*sent, *rest]
    return answer, sent + await attempt(answer, call, len(losses), None)


def events_of(sent: list[EngineChunk]) -> list[dict[str, Any]]:
    text = b"".join(chunk.raw for chunk in sent).decode()
    return [value for _, value in sse_events(text)]


def told(endpoint: Endpoint, events: list[dict[str, Any]]) -> str:
    deltas = [delta for event in events for delta in deltas_of(endpoint, event)]
    return "".join(delta.text for delta in deltas if isinstance(delta, Text))


def form(endpoint: Endpoint, events: list[dict[str, Any]]) -> list[str]:
    """The events in words; those of text that follow each other are one."""
    kinds: list[str] = []
    for event in events:
        deltas = deltas_of(endpoint, event)
        kind = type(deltas[0]).__name__ if deltas else str(event.get("type") or event["object"])
        if kinds[-1:] != [kind] or kind != "Text":
            kinds.append(kind)
    return kinds


GENERATING = [Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES]


@pytest.mark.parametrize("endpoint", GENERATING)
@pytest.mark.parametrize("lost_after", range(TOKENS + 2))
async def test_a_stream_of_events_that_is_lost_anywhere_reads_like_a_whole_one(
    endpoint: Endpoint, lost_after: int
) -> None:
    call = a_call(endpoint)
    _, whole = await with_losses(call, [])
    answer, sent = await with_losses(call, [lost_after])
    events, expected = events_of(sent), events_of(whole)
    assert told(endpoint, events) == told(endpoint, expected) == answer.text
    assert form(endpoint, events) == form(endpoint, expected)
    assert (answer.output_tokens, answer.finish_reason) == (TOKENS, "length")
    if endpoint.has_choices:
        assert len({(e["id"], e["created"], e["object"], e["model"]) for e in events}) == 1
        assert events[-1]["usage"] == expected[-1]["usage"]
        ends = [e["choices"][0]["finish_reason"] for e in events if e["choices"]]
        assert [end for end in ends if end is not None] == ["length"]
    else:
        assert len(sent[-1].raw.split(b"\n\n")) == 2, "the last event is alone, for the receipt"
    if not endpoint.has_choices:
        data = b"".join(chunk.raw for chunk in sent)
        before = b"".join(chunk.raw for chunk in whole)
        one, other = final(endpoint, data), final(endpoint, before)
        assert parts_in(endpoint, one) == parts_in(endpoint, other)
        assert counts_in(endpoint, one) == counts_in(endpoint, other)
        assert finish_in(endpoint, one) == finish_in(endpoint, other)
    if endpoint is Endpoint.RESPONSES:
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        ids = {e.get("item_id") or e["item"]["id"] for e in events if "output_index" in e}
        assert ids == {events[-1]["response"]["output"][0]["id"]}
        assert len({e["response"]["id"] for e in events if "response" in e}) == 1


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(GENERATING),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.integers(0, 8), max_size=4),
)
async def test_text_is_the_same_whatever_is_lost(
    endpoint: Endpoint, raw: bool, prompt: str, losses: list[int]
) -> None:
    said = [{"role": "user", "content": prompt}]
    asked: dict[Endpoint, dict[str, object]] = {
        Endpoint.COMPLETIONS: {"prompt": prompt},
        Endpoint.RESPONSES: {"input": said},
    }
    raw = raw or not endpoint.has_choices
    fields = asked.get(endpoint, {"messages": said})
    call = a_call(endpoint, raw=raw, ignore_eos=False, **fields)
    whole, _ = await with_losses(call, [])
    answer, sent = await with_losses(call, losses)
    assert answer.text == whole.text == "".join(chunk.text for chunk in sent)
    assert answer.finish_reason == whole.finish_reason
    assert answer.output_tokens == pytest.approx(whole.output_tokens, abs=1)


async def test_a_completion_without_a_limit_keeps_the_engines_own() -> None:
    body = {"prompt": "x", "ignore_eos": True}
    call = replace(a_call(), body=body, prompt_tokens=1, expected_tokens=16, max_tokens=16)
    answer, _ = await with_losses(call, [5])
    assert answer.text == simulated_text(0, "x", 16)


async def test_a_clients_own_unfinished_message_is_gone_on_with() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "def"}]
    call = a_call(Endpoint.CHAT, messages=messages, continue_final_message=True)
    whole, _ = await with_losses(call, [])
    answer, _ = await with_losses(call, [3, 4])
    assert answer.text == whole.text


@pytest.mark.parametrize(
    ("content", "extended"),
    [
        ("def", "def f"),
        (None, " f"),
        # One part: vLLM writes a line break between two.
        ([{"type": "text", "text": "def"}], [{"type": "text", "text": "def f"}]),
        (["x", "def"], ["x", "def f"]),
        ([{"type": "image_url"}], [{"type": "image_url"}, {"type": "text", "text": " f"}]),
        ([], [{"type": "text", "text": " f"}]),
    ],
)
def test_a_clients_own_unfinished_message_is_extended_in_its_form(
    content: object, extended: object
) -> None:
    begun = {"role": "assistant", "content": content, "reasoning": "Hm."}
    body = {"messages": [{"role": "user", "content": "x"}, begun], "continue_final_message": True}
    *_, last = begun_chat(body, " f")["messages"]
    assert last == {**begun, "content": extended}


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1},
        {"logprobs": 0},  # of the tokens themselves
        {"response_format": {"type": "json_object"}},
        {"n": 2},
        {"include_stop_str_in_output": True},
        {"prompt": [1, 2, 3]},
    ],
)
def test_what_counts_from_the_beginning_cannot_go_on(fields: dict[str, object]) -> None:
    assert not can_continue(a_call(**fields))
    assert can_continue(a_call())
    assert can_continue(a_call(Endpoint.CHAT, logprobs=False, top_logprobs=None))
    assert can_continue(a_call(Endpoint.CHAT, response_format={"type": "text"})), "no grammar"


def chat_chunk(index: int, text: str, finish: str | None = None, tokens: int = 0) -> EngineChunk:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    event = {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}
    return EngineChunk(text, tokens, raw=event_bytes(event))


@pytest.mark.parametrize(
    "chunks",
    [
        [
            chat_chunk(0, "Yes.", tokens=1),
            chat_chunk(0, "", "stop", 1),
            chat_chunk(1, "d", None, 2),
        ],
        [chat_chunk(n % 2, f"t{n} ", tokens=n + 1) for n in range(TOKENS)],
    ],
)
def test_several_answers_are_not_closed_when_one_has_ended(chunks: list[EngineChunk]) -> None:
    call, answer = replace(a_call(Endpoint.CHAT, n=2), calls=2), Answer()
    answer.next_call(call)
    for chunk in chunks:
        answer.add(chunk)
    assert answer.rest(call) == []
    assert not answer.can_go_on(call)


def test_cached_tokens_are_those_of_the_last_chunk_as_vllm_counts_them_there() -> None:
    answer = Answer()
    call = a_call(raw=False)
    answer.next_call(call)
    for chunk in (EngineChunk("a", 1, 1_000, 0), EngineChunk("b", 2, 1_000, 992, "stop")):
        answer.add(chunk)
    assert (answer.prompt_tokens, answer.cached_tokens) == (1_000, 992)


@pytest.mark.parametrize(
    ("lost", "last", "counts"),
    [
        # The later engine also had the text so far in its cache: that is no prompt.
        (EngineChunk("abc", 200), EngineChunk("d", 2, 300, 288, "stop"), (100, 100)),
        # A later attempt counts neither the prompt nor its cache again.
        (EngineChunk("a", 1, 1_000, 0), EngineChunk("b", 1, 1_001, 1_001, "stop"), (1_000, 0)),
        # An attempt that was lost before its first token leaves no counts.
        (EngineChunk("", 0, 1_000, 992), EngineChunk("b", 1, 1_000, 16, "stop"), (1_000, 16)),
    ],
)
def test_counts_are_those_of_the_attempt_that_sent_the_first_token(
    lost: EngineChunk, last: EngineChunk, counts: tuple[int, int]
) -> None:
    answer, call = Answer(), a_call(raw=False)
    for chunk in (lost, last):
        answer.next_call(call)
        answer.add(chunk)
    assert (answer.prompt_tokens, answer.cached_tokens) == counts


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.RESPONSES, {"text": {"format": {"type": "json_schema"}}}),
        (Endpoint.RESPONSES, {"include": ["message.output_text.logprobs"]}),
        (Endpoint.MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}),
        (Endpoint.EMBEDDINGS, {}),
    ],
)
def test_grammars_and_log_probabilities_of_typed_dialects_cannot_go_on_either(
    endpoint: Endpoint, fields: dict[str, object]
) -> None:
    assert not can_continue(a_call(endpoint, **fields))
    assert can_continue(a_call(Endpoint.RESPONSES, include=["reasoning.encrypted_content"]))


# Answers of several parts, by engines that follow a plan

PLANS: dict[str, tuple[Part, ...]] = {
    "text": (Text("Let me look at the file first, then mend it."),),
    "call": (ToolCall("call_1", "read", '{"path": "a.py", "limit": 3}'),),
    "text and call": (Text("Let me look at it."), ToolCall("call_1", "read", '{"path": "a.py"}')),
    "two calls": (ToolCall("call_1", "read", '{"path": "a.py"}'), ToolCall("call_2", "ls", "{}")),
    "thinking": (Thinking("Hm. Where is it?"), Text("It is in a.py, I believe.")),
}
AGENTS = [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES]


def planned(plan: Sequence[Part], call: EngineCall, number: int) -> list[EngineChunk]:
    """What an engine with `plan` answers: one chunk an event, the last one alone."""
    conversation = conversation_of(call.endpoint, call.body)
    *_, last = conversation.messages
    begun = last.text if last.role == "assistant" else ""
    writer = writer_of(call.endpoint, f"engine{number}", "m", 1000 + number, call.body)
    ending = Ending("tool_calls" if isinstance(plan[-1], ToolCall) else "stop", 50, 0, 16)
    first = writer.opening(50, 16)
    steps: list[tuple[str, list[Event]]] = []
    for part in plan:
        pieces = [p.group() for p in re.finditer(r".{1,5}", part_text(part), re.DOTALL)]
        match part:
            case Text(text):
                assert text.startswith(begun)
                rest = text[len(begun) :]
                steps += [(p, writer.text(p)) for p in re.findall(r"(?s).{1,5}", rest)]
            case Thinking():
                steps += [("", writer.thinking(p)) for p in pieces]
            case ToolCall(id, name):
                steps.append(("", writer.tool_call(id, name)))
                steps += [("", writer.arguments(p)) for p in pieces]
    chunks = []
    for i, (text, events) in enumerate(steps):
        said = events_bytes([*first, *events])
        chunks.append(EngineChunk(text, i + 1, 50, 16, None, said))
        first = []
    ending = replace(ending, output_tokens=len(steps))
    *closing, final_event = writer.closing(ending)
    chunks += [EngineChunk("", len(steps), 50, 16, None, event_bytes(e)) for e in closing]
    reason = ending.finish_reason
    return [*chunks, EngineChunk("", len(steps), 50, 16, reason, event_bytes(final_event))]


def part_text(part: Part) -> str:
    return part.arguments if isinstance(part, ToolCall) else part.text


def served(
    endpoint: Endpoint, plan: Sequence[Part], lost_after: int
) -> tuple[Answer, list[EngineChunk], bool]:
    """The answer when the first engine is lost after so many chunks; whether it has an end."""
    call, answer = a_call(endpoint, tools=[{"type": "function", "name": "read"}]), Answer()
    if endpoint is Endpoint.MESSAGES:
        call = a_call(endpoint, tools=[{"name": "read", "input_schema": {"type": "object"}}])
    limit = "max_output_tokens" if endpoint is Endpoint.RESPONSES else "max_tokens"
    call = replace(call, body={**call.body, limit: 1000})
    sent: list[EngineChunk] = []
    for chunk in planned(plan, answer.next_call(call), 0)[:lost_after]:
        sent += answer.add(chunk)
    if answer.is_whole:
        return answer, sent, True
    if rest := answer.rest(call):
        return answer, [*sent, *rest], True
    if not answer.can_go_on(call):
        return answer, sent, False
    for chunk in planned(plan, answer.next_call(call), 1):
        sent += answer.add(chunk)
    return answer, sent, True


@pytest.mark.parametrize("endpoint", AGENTS)
@pytest.mark.parametrize("name", PLANS)
def test_an_agents_turn_that_is_lost_anywhere_is_whole_or_has_no_end(
    endpoint: Endpoint, name: str
) -> None:
    plan = PLANS[name]
    chunks = len(planned(plan, a_call(endpoint), 0))
    ends = set()
    for lost_after in range(chunks + 1):
        answer, sent, has_end = served(endpoint, plan, lost_after)
        data = b"".join(chunk.raw for chunk in sent)
        ends.add(has_end)
        if not has_end:
            # What its client has is a part of a call or a thought that no other engine can end.
            assert name != "text"
            continue
        whole = final(endpoint, data)
        parts = parts_in(endpoint, whole)
        assert parts in (list(plan), list(plan[:1])), lost_after
        if parts != list(plan):
            assert name == "two calls", "only calls after a whole one may be left to the next turn"
        if isinstance(parts[-1], ToolCall) and endpoint is not Endpoint.RESPONSES:
            assert finish_in(endpoint, whole) in ("tool_calls", "tool_use")
        prompt, cached, output = counts_in(endpoint, whole)
        assert (prompt, cached) == (50, 16)
        assert output == pytest.approx(answer.output_tokens, abs=2)
        assert sent[-1].raw.count(b"\n\n") == 1
        if endpoint is Endpoint.RESPONSES:
            events = events_of(sent)
            assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert ends == ({True} if name == "text" else {True, False})


@pytest.mark.parametrize("endpoint", AGENTS)
def test_a_turn_that_begins_with_text_goes_on_into_its_call(endpoint: Endpoint) -> None:
    plan = PLANS["text and call"]
    for lost_after in (1, 2, 3):
        _, sent, has_end = served(endpoint, plan, lost_after)
        assert has_end
        data = b"".join(chunk.raw for chunk in sent)
        assert parts_in(endpoint, final(endpoint, data)) == list(plan)
        assert b"engine0" in data
        assert b"engine1" not in data, "ids are those of the stream's beginning"


@pytest.mark.parametrize("space", ["files", "git"])
def test_a_call_that_follows_elsewhere_names_its_namespace(space: str) -> None:
    tools = [
        {"type": "namespace", "name": name, "tools": [{"name": "read"}]}
        for name in ("files", "git")
    ]
    call, answer = a_call(Endpoint.RESPONSES, tools=tools, max_output_tokens=1000), Answer()
    plan, sent = [Text("Let me look at it."), ToolCall("call_1", f"{space}__read", "{}")], []
    for chunk in planned(plan, answer.next_call(call), 0)[:2]:
        sent += answer.add(chunk)
    for chunk in planned(plan, answer.next_call(call), 1):
        sent += answer.add(chunk)
    item = events_of(sent)[-1]["response"]["output"][-1]
    assert (item["name"], item["namespace"]) == ("read", space)


def test_a_custom_tools_call_is_whole_wherever_it_is_lost() -> None:
    written = '{"looks": "like JSON"}\n*** End'
    plan = [Text("I patch it."), ToolCall("call_1", "patch", written)]
    tools = [{"type": "custom", "name": "patch"}]
    call = a_call(Endpoint.RESPONSES, tools=tools, max_output_tokens=1000)
    ends = []
    for lost_after in range(len(planned(plan, call, 0)) + 1):
        answer, sent = Answer(), []
        for chunk in planned(plan, answer.next_call(call), 0)[:lost_after]:
            sent += answer.add(chunk)
        rest = [] if answer.is_whole else answer.rest(call)
        if not answer.is_whole and not rest:
            ends.append(answer.can_go_on(call))
            if not ends[-1]:
                continue
            for chunk in planned(plan, answer.next_call(call), 1):
                rest += answer.add(chunk)
        item = events_of([*sent, *rest])[-1]["response"]["output"][-1]
        assert (item["type"], item["name"]) == ("custom_tool_call", "patch")
        assert item["input"] == written, "text that looks whole in the middle is not"
    assert set(ends) == {True, False}


@pytest.mark.parametrize("endpoint", AGENTS)
def test_a_call_that_has_begun_is_not_gone_on_with(endpoint: Endpoint) -> None:
    answer, _, has_end = served(endpoint, PLANS["call"], 3)
    assert not has_end
    assert not answer.can_go_on(a_call(endpoint))


async def test_white_space_that_a_template_would_strip_is_neither_lost_nor_doubled() -> None:
    call = a_call(Endpoint.CHAT, max_tokens=200)
    whole, pieces = await with_losses(call, [])
    ends_blank = [
        i + 1 for i, (a, b) in enumerate(pairwise(pieces)) if a.text.isspace() and b.text.strip()
    ]
    assert ends_blank, "the simulated engine writes lines"
    for lost_after in ends_blank:
        answer = Answer()
        await attempt(answer, call, 0, lost_after)
        *_, last = answer.next_call(call).body["messages"]  # type: ignore[misc]
        assert last["content"] == last["content"].rstrip()
        await attempt(answer, call, 1, None)
        assert answer.text == whole.text
        assert answer.output_tokens == whole.output_tokens


@pytest.mark.parametrize("endpoint", GENERATING)
@pytest.mark.parametrize("lost_after", range(3, 9))
async def test_the_next_engine_is_told_what_was_written_and_counted(
    endpoint: Endpoint, lost_after: int
) -> None:
    call, answer = a_call(endpoint), Answer()
    await attempt(answer, call, 0, lost_after)
    asked = answer.next_call(call)
    (limit,) = limits_of(asked.body).values()
    assert asked.begun_tokens + limit == TOKENS
    is_template = endpoint is not Endpoint.COMPLETIONS
    assert asked.begun == (answer.text.rstrip() if is_template else answer.text)


def test_a_continued_message_tells_the_stop_sequence_at_which_it_ended() -> None:
    call = a_call(Endpoint.MESSAGES, stop_sequences=["END"])
    answer = Answer()
    answer.next_call(call)
    start = {"id": "m", "content": [], "model": "m", "usage": {"input_tokens": 9}}
    block = {"type": "text", "text": ""}
    opening: list[Event] = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
    ]
    answer.add(EngineChunk("hi", 1, 9, 0, raw=events_bytes(opening)))
    answer.next_call(call)
    choice = {"index": 0, "delta": {"content": " you"}, "finish_reason": "stop"}
    last = {"id": "c", "choices": [{**choice, "stop_reason": "END"}]}
    sent = answer.add(EngineChunk(" you", 2, 11, 0, "stop", raw=event_bytes(last)))
    (stopped,) = [e["delta"] for e in events_of(sent) if e.get("type") == "message_delta"]
    assert stopped == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
