"""The provisioner asks routers for their demand, and loses no arrival that one has told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cato.control import actors, demands
from cato.control.demands import Demands
from cato.core.demand import CallKind, PoolDemand
from cato.core.ids import DeploymentName, ModelName, NodeId, PoolName, TaskName
from cato.core.scaling import Arrivals
from cato.core.topology import DeploymentSpec, EngineSpec, ModelSpec, PoolSpec

POOL = PoolSpec(
    PoolName("p"),
    ModelSpec(ModelName("m"), "m", "qwen"),
    (DeploymentSpec(DeploymentName("d"), "cpu", EngineSpec("simulated")),),
    router_shards=2,
)
KIND = CallKind(TaskName("t"), NodeId("n"))
NOTHING = PoolDemand(0.0, {}, {}, 0, 0, 0.0, 1, (), ())


class Routers:
    """Router actors that tell one arrival each time; those that hang answer when they go on."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.hanging: dict[str, asyncio.Event] = {}
        self.dead: set[str] = set()

    def get(self, name: str) -> Any:
        if name in self.dead:
            raise ValueError(f"no actor {name}")
        return _Router(self, name)


class _Router:
    def __init__(self, all_: Routers, name: str) -> None:
        self.demand = self
        self._all, self._name = all_, name

    async def remote(self) -> PoolDemand:
        self._all.asked[self._name] = self._all.asked.get(self._name, 0) + 1
        if self._name in self._all.hanging:
            await self._all.hanging[self._name].wait()
        return replace(NOTHING, arrived={KIND: Arrivals(1, 2.0)}, queued=1)


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> Routers:
    found = Routers()
    monkeypatch.setattr(actors, "get", found.get)
    monkeypatch.setattr(demands, "ANSWER_WITHIN_S", 0.05)
    return found


FIRST, SECOND, *_ = actors.routers_of(POOL)


async def test_what_shards_told_while_another_one_was_gone_is_kept(routers: Routers) -> None:
    book = Demands()
    routers.dead.add(SECOND)
    for _ in range(2):
        await book.ask([POOL])
        assert book.take([POOL]) == {}
    routers.dead.clear()
    await book.ask([POOL])
    demand = book.take([POOL])[POOL.name]
    shards = len(actors.routers_of(POOL))
    assert demand.arrived == {KIND: Arrivals(2 + shards, 2.0 * (2 + shards))}
    assert demand.queued == shards  # as they are now
    await book.ask([POOL])
    assert book.take([POOL])[POOL.name].arrived == {KIND: Arrivals(shards, 2.0 * shards)}


async def test_a_late_answer_counts_and_the_router_is_not_asked_twice(routers: Routers) -> None:
    book = Demands()
    routers.hanging[SECOND] = asyncio.Event()
    for _ in range(2):
        await book.ask([POOL])
        assert book.take([POOL]) == {}
    assert routers.asked[SECOND] == 1
    routers.hanging.pop(SECOND).set()
    await asyncio.sleep(0)
    await book.ask([POOL])
    told = sum(routers.asked.values())
    assert book.take([POOL])[POOL.name].arrived == {KIND: Arrivals(told, 2.0 * told)}


async def test_a_demand_that_was_not_taken_is_not_lost(routers: Routers) -> None:
    book = Demands()
    await book.ask([POOL])  # Serve did not answer
    await book.ask([POOL])
    told = sum(routers.asked.values())
    assert book.take([POOL])[POOL.name].arrived == {KIND: Arrivals(told, 2.0 * told)}
    assert book.take([POOL]) == {}


async def test_a_pool_that_was_removed_is_forgotten(routers: Routers) -> None:
    book = Demands()
    routers.hanging[SECOND] = asyncio.Event()
    await book.ask([POOL])
    await book.ask([])
    routers.hanging.clear()
    await book.ask([POOL])
    shards = len(actors.routers_of(POOL))
    assert book.take([POOL])[POOL.name].arrived == {KIND: Arrivals(shards, 2.0 * shards)}
