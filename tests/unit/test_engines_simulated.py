"""The simulated engine: the conformance kit, its text, its timings.

These tests run in real time, with costs of fractions of a millisecond; none asserts on speed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from cato.core.errors import ContextLengthError, EngineError
from cato.core.profile import Profile
from cato.core.topology import EngineSpec
from cato.engines.base import Endpoint
from cato.engines.simulated import SimulatedEngine, simulated_text, simulated_tokens
from cato.testing.engine_conformance import EngineConformance, a_request, collect, text_of

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


async def test_takes_token_ids_as_a_prompt() -> None:
    engine = an_engine(FREE)
    await engine.start()
    (answer,) = await collect(engine, a_request(prompt=[1, 2, 3], stream=False))
    assert answer.prompt_tokens == 3
    await engine.stop()


async def test_start_takes_the_load_time_and_can_be_cancelled() -> None:
    engine = an_engine(replace(FREE, load_s=0.05))
    await engine.start()
    assert engine.facts.start_s >= 0.05
    slow = an_engine(replace(FREE, load_s=600.0))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slow.start(), 0.02)
    assert slow.state == "stopped"
    await engine.stop()
