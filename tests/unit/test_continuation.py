"""An answer whose streams are lost, wherever they are, reads like one that was not."""

from __future__ import annotations

import json
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingress_kit import a_profile, sse_events

from cato.core.ids import ModelName
from cato.core.topology import EngineSpec
from cato.engines.base import Endpoint, EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine, simulated_text
from cato.serve.continuation import Answer, can_continue
from cato.serve.prompts import EngineCall

TOKENS = 14


def a_call(
    endpoint: Endpoint = Endpoint.COMPLETIONS, *, raw: bool = True, **fields: object
) -> EngineCall:
    asked: dict[str, object] = {"prompt": "def f("}
    if endpoint is Endpoint.CHAT:
        asked = {"messages": [{"role": "user", "content": "sort"}]}
    body = {**asked, "max_tokens": TOKENS, "ignore_eos": True, **fields}
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
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            if chunks_left is not None and len(sent) >= chunks_left:
                break
            sent.append(answer.add(chunk))
    await engine.stop()
    return sent


async def with_losses(call: EngineCall, losses: list[int]) -> tuple[Answer, list[EngineChunk]]:
    """The answer to `call` when attempt `i` is lost after `losses[i]` chunks."""
    answer, sent = Answer(), []
    for number, chunks_left in enumerate(losses):
        sent += await attempt(answer, call, number, chunks_left)
        assert answer.can_go_on(call)
        if (rest := answer.rest(call)) is not None:
            return answer, [*sent, rest]
    return answer, sent + await attempt(answer, call, len(losses), None)


def events_of(sent: list[EngineChunk]) -> list[dict[str, Any]]:
    text = b"".join(chunk.raw for chunk in sent).decode()
    return [value for _, value in sse_events(text)]


def told(events: list[dict[str, Any]]) -> str:
    parts = [e["choices"][0] for e in events if e["choices"]]
    return "".join(p["delta"].get("content", "") if "delta" in p else p["text"] for p in parts)


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT])
@pytest.mark.parametrize("lost_after", range(TOKENS + 2))
async def test_a_stream_of_events_that_is_lost_anywhere_reads_like_a_whole_one(
    endpoint: Endpoint, lost_after: int
) -> None:
    call = a_call(endpoint)
    _, whole = await with_losses(call, [])
    answer, sent = await with_losses(call, [lost_after])
    events, expected = events_of(sent), events_of(whole)
    assert told(events) == told(expected) == answer.text
    assert {e["id"] for e in events} == {events[0]["id"]}
    assert {e["created"] for e in events} == {events[0]["created"]}
    usage = {k: v for k, v in expected[-1]["usage"].items() if k != "prompt_tokens_details"}
    assert {k: events[-1]["usage"][k] for k in usage} == usage
    ends = [e["choices"][0]["finish_reason"] for e in events if e["choices"]]
    assert [end for end in ends if end is not None] == ["length"]
    if endpoint is Endpoint.CHAT:
        roles = [e for e in events if e["choices"] and "role" in e["choices"][0]["delta"]]
        assert len(roles) == 1
    assert (answer.output_tokens, answer.finish_reason) == (TOKENS, "length")


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([Endpoint.COMPLETIONS, Endpoint.CHAT]),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.integers(0, 8), max_size=4),
)
async def test_text_is_the_same_whatever_is_lost(
    endpoint: Endpoint, raw: bool, prompt: str, losses: list[int]
) -> None:
    asked: dict[str, object] = {"prompt": prompt}
    if endpoint is Endpoint.CHAT:
        asked = {"messages": [{"role": "user", "content": prompt}]}
    call = a_call(endpoint, raw=raw, ignore_eos=False, **asked)
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
    "fields",
    [
        {"logprobs": 1},
        {"response_format": {"type": "json_object"}},
        {"n": 2},
        {"tools": [{"type": "function"}]},
        {"prompt": [1, 2, 3]},
    ],
)
def test_what_counts_from_the_beginning_cannot_go_on(fields: dict[str, object]) -> None:
    assert not can_continue(a_call(**fields))
    assert can_continue(a_call())


@pytest.mark.parametrize("endpoint", [Endpoint.RESPONSES, Endpoint.MESSAGES, Endpoint.EMBEDDINGS])
def test_typed_events_are_not_gone_on_with(endpoint: Endpoint) -> None:
    assert not can_continue(a_call(endpoint))


@pytest.mark.parametrize(
    ("delta", "goes_on"),
    [
        ({"content": "text"}, True),
        ({"content": 'with "tool_calls":[1] quoted', "tool_calls": []}, True),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}, False),
        ({"reasoning_content": "hm"}, False),
        ({"content": "x", "reasoning": None}, True),
    ],
)
def test_output_that_the_text_does_not_hold_cannot_be_gone_on_with(
    delta: dict[str, object], goes_on: bool
) -> None:
    answer, call = Answer(), a_call(Endpoint.CHAT)
    answer.next_call(call)
    event = {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    data = json.dumps(event, separators=(",", ":")).encode()
    answer.add(EngineChunk(str(delta.get("content", "")), 1, raw=b"data: " + data + b"\n\n"))
    assert answer.can_go_on(call) == goes_on


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
