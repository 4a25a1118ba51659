"""The pool that decides in virtual time is the one that decides in real time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from fleet_kit import POOL, SCHEDULERS, a_task

from cato.core.commands import Command, Dispatch
from cato.core.errors import CatoError
from cato.core.events import Event
from cato.core.ids import InvocationId, ModelName
from cato.core.orchestrator import PoolOrchestrator, PoolPicture
from cato.core.policies import Policies
from cato.core.snapshot import Invocation
from cato.core.topology import ModelSpec
from cato.engines.base import Endpoint, EngineRequest
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.tasks import SimTask
from cato.testing.builders import a_profile
from cato.testing.local_pools import LocalPool

# Long enough for all to be offered while the first is served, however slow the machine.
PROFILE = replace(a_profile(prefill_s=0.04, token_s=0.001), load_s=0.0)


@dataclass(slots=True)
class Recording:
    """An orchestrator, with what it was told and what it ordered."""

    orchestrator: PoolOrchestrator
    told: list[Event] = field(default_factory=list)
    orders: list[tuple[Command, ...]] = field(default_factory=list)

    def handle(self, event: Event) -> tuple[Command, ...]:
        self.told.append(event)
        self.orders.append(self.orchestrator.handle(event))
        return self.orders[-1]

    def picture(self, now_s: float) -> PoolPicture:
        return self.orchestrator.picture(now_s)

    def invocation(self, id: InvocationId) -> Invocation | None:
        return self.orchestrator.invocation(id)

    @property
    def order(self) -> list[str]:
        return [c.invocation_id for cs in self.orders for c in cs if isinstance(c, Dispatch)]


def a_live_pool(policies: Policies, *, replicas: int, slots: int) -> tuple[LocalPool, Recording]:
    spec = ModelSpec(ModelName("sim"), "demo", "starcoder")
    pool = LocalPool(spec, PROFILE, replicas=replicas, slots=slots)
    recording = Recording(PoolOrchestrator(pool.name, policies))
    pool._orchestrator = recording
    return pool, recording


async def serve(pool: LocalPool, task: SimTask) -> None:
    """As the executor does: a lease, then its stream to the end."""
    invocation = replace(task.invocation(0, 0.0, 0.0), deadline_s=task.target_s)
    lease = await pool.lease(invocation)
    body = {"prompt": "x", "max_tokens": task.nodes[0].output_tokens, "ignore_eos": True}
    request = EngineRequest(f"{task.id}.1", Endpoint.COMPLETIONS, body, lease.priority)
    async with contextlib.aclosing(pool.stream(lease, request)) as chunks:
        async for _ in chunks:
            pass


def some_tasks() -> list[SimTask]:
    """All at once; deadlines so far apart that a slow machine changes no order."""
    targets_s = (30.0, 90.0, 40.0, 60.0, 100.0, 50.0, 80.0, 70.0)
    return [a_task(f"t{i}", prompt=1, output=5, target_s=s) for i, s in enumerate(targets_s)]


def simulated_order(policies: Policies, tasks: Sequence[SimTask]) -> list[str]:
    fleet = Fleet([PoolSetup(POOL, (PROFILE,), policies, max_running=1)])
    recording = Recording(fleet.pools[POOL].orchestrator)
    fleet.pools[POOL].orchestrator = recording
    fleet.run(tasks)
    return recording.order


@pytest.mark.parametrize(
    ("name", "expected"), [("foresight", "0 2 5 3 7 6 1 4"), ("least-wait", "0 1 2 3 4 5 6 7")]
)
async def test_live_and_simulated_pools_serve_in_the_same_order(name: str, expected: str) -> None:
    policies, tasks = SCHEDULERS[name], some_tasks()
    pool, recording = a_live_pool(policies, replicas=1, slots=1)
    await pool.start()
    await asyncio.gather(*(serve(pool, t) for t in tasks))
    await pool.stop()
    assert recording.order == simulated_order(policies, tasks)
    assert recording.order == [f"t{i}/0" for i in expected.split()]


@pytest.mark.parametrize("name", ["foresight", "saber", "cato"])
async def test_what_a_live_pool_was_told_replays_to_the_same_commands(name: str) -> None:
    """With a client that leaves and a replica that dies."""
    policies, tasks = SCHEDULERS[name], some_tasks()
    pool, recording = a_live_pool(policies, replicas=2, slots=2)
    await pool.start()
    calls = [asyncio.create_task(serve(pool, t)) for t in tasks]
    await asyncio.sleep(0)  # all are offered now
    calls[5].cancel()
    await pool.kill(next(iter(pool.engines)))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await pool.stop()
    failed = [a for a in answers if isinstance(a, CatoError)]
    assert 0 < len(failed) <= 2, "those of the dead replica"
    assert isinstance(answers[5], asyncio.CancelledError)
    again = PoolOrchestrator(pool.name, policies)
    assert [again.handle(event) for event in recording.told] == recording.orders
    assert len(recording.order) >= len(tasks) - 1
