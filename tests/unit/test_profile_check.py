"""A profile is checked by a run that it was not made from."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cato.control.profile_check import (
    CheckedCall,
    MixedCall,
    check,
    foretell,
    median_error,
    mixed_run,
)
from cato.core.profile import Profile
from cato.core.topology import EngineSpec
from cato.engines.base import Endpoint, EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.testing.builders import a_profile

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
CHUNK = 2048


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes while nothing is to do, and at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now_s += timeout or 0.0
        return super().select(0)


class Caller:
    """A simulated engine, asked directly."""

    def __init__(self, profile: Profile, spec: EngineSpec) -> None:
        self.engine = SimulatedEngine(profile, spec)
        self._count = 0

    async def stream(self, body: Mapping[str, object]) -> AsyncGenerator[EngineChunk, None]:
        self._count += 1
        request = EngineRequest(f"c{self._count}", Endpoint.COMPLETIONS, body)
        async for chunk in self.engine.generate(request):
            yield chunk

    async def held(self) -> int:
        return (await self.engine.load()).running


def a_check(calls: Sequence[MixedCall], chunk_tokens: int) -> tuple[list[CheckedCall], list[int]]:
    """In virtual time; and what was told of the progress."""
    told: list[int] = []

    async def run() -> list[CheckedCall]:
        spec = EngineSpec("simulated", max_num_seqs=8, max_num_batched_tokens=chunk_tokens)
        caller = Caller(PROFILE, spec)
        await caller.engine.start()
        try:
            return await check(caller, PROFILE, chunk_tokens, calls, 3, told.append)
        finally:
            await caller.engine.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run()), told


def test_the_right_profile_foretells_the_run_and_a_wrong_one_does_not() -> None:
    checked, told = a_check(mixed_run(PROFILE, 3, calls=40), CHUNK)
    assert sorted(told) == list(range(1, 41))
    assert median_error(checked) < 1e-6
    wrong = replace(PROFILE, decode_base_s=4 * PROFILE.decode_base_s)
    again = foretell(wrong, [c.call for c in checked], CHUNK)
    off = [replace(c, foretold_s=s) for c, s in zip(checked, again, strict=True)]
    assert median_error(checked) < median_error(off)
    assert median_error(off) > 0.5


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.integers(0, 2000), st.integers(1, 700), st.integers(1, 60)),
        min_size=1,
        max_size=8,  # its places: a ninth waits in the engine here and in the pool there
    ),
    st.sampled_from([64, 256, 2048]),
)
def test_the_simulated_engine_takes_as_long_as_the_simulator_says(
    drawn: list[tuple[int, int, int]], chunk_tokens: int
) -> None:
    # No two at one instant, nor one at the end of a step: there either order is right.
    calls = [
        MixedCall(at_ms / 1000 + (i + 1) * 1.23e-5, prompt, output)
        for i, (at_ms, prompt, output) in enumerate(sorted(drawn))
    ]
    checked, _ = a_check(calls, chunk_tokens)
    for c in checked:
        assert c.foretold_s == pytest.approx(c.measured_s, rel=1e-6)


def test_the_run_is_the_same_for_a_seed_and_fits_the_context() -> None:
    small = replace(PROFILE, context_tokens=256)
    run = mixed_run(small, 7)
    assert run == mixed_run(small, 7)
    assert run != mixed_run(small, 8)
    assert all(16 <= c.prompt_tokens <= 128 and 8 <= c.output_tokens <= 96 for c in run)
    assert [c.arrives_s for c in run] == sorted(c.arrives_s for c in run)
