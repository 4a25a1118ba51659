"""The sweep of `cato profile` on simulated engines of known timings, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from virtual_time_kit import LocalCaller, VirtualLoop, asked

from cato.core.errors import InputError
from cato.core.profile import Profile
from cato.core.topology import EngineSpec
from cato.engines.simulated import SimulatedEngine
from cato.measure.calls import DecodeStep, FirstToken
from cato.measure.evaluation import (
    Comparison,
    Measured,
    Stall,
    evaluate,
    prompt_steps,
    with_host_memory,
)
from cato.measure.points import NEW_TOKENS, Plan, Target
from cato.measure.sweep import AdapterStep, Sweep, adapter_steps
from cato.profiles.load import load_profile

PROFILES = Path(__file__).parents[3] / "profiles"
KNOWN = Profile(
    model="known",
    accelerator="cpu",
    engine="simulated",
    prefill_per_batch_token_s=100e-6,
    prefill_per_request_s=1e-3,
    prefill_per_token_s=0.0,
    prefill_base_s=8e-3,
    decode_per_context_token_s=2e-6,
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
    cached_tokens=(64, 400),
    contexts=(50, 400),
    concurrencies=(1, 4, 8),
    stalling_prompt_tokens=(40, 400),
    rounds=1,
    point_limit_s=10.0,
    total_s=10.0,
)
SPEC = EngineSpec("simulated", max_num_seqs=4, max_num_batched_tokens=256)
TARGET = Target("known", "cpu", "simulated", 600, 4, 20_000, 1.5, 256, 0, 16)


def a_sweep(
    plan: Plan,
    others: int = 0,
    *,
    profile: Profile = KNOWN,
    spec: EngineSpec = SPEC,
    target: Target = TARGET,
) -> tuple[Measured, LocalCaller]:
    async def sweep(caller: LocalCaller) -> Measured:
        texts = ["def f(x):\n" * 20]
        return await Sweep(caller, target, plan).run(texts, lambda done, total, what: None)

    return asked(profile, spec, sweep, others)


def test_a_sweep_recovers_the_linear_law_of_a_known_engine() -> None:
    measured, _ = a_sweep(SMALL)
    result = evaluate(TARGET, measured)
    profile = result.profile
    assert profile.is_linear
    for term, share in (
        ("prefill_per_batch_token_s", 0.02),
        ("decode_base_s", 0.05),
        ("decode_per_request_s", 0.05),
        ("decode_per_context_token_s", 0.05),
        ("latency_s", 0.05),
    ):
        assert getattr(profile, term) == pytest.approx(getattr(KNOWN, term), rel=share), term
    assert profile.chars_per_token == pytest.approx(KNOWN.chars_per_token, rel=0.05)
    assert (profile.max_running, profile.context_tokens, profile.load_s) == (4, 600, 1.5)
    assert (profile.step_tokens, profile.block_tokens) == (256, 16)
    assert [s.prompt_tokens for s in measured.stalls] == [40, 400]
    assert result.samples == len(measured.first_tokens) + len(measured.decode) + 2


LONG = Plan(
    prompt_tokens=(16, 128, 256, 2048, 8192, 30_000),
    cached_tokens=(1024, 30_000),
    contexts=(64, 8192),
    concurrencies=(1, 8, 40),
    stalling_prompt_tokens=(16, 1024),
    rounds=1,
    point_limit_s=1e9,
    total_s=1.0,
)


@pytest.mark.parametrize("name", ["reference-large-32b@gpu-80gb", "reference-moe-30b-a3b@gpu-80gb"])
def test_a_sweep_recovers_what_a_card_reads_and_computes(name: str) -> None:
    card = replace(load_profile(PROFILES / f"{name}.yaml"), latency_s=0.004, load_s=0.0)
    spec = EngineSpec(
        "simulated",
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        long_prefill_token_threshold=256,
    )
    target = Target("m", "gpu", "simulated", 131_072, 256, 100_000, 1.0, 2048, 256, 16)
    measured, _ = a_sweep(LONG, profile=card, spec=spec, target=target)
    profile = evaluate(target, measured).profile
    for term in (
        "prefill_per_batch_token_s",
        "prefill_per_attended_token_s",
        "weights_read_s",
        "kv_read_token_s",
    ):
        assert getattr(profile, term) == pytest.approx(getattr(card, term), rel=0.1), term
    assert profile.step_base_s == pytest.approx(card.step_base_s, rel=0.02)
    assert profile.latency_s == pytest.approx(card.latency_s, rel=0.25)


def test_a_cached_beginning_is_measured_in_whole_blocks() -> None:
    measured, _ = a_sweep(SMALL)
    warm = [f for f in measured.first_tokens if f.cached_tokens]
    assert [(f.prompt_tokens, f.cached_tokens) for f in warm] == [
        (64 + NEW_TOKENS, 64),
        (400 + NEW_TOKENS, 400),
    ]
    cold = next(f for f in measured.first_tokens if f.prompt_tokens == 500)
    assert warm[1].duration_s < cold.duration_s


def test_an_engine_without_a_prefix_cache_is_asked_for_none() -> None:
    spec = replace(SPEC, prefix_caching=False)
    measured, _ = a_sweep(SMALL, spec=spec, target=replace(TARGET, block_tokens=0))
    assert not any(f.cached_tokens for f in measured.first_tokens)
    assert {f.prompt_tokens for f in measured.first_tokens} == {50, 120, 250, 500}
    mistaken, _ = a_sweep(SMALL, spec=spec)
    assert [s for s in mistaken.skipped if "did not keep the prefix" in s]


def test_what_does_not_fit_the_engine_is_not_asked() -> None:
    measured, caller = a_sweep(SMALL)
    lengths = {f.prompt_tokens for f in measured.first_tokens if not f.cached_tokens}
    assert lengths == {50, 120, 250, 500}
    assert {s.batch for s in measured.decode} == {1, 4}
    for body in caller.bodies:
        prompt = body["prompt"]
        if isinstance(prompt, list):
            assert len(prompt) + int(str(body["max_tokens"])) <= KNOWN.context_tokens


def test_no_two_prompts_share_a_prefix_unless_that_is_measured() -> None:
    _, caller = a_sweep(replace(SMALL, cached_tokens=()))
    prompts = [tuple(b["prompt"][:8]) for b in caller.bodies if isinstance(b["prompt"], list)]
    assert len(set(prompts)) == len(prompts)


def test_points_beyond_one_that_took_too_long_are_left_out() -> None:
    impatient = Plan((50, 100, 200, 300), (), (50,), (1,), (), 2, 0.0, 60.0)
    measured, _ = a_sweep(impatient)
    assert {s.prompt_tokens for s in measured.first_tokens} == {50}
    assert len(measured.first_tokens) == 2  # what was kept is measured in every round
    assert len(measured.skipped) == 3


def test_no_round_starts_that_would_pass_the_time_allowed() -> None:
    hasty = Plan((50, 100), (), (50,), (1,), (), 5, 10.0, 0.0)
    measured, _ = a_sweep(hasty)
    assert measured.rounds == 1


def test_other_work_on_the_replica_is_counted() -> None:
    tiny = Plan((50, 100), (), (50,), (1,), (30,), 1, 10.0, 10.0)
    measured, _ = a_sweep(tiny, others=2)
    assert measured.disturbed == measured.points == 4


def test_an_engine_too_small_for_the_plan_is_refused() -> None:
    huge = Plan((5000,), (), (5000,), (1,), (), 1, 10.0, 10.0)
    with pytest.raises(InputError, match="nothing to measure fits 600 tokens"):
        a_sweep(huge)


def test_a_prompt_is_cut_by_the_budget_alone_and_by_the_cap_beside_others() -> None:
    target = replace(TARGET, step_tokens=256, prompt_cap_tokens=64)
    assert [s.prompt_tokens for s in prompt_steps(target, 600, 0)] == [256, 256, 88]
    beside = prompt_steps(target, 600, 400, streams=4, held=100.0)
    assert [s.prompt_tokens for s in beside] == [64, 64, 64, 8]
    assert [s.held_tokens for s in beside] == [500, 564, 628, 692]
    assert [s.prompts_ended for s in beside] == [0, 0, 0, 1]
    assert sum(s.attended for s in beside) == sum(range(400, 600)) + 100


FIRST_TOKENS = [FirstToken(n, 0.015 + n * 1e-4) for n in (10, 100, 200, 250)]
DECODE = [DecodeStep(b, c, 0.008 + 0.002 * b) for b in (1, 4) for c in (50.0, 400.0)]


def a_stall(tokens: int, stall_s: float, latency_s: float = 0.006) -> Stall:
    """Beside streams with steps of 16 ms."""
    stall_s += tokens * 1e-4
    return Stall(tokens, 0.016, stall_s, 1.5 * 0.016 + stall_s + latency_s)


def test_what_of_a_first_token_holds_up_no_stream_is_latency() -> None:
    stalls = [a_stall(n, 0.001) for n in (16, 64, 250)]
    measured = Measured(FIRST_TOKENS, DECODE, stalls, chars=300, text_tokens=100)
    result = evaluate(TARGET, measured)
    profile = result.profile
    assert profile.prefill_per_batch_token_s == pytest.approx(1e-4, rel=0.01)
    assert profile.prefill_base_s == pytest.approx(0.008, rel=0.01)  # a decode step's
    assert profile.prefill_per_request_s == pytest.approx(0.001, rel=0.02)
    assert profile.latency_s == pytest.approx(0.006, rel=0.01)
    assert profile.chars_per_token == 3.0
    assert max(abs(c.error) for c in result.comparisons) < 0.01


def test_without_stalls_nothing_is_latency() -> None:
    profile = evaluate(TARGET, Measured(FIRST_TOKENS, DECODE)).profile
    assert profile.latency_s == 0.0
    assert profile.first_token_s(100) == pytest.approx(0.025, rel=0.01)


def test_a_machine_that_grew_faster_beside_prompts_gives_no_negative_times() -> None:
    measured = Measured(FIRST_TOKENS, DECODE, [a_stall(16, -0.1, latency_s=0.08)])
    profile = evaluate(TARGET, measured).profile
    assert profile.prefill_per_request_s >= 0.0
    assert profile.latency_s >= 0.0
    assert profile.first_token_s(100) == pytest.approx(0.025, rel=0.1)


def test_what_no_sweep_measures_stays_as_it_was() -> None:
    used = replace(
        KNOWN, host_capacity_tokens=9_000, host_load_token_s=5e-6, kv_token_bytes=100_000,
        fetch_token_s=1e-6,
    )  # fmt: skip
    assert with_host_memory(KNOWN, used, 0) == used
    assert with_host_memory(KNOWN, used, 8_000) == replace(used, host_capacity_tokens=8_000)


def test_a_profile_that_says_too_much_has_a_positive_error() -> None:
    assert Comparison("decode step", 1, 10, 3, 0.010, 0.012).error == pytest.approx(0.2)


def test_adapters_cost_what_their_batches_take_longer() -> None:
    slow = replace(KNOWN, decode_base_s=KNOWN.decode_base_s + 5e-3)

    async def measured() -> list[AdapterStep]:
        engines = [SimulatedEngine(profile, SPEC) for profile in (KNOWN, slow, slow)]
        for engine in engines:
            await engine.start()
        base, *adapters = (LocalCaller(engine) for engine in engines)
        try:
            return await adapter_steps(base, adapters, [1, 4], rounds=2)
        finally:
            for engine in engines:
                await engine.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        alone, four = runner.run(measured())
    assert (alone.batch, four.batch) == (1, 4)
    assert alone.mixed_s == pytest.approx(alone.none_s)
    assert alone.one_s is not None
    assert alone.none_s is not None
    assert alone.one_s - alone.none_s == pytest.approx(5e-3, rel=0.05)
    # Requests of one batch are on three engines here: each is faster than four on one.
    assert four.none_s is not None
    assert four.mixed_s is not None
    assert four.mixed_s < four.none_s
