"""The sweep of `cato profile` on a simulated engine of known timings, in this process.

Runs in real time with costs of milliseconds: coefficients come back to within what a busy
machine's timer adds. That exact samples give exact coefficients is tested in test_profiles.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

import pytest
import pytest_asyncio

from cato.control.profile_sweep import (
    Comparison,
    FirstTokens,
    Measured,
    Plan,
    Stall,
    Sweep,
    Target,
    evaluate,
)
from cato.core.errors import InputError
from cato.core.profile import Profile
from cato.core.topology import EngineSpec
from cato.engines.base import Endpoint, EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.profiles.fit import DecodeSample

# Beside other tests on two cores a sleep of milliseconds takes a third longer at times; a fit that
# missed a term would be wrong by more than half at one of the points.
TIMER_SHARE = 0.5
KNOWN = Profile(
    model="known",
    accelerator="cpu",
    engine="simulated",
    prefill_per_batch_token_s=100e-6,
    prefill_per_request_s=0.0,
    prefill_per_token_s=0.0,
    prefill_base_s=10e-3,
    decode_per_context_token_s=10e-6,
    decode_per_request_s=2e-3,
    decode_base_s=8e-3,
    kv_capacity_tokens=20_000,
    max_running=4,
    context_tokens=600,
    load_s=0.0,
    chars_per_token=2.5,
    latency_s=20e-3,
)
SMALL = Plan(
    prompt_tokens=(50, 120, 250, 500, 2000),
    batches=(),
    batch_prompt_tokens=(),
    contexts=(50, 400),
    concurrencies=(1, 4, 8),
    stalling_prompt_tokens=(40, 400),
    rounds=1,
    point_limit_s=10.0,
    total_s=10.0,
)
TARGET = Target("known", "cpu", "simulated", 600, 4, 20_000, 1.5)


class LocalCaller:
    """A simulated engine in this process; `others` pretends work of someone else."""

    def __init__(self, engine: SimulatedEngine, others: int = 0) -> None:
        self._engine = engine
        self._others = others
        self.bodies: list[Mapping[str, object]] = []

    async def stream(self, body: Mapping[str, object]) -> AsyncGenerator[EngineChunk, None]:
        self.bodies.append(body)
        request = EngineRequest(str(len(self.bodies)), Endpoint.COMPLETIONS, body)
        async for chunk in self._engine.generate(request):
            yield chunk

    async def held(self) -> int:
        return self._others


async def a_sweep(plan: Plan, others: int = 0) -> tuple[LocalCaller, Measured]:
    engine = SimulatedEngine(KNOWN, EngineSpec("simulated", max_num_seqs=4), "known")
    await engine.start()
    caller = LocalCaller(engine, others)
    try:
        measured = await Sweep(caller, TARGET, plan).run(
            ["def f(x):\n" * 20], lambda done, total, what: None
        )
    finally:
        await engine.stop()
    return caller, measured


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def small_sweep() -> tuple[LocalCaller, Measured]:
    return await a_sweep(SMALL)


def test_a_sweep_recovers_the_profile_of_a_known_engine(
    small_sweep: tuple[LocalCaller, Measured],
) -> None:
    _, measured = small_sweep
    result = evaluate(TARGET, measured)
    profile = result.profile
    for tokens in (50, 250, 500):
        assert profile.first_token_s(tokens) == pytest.approx(
            KNOWN.first_token_s(tokens), rel=TIMER_SHARE
        )
    for batch, context in ((1, 50), (1, 400), (4, 50), (4, 400)):
        assert profile.decode_step_s(batch, context) == pytest.approx(
            KNOWN.decode_step_s(batch, context), rel=TIMER_SHARE
        )
    assert profile.prefill_per_batch_token_s == pytest.approx(100e-6, rel=TIMER_SHARE)
    assert profile.chars_per_token == pytest.approx(KNOWN.chars_per_token, rel=0.05)
    assert (profile.max_running, profile.context_tokens, profile.load_s) == (4, 600, 1.5)
    assert profile.latency_s == pytest.approx(KNOWN.latency_s, abs=TIMER_SHARE * KNOWN.latency_s)
    assert [s.prompt_tokens for s in measured.stalls] == [40, 400]
    assert result.samples == len(measured.first_tokens) + len(measured.decode) + 2


def test_what_does_not_fit_the_engine_is_not_asked(
    small_sweep: tuple[LocalCaller, Measured],
) -> None:
    caller, measured = small_sweep
    assert {s.prompt_tokens for s in measured.first_tokens} == {50, 120, 250, 500}
    assert {round(s.batch) for s in measured.decode} == {1, 4}
    for body in caller.bodies:
        prompt = body["prompt"]
        if isinstance(prompt, list):
            assert len(prompt) + int(str(body["max_tokens"])) <= KNOWN.context_tokens


def test_no_two_prompts_share_a_prefix(
    small_sweep: tuple[LocalCaller, Measured],
) -> None:
    caller, _ = small_sweep
    prompts = [tuple(b["prompt"][:8]) for b in caller.bodies if isinstance(b["prompt"], list)]
    assert len(set(prompts)) == len(prompts)


async def test_points_beyond_one_that_took_too_long_are_left_out() -> None:
    impatient = Plan((50, 100, 200, 300), (), (), (50,), (1,), (), 2, 0.0, 60.0)
    _, measured = await a_sweep(impatient)
    assert {s.prompt_tokens for s in measured.first_tokens} == {50}
    assert len(measured.first_tokens) == 2  # what was kept is measured in every round
    assert len(measured.skipped) == 3


async def test_no_round_starts_that_would_pass_the_time_allowed() -> None:
    hasty = Plan((50, 100), (), (), (50,), (1,), (), 5, 10.0, 0.0)
    _, measured = await a_sweep(hasty)
    assert measured.rounds == 1


async def test_other_work_on_the_replica_is_counted() -> None:
    tiny = Plan((50, 100), (), (), (50,), (1,), (30,), 1, 10.0, 10.0)
    _, measured = await a_sweep(tiny, others=2)
    assert measured.disturbed == measured.points == 4


async def test_an_engine_too_small_for_the_plan_is_refused() -> None:
    huge = Plan((5000,), (), (), (5000,), (1,), (), 1, 10.0, 10.0)
    with pytest.raises(InputError, match="nothing to measure fits 600 tokens"):
        await a_sweep(huge)


FIRST_TOKENS = [FirstTokens(1, n, 0.015 + n * 1e-4) for n in (10, 100, 200, 400)]
DECODE = [DecodeSample(b, c, 0.008 + 0.002 * b) for b in (1, 4) for c in (50.0, 400.0)]


def a_stall(tokens: int, stall_s: float, latency_s: float = 0.006) -> Stall:
    """Beside streams with steps of 16 ms."""
    stall_s += tokens * 1e-4
    return Stall(tokens, 0.016, stall_s, 1.5 * 0.016 + stall_s + latency_s)


def test_what_of_a_first_token_holds_up_no_stream_is_latency() -> None:
    stalls = [a_stall(n, 0.001) for n in (16, 64, 256)]
    measured = Measured(FIRST_TOKENS, DECODE, stalls, chars=300, text_tokens=100)
    result = evaluate(TARGET, measured)
    profile = result.profile
    assert profile.prefill_per_batch_token_s == pytest.approx(1e-4, rel=0.01)
    assert profile.prefill_base_s == pytest.approx(0.008, rel=0.01)  # a decode step's
    assert profile.prefill_per_request_s == pytest.approx(0.001, rel=0.01)
    assert profile.latency_s == pytest.approx(0.006, rel=0.01)
    assert profile.chars_per_token == 3.0
    assert max(abs(c.error) for c in result.comparisons) < 0.01


def test_without_stalls_nothing_is_latency() -> None:
    profile = evaluate(TARGET, Measured(FIRST_TOKENS, DECODE)).profile
    assert profile.latency_s == 0.0
    assert profile.first_token_s(100) == pytest.approx(0.025, rel=0.01)


def test_a_machine_that_grew_faster_beside_prompts_gives_no_negative_times() -> None:
    measured = Measured(FIRST_TOKENS, DECODE, [a_stall(16, -0.1, latency_s=-0.01)])
    profile = evaluate(TARGET, measured).profile
    assert (profile.prefill_per_request_s, profile.latency_s) == (0.0, 0.0)


def test_a_profile_that_says_too_much_has_a_positive_error() -> None:
    assert Comparison("decode step", 1, 10, 3, 0.010, 0.012).error == pytest.approx(0.2)
