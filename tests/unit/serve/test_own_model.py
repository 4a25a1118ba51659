"""When a replica restarts its engine, how long it waits before, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from kits.builders import a_profile
from virtual_time_kit import VirtualLoop

from cato.control.messages import Generate
from cato.core.errors import EngineError
from cato.core.ids import DeploymentName, InvocationId, ModelName, ReplicaId
from cato.core.pool.hosted import STEADY_AFTER_S
from cato.core.topology import DeploymentSpec, EngineSpec, ModelSpec
from cato.engines.base import Endpoint, Engine, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.serve.own_model import RESTART_BACKOFF_S, OwnModel
from cato.serve.replica import Replica

A_PROFILE = replace(a_profile(), load_s=0.0)
SPEC = EngineSpec(kind="simulated", max_num_seqs=4)


class Stage:
    """A replica in virtual time, and when its engines were started."""

    def __init__(self) -> None:
        self.started_s: list[float] = []
        self.failing_starts = 0
        model = ModelSpec(ModelName("m"), "demo", "none")
        deployment = DeploymentSpec(DeploymentName("d"), "cpu", SPEC)
        self.own = OwnModel(model, deployment, A_PROFILE, self._start)
        self.replica = Replica(ReplicaId("r"), self.own, lambda _: None)

    async def _start(self) -> Engine:
        self.started_s.append(asyncio.get_running_loop().time())
        if self.failing_starts:
            self.failing_starts -= 1
            raise EngineError("no such folder", 503)
        engine = SimulatedEngine(A_PROFILE, SPEC)
        await engine.start()
        return engine

    async def die_after(self, lived_s: float) -> None:
        await asyncio.sleep(lived_s)
        engine = self.replica.engine
        assert isinstance(engine, SimulatedEngine)
        await engine.kill()

    async def answer_one(self) -> None:
        request = EngineRequest("c", Endpoint.COMPLETIONS, {"prompt": "x", "max_tokens": 2})
        async for _ in self.replica.generate(Generate(request, InvocationId("i"), 1, "")):
            pass

    def waits_s(self) -> list[float]:
        return [b - a for a, b in zip(self.started_s, self.started_s[1:], strict=False)]


@asynccontextmanager
async def a_stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.own.start()
    keeping = asyncio.get_running_loop().create_task(stage.own.keep_forever())
    try:
        yield stage
    finally:
        keeping.cancel()
        await stage.own.stop()


def played(play: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        async with a_stage() as stage:
            await play(stage)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


def test_an_engine_that_dies_soon_after_each_start_waits_longer_and_is_given_up() -> None:
    async def play(stage: Stage) -> None:
        for delay_s in RESTART_BACKOFF_S:
            assert stage.own.broken == ""
            await stage.die_after(2.0)
            await asyncio.sleep(delay_s + 0.1)
        await stage.die_after(2.0)
        await asyncio.sleep(1.0)
        assert "did not come back to stay in 4 tries" in stage.own.broken
        assert stage.own.restarts == len(RESTART_BACKOFF_S)
        since_s = [wait_s - 2.0 for wait_s in stage.waits_s()]
        assert since_s == pytest.approx(RESTART_BACKOFF_S, abs=0.5)
        await asyncio.sleep(RESTART_BACKOFF_S[-1] - 2.0)
        assert stage.own.broken  # for long enough that Serve sees it

    played(play)


@pytest.mark.parametrize("is_used", [True, False])
def test_an_engine_that_answered_or_lived_for_long_is_restarted_at_once(is_used: bool) -> None:
    async def play(stage: Stage) -> None:
        for _ in range(2 * len(RESTART_BACKOFF_S)):
            if is_used:
                await stage.answer_one()
            await stage.die_after(0.0 if is_used else STEADY_AFTER_S)
            await asyncio.sleep(0.1)
            assert stage.replica.engine is not None
            assert stage.replica.engine.state == "ready"
        assert stage.own.restarts == 2 * len(RESTART_BACKOFF_S)
        assert stage.own.broken == ""

    played(play)


def test_starts_that_fail_and_engines_that_die_soon_count_alike() -> None:
    async def play(stage: Stage) -> None:
        stage.failing_starts = 2
        await stage.die_after(2.0)
        await asyncio.sleep(sum(RESTART_BACKOFF_S[:3]) + 0.1)
        assert stage.own.restarts == 1
        await stage.die_after(2.0)
        await asyncio.sleep(RESTART_BACKOFF_S[3] - 2.5)
        assert stage.own.restarts == 1
        await asyncio.sleep(3.0)
        assert stage.own.restarts == 2

    played(play)
