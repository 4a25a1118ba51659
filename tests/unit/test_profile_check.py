"""A profile is checked by a run that it was not made from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

from cato.control.profile_check import check, foretell, median_error, mixed_run
from cato.core.profile import Profile
from cato.core.topology import EngineSpec
from cato.engines.base import Endpoint, EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.testing.builders import a_profile

# Steps long enough that what a busy machine adds is little beside them.
PROFILE = replace(
    a_profile(prefill_s=0.02, token_s=0.01, prefill_token_s=0.0001, batch_token_s=0.001),
    load_s=0.0,
    max_running=8,
    context_tokens=4096,
    kv_capacity_tokens=100_000,
)
CHUNK = 2048


class Caller:
    """A simulated engine, asked directly."""

    def __init__(self, profile: Profile) -> None:
        self.engine = SimulatedEngine(profile, EngineSpec(kind="simulated", max_num_seqs=8))
        self._count = 0

    async def stream(self, body: Mapping[str, object]) -> AsyncGenerator[EngineChunk, None]:
        self._count += 1
        request = EngineRequest(f"c{self._count}", Endpoint.COMPLETIONS, body)
        async for chunk in self.engine.generate(request):
            yield chunk

    async def held(self) -> int:
        return (await self.engine.load()).running


async def test_the_right_profile_foretells_the_run_and_a_wrong_one_does_not() -> None:
    caller = Caller(PROFILE)
    await caller.engine.start()
    told: list[int] = []
    checked = await check(caller, PROFILE, CHUNK, 3, told.append, calls=12)
    await caller.engine.stop()
    assert sorted(told) == list(range(1, 13))
    wrong = replace(PROFILE, decode_base_s=4 * PROFILE.decode_base_s)
    again = foretell(wrong, [c.call for c in checked], CHUNK)
    off = [replace(c, foretold_s=s) for c, s in zip(checked, again, strict=True)]
    assert median_error(checked) < median_error(off)
    assert median_error(off) > 0.5


def test_the_run_is_the_same_for_a_seed_and_fits_the_context() -> None:
    small = replace(PROFILE, context_tokens=256)
    run = mixed_run(small, 7)
    assert run == mixed_run(small, 7)
    assert run != mixed_run(small, 8)
    assert all(16 <= c.prompt_tokens <= 128 and 8 <= c.output_tokens <= 96 for c in run)
    assert [c.arrives_s for c in run] == sorted(c.arrives_s for c in run)
