"""The simulated engine: the conformance kit, its text, its timings.

These tests run in real time, with costs of fractions of a millisecond; none asserts on speed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from kits.engine_conformance import (
    PROMPT,
    EngineConformance,
    a_request,
    collect,
    events_of,
    text_of,
)

from cato.core.errors import ContextLengthError, EngineError
from cato.core.ids import ModelName
from cato.core.prefix_cache import BLOCK_TOKENS
from cato.core.profile import Profile
from cato.core.topology import AdapterSpec, EngineSpec
from cato.engines.base import Endpoint
from cato.engines.simulated import SimulatedEngine, simulated_text, simulated_tokens
from cato.engines.simulated.asked import Prompt
from cato.engines.simulated.batch import Batch, Run
from cato.wire.reading import conversation_of

QUICK = Profile(
    model="demo",
    accelerator="cpu",
    engine="simulated",
    prefill_per_batch_token_s=2e-6,
    prefill_per_request_s=0.0,
    prefill_per_token_s=0.0,
    prefill_base_s=1e-4,
    decode_per_context_token_s=0.0,
    decode_per_request_s=1e-4,
    decode_base_s=2e-3,
    kv_capacity_tokens=8000,
    max_running=16,
    context_tokens=1000,
    load_s=0.0,
)
FREE = replace(
    QUICK,
    prefill_per_batch_token_s=0.0,
    prefill_base_s=0.0,
    decode_per_request_s=0.0,
    decode_base_s=0.0,
)


def an_engine(profile: Profile = QUICK, *, slots: int = 4, seed: int = 7) -> SimulatedEngine:
    return SimulatedEngine(profile, EngineSpec("simulated", max_num_seqs=slots, seed=seed))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[SimulatedEngine]:
    engine = an_engine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.mark.asyncio(loop_scope="module")
class TestSimulatedEngine(EngineConformance):
    async def kill(self, engine: SimulatedEngine) -> None:
        await engine.kill()


@given(st.integers(), st.text(max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_text_goes_on_from_where_it_was_cut(seed: int, prompt: str, n: int, more: int) -> None:
    begun = simulated_text(seed, prompt, n)
    whole = simulated_text(seed, prompt, n + more)
    assert begun + simulated_text(seed, prompt + begun, more) == whole


def test_text_depends_on_seed_and_prompt() -> None:
    texts = {simulated_text(s, p, 20) for s in (1, 2) for p in ("a", "b")}
    assert len(texts) == 4


async def test_answer_is_the_exported_function() -> None:
    engine = an_engine(FREE, seed=3)
    await engine.start()
    chunks = await collect(engine, a_request(prompt="x = ", max_tokens=40, ignore_eos=True))
    assert text_of(chunks) == simulated_text(3, "x = ", 40)
    await engine.stop()


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT])
async def test_continued_elsewhere_gives_the_uninterrupted_answer(endpoint: Endpoint) -> None:
    here, there = an_engine(FREE), an_engine(FREE)
    await here.start()
    await there.start()
    (whole,) = await collect(here, a_request(endpoint=endpoint, max_tokens=400, stream=False))
    begun = await collect(here, a_request(endpoint=endpoint, max_tokens=10, min_tokens=10))
    sent = text_of(begun)
    if endpoint is Endpoint.COMPLETIONS:
        rest = a_request({"prompt": "def read_config(path):\n" + sent, "max_tokens": 390})
    else:
        user = {"role": "user", "content": "Write a function that reads a file."}
        messages = [user, {"role": "assistant", "content": sent}]
        body = {"messages": messages, "max_tokens": 390, "continue_final_message": True}
        rest = a_request(body, endpoint=endpoint)
    continued = await collect(there, rest)
    if whole.output_tokens > 10:
        assert sent + text_of(continued) == whole.text
        assert continued[-1].finish_reason == whole.finish_reason
    await here.stop()
    await there.stop()


async def test_answers_end_by_themselves_unless_told_not_to() -> None:
    engine = an_engine(FREE, slots=16)
    await engine.start()
    bodies = [{"prompt": f"def f{i}():\n", "max_tokens": 900} for i in range(20)]
    ended = [(await collect(engine, a_request(body)))[-1] for body in bodies]
    assert len({last.output_tokens for last in ended}) > 10
    assert {last.finish_reason for last in ended} >= {"stop"}
    (forced,) = await collect(engine, a_request(bodies[0], stream=False, ignore_eos=True))
    assert (forced.output_tokens, forced.finish_reason) == (900, "length")
    (at_least,) = await collect(engine, a_request(bodies[0], stream=False, min_tokens=500))
    assert at_least.output_tokens >= 500
    await engine.stop()


async def test_completion_has_sixteen_tokens_unless_asked() -> None:
    engine = an_engine(FREE)
    await engine.start()
    (answer,) = await collect(engine, a_request({"prompt": "x", "ignore_eos": True}, stream=False))
    assert answer.output_tokens == 16
    await engine.stop()


async def test_stop_string_may_span_tokens_and_stay_in_the_text() -> None:
    engine = an_engine(FREE, seed=1)
    await engine.start()
    tokens = [t for t, _ in zip(simulated_tokens(1, "y"), range(12), strict=False)]
    stop = tokens[8][-1:] + tokens[9][:1]
    body = {"prompt": "y", "max_tokens": 60, "stop": stop, "ignore_eos": True}
    text = simulated_text(1, "y", 60)
    assert text_of(await collect(engine, a_request(body))) == text[: text.index(stop)]
    kept = await collect(engine, a_request(body, include_stop_str_in_output=True))
    assert text_of(kept) == text[: text.index(stop) + len(stop)]
    await engine.stop()


async def test_request_waits_until_the_kv_cache_has_room() -> None:
    engine = an_engine(replace(QUICK, kv_capacity_tokens=300))
    await engine.start()
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    first = asyncio.create_task(collect(engine, a_request(body)))
    second = asyncio.create_task(collect(engine, a_request(body)))
    await asyncio.sleep(0.02)
    load = await engine.load()
    assert (load.running, load.waiting) == (1, 1)
    assert 0.6 < load.kv_cache_usage <= 1.0
    assert [c[-1].output_tokens for c in await asyncio.gather(first, second)] == [200, 200]
    with pytest.raises(ContextLengthError):
        await collect(engine, a_request(body, max_tokens=400))
    await engine.stop()


async def test_takes_the_time_that_the_profile_says() -> None:
    engine = an_engine(replace(QUICK, decode_base_s=5e-3, decode_per_request_s=0.0))
    await engine.start()
    started_s = time.monotonic()
    await collect(engine, a_request(max_tokens=40, ignore_eos=True))
    assert 0.19 < time.monotonic() - started_s < 2.0  # 40 steps of 5 ms; generous above
    await engine.stop()


async def test_long_prompt_does_not_block_running_streams() -> None:
    spec = EngineSpec("simulated", max_num_seqs=4, max_num_batched_tokens=20)
    engine = SimulatedEngine(replace(QUICK, prefill_per_batch_token_s=2e-4), spec)
    await engine.start()
    running = asyncio.create_task(collect(engine, a_request(max_tokens=40, ignore_eos=True)))
    await asyncio.sleep(0.02)
    long_prompt = "word " * 500  # 714 tokens: 36 steps
    long = asyncio.create_task(collect(engine, a_request(prompt=long_prompt, max_tokens=2)))
    await running
    assert len(running.result()) > 20
    await long
    await engine.stop()


async def test_free_engine_lets_others_run() -> None:
    engine = an_engine(FREE)
    await engine.start()
    request = a_request(max_tokens=900, ignore_eos=True)
    answer = asyncio.create_task(collect(engine, request))
    turns = 0
    while not answer.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100
    await engine.stop()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"n": 2}, "n must be 1"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"stop": 3}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
    ],
)
async def test_says_what_is_wrong_with_a_request(fields: dict[str, object], word: str) -> None:
    engine = an_engine(FREE)
    await engine.start()
    with pytest.raises(EngineError) as refused:
        await collect(engine, a_request(**fields))  # type: ignore[arg-type]
    assert refused.value.status == 400
    assert word in refused.value.problem
    await engine.stop()


@pytest.mark.parametrize("stream", [True, False])
async def test_echo_begins_a_completion_with_its_prompt(*, stream: bool) -> None:
    engine = an_engine(FREE)
    await engine.start()
    plain = text_of(await collect(engine, a_request(stream=stream)))
    echoed = await collect(engine, a_request(stream=stream, raw=True, echo=True))
    assert text_of(echoed) == PROMPT + plain
    alone = await collect(engine, a_request(stream=stream, raw=True, echo=True, max_tokens=0))
    assert text_of(alone) == PROMPT
    # As in vLLM, which computes a token and leaves it out.
    assert (alone[-1].output_tokens, alone[-1].finish_reason) == (1, "length")
    if stream:
        told = "".join(e["choices"][0]["text"] for e in events_of(alone)[:-1])
    else:
        told = json.loads(alone[0].raw)["choices"][0]["text"]
    assert told == PROMPT
    await engine.stop()


async def test_takes_token_ids_as_a_prompt() -> None:
    engine = an_engine(FREE)
    await engine.start()
    (answer,) = await collect(engine, a_request(prompt=[1, 2, 3], stream=False))
    assert answer.prompt_tokens == 3
    await engine.stop()


# The whole prompt is counted

TOOL = {"name": "read", "description": "Read a file. " * 10, "parameters": {"type": "object"}}
SAID = {"role": "user", "content": "Look."}
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {
        "tools": [{"type": "function", "function": TOOL}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            SAID,
            {
                "role": "assistant",
                "reasoning": "I shall read.",
                "content": "Reading.",
                "tool_calls": [{"id": "c", "function": {"name": "read", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "x = 1\n" * 30},
        ],
    },
    Endpoint.RESPONSES: {
        "instructions": "Be brief.",
        "tools": [{"type": "function", **TOOL}],
        "input": [
            SAID,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I shall read."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Reading."}]},
            {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x = 1\n" * 30},
        ],
    },
    Endpoint.MESSAGES: {
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "read", "description": "Read a file. " * 10, "input_schema": {}}],
        "messages": [
            SAID,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I shall read.", "signature": "s"},
                    {"type": "text", "text": "Reading."},
                    {"type": "tool_use", "id": "c", "name": "read", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x = 1\n" * 30}],
            },
        ],
    },
}
PARTS = ("Read a file. " * 10, "Be brief.", "I shall read.", "Reading.", "{}", "x = 1\n" * 30)


@pytest.mark.parametrize("endpoint", list(BODIES))
async def test_counts_the_whole_prompt_of_every_dialect(endpoint: Endpoint) -> None:
    engine = an_engine(FREE)
    await engine.start()
    body = {**BODIES[endpoint], "max_tokens": 2}
    (answer,) = await collect(engine, a_request(body, endpoint=endpoint, stream=False))
    text = conversation_of(endpoint, body).prompt()
    assert answer.prompt_tokens == FREE.count_tokens(text)
    assert answer.prompt_tokens >= FREE.count_tokens("".join(PARTS))
    if endpoint is Endpoint.MESSAGES:
        ask = a_request(body, endpoint=Endpoint.COUNT_TOKENS, stream=False)
        (counted,) = await collect(engine, ask)
        assert json.loads(counted.raw) == {"input_tokens": answer.prompt_tokens}
    if endpoint is Endpoint.CHAT:
        ask = a_request(body, endpoint=Endpoint.TOKENIZE, stream=False)
        (counted,) = await collect(engine, ask)
        value = json.loads(counted.raw)
        assert value["count"] == len(value["tokens"]) == answer.prompt_tokens
    await engine.stop()


# What is cached


@pytest.mark.parametrize("endpoint", list(BODIES))
async def test_the_next_turn_finds_the_one_before_and_its_answer(endpoint: Endpoint) -> None:
    engine = an_engine(FREE)
    await engine.start()
    field = "input" if endpoint is Endpoint.RESPONSES else "messages"
    body = {**BODIES[endpoint], "max_tokens": 80, "max_output_tokens": 80, "ignore_eos": True}
    (first,) = await collect(engine, a_request(body, endpoint=endpoint, stream=False))
    answer = {"role": "assistant", "content": first.text}
    turn = {**body, field: [*body[field], answer, {"role": "user", "content": "Go on."}]}
    (second,) = await collect(engine, a_request(turn, endpoint=endpoint, stream=False))
    assert first.cached_tokens == 0
    prompt = FREE.count_tokens(conversation_of(endpoint, body).prompt() + first.text)
    assert prompt - 2 * BLOCK_TOKENS <= second.cached_tokens <= second.prompt_tokens
    assert second.cached_tokens > first.prompt_tokens
    await engine.stop()


async def test_adapters_and_salts_share_nothing() -> None:
    engine = an_engine(FREE)
    await engine.start()
    prompt = "word " * 100

    async def cached(adapter: str = "", **fields: object) -> int:
        request = a_request(prompt=prompt, max_tokens=2, **fields)
        if adapter:
            request = replace(request, adapter=AdapterSpec(ModelName(adapter), "folder"))
        return (await collect(engine, request))[-1].cached_tokens

    assert await cached() == 0
    assert await cached() > 0
    assert await cached("sql") == 0
    assert await cached(cache_salt="tenant") == 0
    assert await cached("sql") == await cached(cache_salt="tenant") == await cached() > 0
    await engine.stop()


async def test_without_prefix_caching_nothing_is_cached() -> None:
    engine = SimulatedEngine(FREE, EngineSpec("simulated", prefix_caching=False))
    await engine.start()
    for _ in range(2):
        last = (await collect(engine, a_request(prompt="word " * 100)))[-1]
        assert last.cached_tokens == 0
    await engine.stop()


async def test_a_stop_forgets_what_was_cached() -> None:
    engine = an_engine(FREE)
    for _ in range(2):
        await engine.start()
        assert (await collect(engine, a_request(prompt="word " * 100)))[-1].cached_tokens == 0
        await engine.stop()


# Steps, without a clock


def a_run(prompt: str, tokens: int = 3) -> Run:
    asked = Prompt(prompt, QUICK.count_tokens(prompt), QUICK.chars_per_token)
    pieces = ["ab"] * tokens
    return Run(asked, pieces, asked.hashes("".join(pieces), "", BLOCK_TOKENS))


def a_batch(profile: Profile = QUICK) -> Batch:
    return Batch(profile, max_running=4, batched_tokens=2048, block_tokens=BLOCK_TOKENS)


def serve(batch: Batch, run: Run) -> float:
    """Run it to its end alone; the time of its first step."""
    batch.add(run, 0)
    first_s = 0.0
    while not run.is_finished:
        emitting, step_s = batch.plan_step(0.0)
        first_s = first_s or step_s
        batch.end_step(emitting)
    return first_s


def test_cached_tokens_cost_no_time() -> None:
    batch, prompt = a_batch(), "x = 1\n" * 200
    cold, warm = a_run(prompt), a_run(prompt + "y = 2\n")
    cold_s, warm_s = serve(batch, cold), serve(batch, warm)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens >= cold.prompt.tokens - BLOCK_TOKENS
    token_s = QUICK.prefill_per_batch_token_s
    new = warm.prompt.tokens - warm.cached_tokens
    assert cold_s - warm_s == pytest.approx(token_s * (cold.prompt.tokens - new))


def steps_to_first_token(prompt_cap_tokens: int) -> int:
    """Of a short prompt that came just after a long one."""
    batch = Batch(QUICK, 4, 64, BLOCK_TOKENS, prompt_cap_tokens)
    long, short = a_run("word " * 500), a_run("other")
    batch.add(long, 0)
    batch.plan_step(0.0)
    batch.add(short, 0)
    for step in itertools.count(1):
        emitting, _ = batch.plan_step(0.0)
        if short in emitting:
            return step
    raise AssertionError


def test_short_prompts_pass_a_long_one_whose_pieces_are_capped() -> None:
    assert steps_to_first_token(prompt_cap_tokens=16) == 1
    assert steps_to_first_token(prompt_cap_tokens=0) > 5


def test_a_prompt_alone_has_the_whole_budget() -> None:
    batch, run = Batch(QUICK, 4, 64, BLOCK_TOKENS, prompt_cap_tokens=16), a_run("word " * 500)
    batch.add(run, 0)
    batch.plan_step(0.0)
    assert run.prefilled_tokens == 64


def test_positions_that_a_prompt_attends_to_take_time() -> None:
    profile = replace(QUICK, prefill_per_attended_token_s=1e-6)
    prompt = "word " * 50
    attended = QUICK.count_tokens(prompt) ** 2 / 2
    more_s = serve(a_batch(profile), a_run(prompt)) - serve(a_batch(), a_run(prompt))
    assert more_s == pytest.approx(1e-6 * attended)


def test_a_prompt_that_is_being_processed_is_there_for_the_next() -> None:
    batch, prompt = a_batch(), "x = 1\n" * 200
    first, second = a_run(prompt), a_run(prompt)
    batch.add(first, 0)
    batch.plan_step(0.0)
    batch.add(second, 0)
    batch.plan_step(0.0)
    assert second.cached_tokens >= first.prompt.tokens - BLOCK_TOKENS


def test_prompts_that_share_their_beginning_fit_where_others_do_not() -> None:
    small = replace(QUICK, kv_capacity_tokens=500)
    batch, other = a_batch(small), a_batch(small)
    prompt = "x = 1\n" * 200  # 343 tokens
    for cache, second in ((batch, prompt), (other, "y" + prompt)):
        cache.add(a_run(prompt), 0)
        cache.plan_step(0.0)
        cache.add(a_run(second), 0)
        cache.plan_step(0.0)
    assert (len(batch.running), len(other.running)) == (2, 1)


def test_removing_a_run_frees_its_blocks() -> None:
    batch = a_batch()
    run = a_run("x = 1\n" * 200)
    batch.add(run, 0)
    batch.plan_step(0.0)
    assert batch.kv_cache_usage > 0
    batch.remove(run)
    batch.remove(run)
    assert batch.kv_cache_usage == 0
    assert batch.is_idle


def test_a_run_that_outlives_a_crash_leaves_the_next_lifes_blocks_alone() -> None:
    batch = a_batch()
    before, after = a_run("x = 1\n" * 200), a_run("x = 1\n" * 200)
    batch.add(before, 0)
    batch.plan_step(0.0)
    assert batch.clear() == [before]
    batch.add(after, 0)
    batch.plan_step(0.0)
    usage = batch.kv_cache_usage
    batch.remove(before)  # its reader notices the crash only now
    assert batch.kv_cache_usage == usage > 0


async def test_start_takes_the_load_time_and_can_be_cancelled() -> None:
    engine = an_engine(replace(FREE, load_s=0.05))
    await engine.start()
    assert engine.facts.start_s >= 0.05
    slow = an_engine(replace(FREE, load_s=600.0))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slow.start(), 0.02)
    assert slow.state == "stopped"
    await engine.stop()
