"""A profile is checked by a run that it was not made from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.builders import a_profile
from virtual_time_kit import LocalCaller, asked

from cato.core.errors import ReplicaLostError
from cato.core.profile import Profile
from cato.core.topology import EngineSpec
from cato.engines.base import EngineChunk
from cato.measure.check import (
    CheckedCall,
    EngineSteps,
    MixedCall,
    Timed,
    Verdict,
    check,
    mixed_run,
    predict,
)

PROFILE = replace(
    a_profile(prefill_s=0.02, token_s=0.01, prefill_token_s=0.0001, batch_token_s=0.001),
    prefill_per_request_s=0.003,
    decode_per_context_token_s=1e-6,
    latency_s=0.007,
    load_s=0.0,
    max_running=8,
    context_tokens=4096,
    kv_capacity_tokens=100_000,
)
# What is read and what is computed take turns in being longer.
CARD = replace(
    PROFILE,
    decode_per_context_token_s=0.0,
    prefill_per_attended_token_s=1e-7,
    weights_read_s=0.01,
    kv_read_token_s=2e-6,
)
STEPS = EngineSteps(2048, 0, 16)


def a_check(
    profile: Profile, calls: Sequence[MixedCall], steps: EngineSteps
) -> tuple[list[CheckedCall], int]:
    """In virtual time; and how many calls the progress was told of."""
    told: list[None] = []
    spec = EngineSpec(
        "simulated",
        max_num_seqs=8,
        max_num_batched_tokens=steps.step_tokens,
        long_prefill_token_threshold=steps.prompt_cap_tokens,
        prefix_caching=steps.block_tokens > 0,
        host_memory=steps.host_tokens > 0,
    )

    async def ask(caller: LocalCaller) -> list[CheckedCall]:
        return await check(caller, profile, steps, calls, 3, lambda: told.append(None))

    profile = replace(
        profile,
        block_tokens=steps.block_tokens or 16,
        host_capacity_tokens=steps.host_tokens,
    )
    checked, _ = asked(profile, spec, ask)
    return checked, len(told)


@pytest.mark.parametrize("profile", [PROFILE, CARD])
def test_the_right_profile_predicts_the_run_and_a_wrong_one_does_not(profile: Profile) -> None:
    calls = mixed_run(profile, 3, calls=40, shares=True)
    checked, told = a_check(profile, calls, STEPS)
    assert told == 2 * len(calls)
    assert [c.predicted.cached_tokens for c in checked] == [
        c.measured.cached_tokens for c in checked
    ]
    verdict = Verdict.of(checked)
    assert verdict.is_good
    assert verdict.error < 1e-6
    wrong = replace(profile, decode_base_s=4 * profile.decode_base_s)
    off = [
        replace(c, predicted=timed)
        for c, timed in zip(checked, predict(wrong, calls, STEPS), strict=True)
    ]
    assert not Verdict.of(off).is_good


def test_a_run_that_breaks_off_says_why() -> None:
    class Lost(LocalCaller):
        async def stream(self, body: Mapping[str, object]) -> AsyncGenerator[EngineChunk, None]:
            if len(self.bodies) > 20:
                raise ReplicaLostError("r", "its stream broke")
            async for chunk in super().stream(body):
                yield chunk

    calls = mixed_run(PROFILE, 3, calls=40, shares=True)

    async def ask(caller: LocalCaller) -> list[CheckedCall]:
        return await check(Lost(caller.engine), PROFILE, STEPS, calls, 3, lambda: None)

    with pytest.raises(ReplicaLostError, match="its stream broke"):
        asked(PROFILE, EngineSpec("simulated", max_num_seqs=8, prefix_caching=True), ask)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2000), st.integers(1, 700), st.integers(1, 60), st.booleans()),
        min_size=1,
        max_size=8,  # its places: a ninth waits in the engine
    ),
    st.sampled_from([64, 256, 2048]),
    st.sampled_from([0, 32]),
    st.sampled_from([0, 16, 128]),
    st.sampled_from([PROFILE, CARD]),
)
def test_the_simulated_engine_takes_as_long_as_the_simulator_says(
    drawn: list[tuple[int, int, int, bool]],
    step_tokens: int,
    cap: int,
    block_tokens: int,
    profile: Profile,
) -> None:
    # No two at one instant, nor one at the end of a step: there either order is right.
    calls = [
        MixedCall(at_ms / 1000 + (i + 1) * 1.23e-5, new + 600 * shares, output, 0, 600 * shares)
        for i, (at_ms, new, output, shares) in enumerate(sorted(drawn))
    ]
    checked, _ = a_check(profile, calls, EngineSteps(step_tokens, cap, block_tokens))
    for c in checked:
        assert c.predicted.cached_tokens == c.measured.cached_tokens
        assert c.predicted.e2e_s == pytest.approx(c.measured.e2e_s, rel=1e-6)


def test_what_left_the_cache_is_loaded_from_host_memory_in_the_same_time() -> None:
    # Beginnings of 2,000 tokens that push each other out of a cache of 4,800.
    card = replace(CARD, kv_capacity_tokens=4_800, host_load_token_s=2e-5)
    calls = [MixedCall(0.4 * (i + 1) * 1.234567, 2_050, 5 + i % 7, i % 4, 2_000) for i in range(24)]
    steps = replace(STEPS, host_tokens=100_000)
    checked, _ = a_check(card, calls, steps)
    for c in checked:
        assert c.predicted.cached_tokens == c.measured.cached_tokens == 2_000
        assert c.predicted.e2e_s == pytest.approx(c.measured.e2e_s, rel=1e-6)
    without, _ = a_check(card, calls, STEPS)
    assert sum(c.measured.cached_tokens for c in without) < 24 * 2_000
    assert sum(c.measured.e2e_s for c in checked) < sum(c.measured.e2e_s for c in without)


def test_half_of_the_calls_share_a_beginning_where_that_is_wanted() -> None:
    shared = [c for c in mixed_run(PROFILE, 5, shares=True) if c.shared_tokens]
    assert 25 <= len(shared) <= 55
    assert len({(c.beginning, c.shared_tokens) for c in shared}) == len(
        {c.beginning for c in shared}
    )
    assert all(c.prompt_tokens > c.shared_tokens for c in shared)
    assert not any(c.shared_tokens for c in mixed_run(PROFILE, 5, shares=False))


def test_the_run_is_the_same_for_a_seed_and_fits_the_context() -> None:
    small = replace(PROFILE, context_tokens=256)
    run = mixed_run(small, 7, shares=True)
    assert run == mixed_run(small, 7, shares=True)
    assert run != mixed_run(small, 8, shares=True)
    assert all(c.prompt_tokens + c.output_tokens <= 256 for c in run)
    assert [c.arrives_s for c in run] == sorted(c.arrives_s for c in run)


def a_checked(measured_s: float, again_s: float, predicted_s: float) -> CheckedCall:
    call = MixedCall(0.0, 10, 10)
    return CheckedCall(call, Timed(measured_s, 0), Timed(again_s, 0), Timed(predicted_s, 0))


def test_a_profile_may_be_off_by_a_tenth_or_a_little_more_than_the_machine_itself() -> None:
    assert Verdict.of([a_checked(1.0, 1.0, 1.09)]).is_good
    assert not Verdict.of([a_checked(1.0, 1.0, 1.11)]).is_good
    assert Verdict.of([a_checked(1.0, 1.5, 1.25)]).is_good
    assert not Verdict.of([a_checked(1.0, 1.1, 1.3)]).is_good
