"""Serve's listing of replicas decides which of them the routers and slots' pools may use."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kits.builders import a_profile, a_report
from kits.local_slots import on_each
from test_provisioner import a_deployment
from test_shared_pool import JAVA, QUICK, a_pool

from cato.control import replica_sets, shared_pool, slots
from cato.control.replica_sets import MAX_LEFT
from cato.control.router import ReplicaRouter
from cato.control.shared_pool import SharedPool
from cato.control.slots import LEFT_S
from cato.core.eviction import CopyId
from cato.core.ids import DeploymentName, HostId, ModelName, PoolName, ReplicaId
from cato.core.shards import merged
from cato.core.slots import SlotReport, SlotState
from cato.core.topology import ModelSpec, PoolPolicies, PoolSpec
from cato.serve.ray_pools import RayPools

POOL, R, S = PoolName("p"), ReplicaId("r"), ReplicaId("s")
_names = (DeploymentName(f"deployment-{n}") for n in itertools.count())


class Method:
    """A method of an actor."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class RouterActor:
    """A real router behind an actor's handle."""

    def __init__(self) -> None:
        self.router = ReplicaRouter(POOL, PoolPolicies(), a_profile())
        self.left, self.listed = Method(self.router.left), Method(self.router.listed)


class Fleet:
    """A pool whose router shards hear of Serve's listing from an ingress."""

    def __init__(self, shards: int = 1) -> None:
        self.deployment = next(_names)  # the listing is the process's
        spec = a_deployment(self.deployment)
        self.spec = PoolSpec(POOL, ModelSpec(ModelName("m"), "m", "qwen"), (spec,))
        self.actors = [RouterActor() for _ in range(shards)]
        self.pools = RayPools({})

    def list(self, *replicas: ReplicaId) -> None:
        """Serve lists these."""
        replica_sets.note(self.deployment, frozenset(replicas))

    def report(self, replica: ReplicaId, shard: int = 0) -> None:
        self.actors[shard].router.take(a_report(replica))

    async def known(self) -> set[ReplicaId]:
        told = [await actor.router.picture() for actor in self.actors]
        self.pools._pictures[POOL] = merged(POOL, told)
        return {r.id for r in self.pools._pictures[POOL].replicas}

    async def refresh(self) -> None:
        await self.known()
        await self.pools._tell_listing(self.spec, self.actors)


def test_only_the_latest_that_left_are_remembered() -> None:
    """An autoscaled deployment has any number of them over the years."""
    name = next(_names)
    for n in range(MAX_LEFT + 10):
        replica_sets.note(name, frozenset({f"r{n}"}))
    assert len(replica_sets.left(name)) == MAX_LEFT
    assert replica_sets.has_left(name, f"r{MAX_LEFT + 8}")
    assert not replica_sets.has_left(name, "r8")


def test_a_replica_that_is_listed_again_has_not_left() -> None:
    name = next(_names)
    for replicas in ({"r", "s"}, {"s"}, {"r", "s"}):
        replica_sets.note(name, frozenset(replicas))
    assert not replica_sets.has_left(name, "r")
    replica_sets.note(name, frozenset({"r"}))
    assert replica_sets.has_left(name, "s")
    assert replica_sets.listed(name) == {"r"}


async def test_a_replica_that_serve_unlists_for_a_moment_keeps_its_work() -> None:
    fleet = Fleet()
    fleet.report(R)
    for _ in range(2):
        fleet.list(R)
        await fleet.refresh()
        fleet.list()
        await fleet.refresh()
        assert await fleet.known() == {R}


async def test_a_replica_that_serve_unlists_for_longer_comes_back() -> None:
    fleet = Fleet()
    fleet.list(R)
    fleet.report(R)
    fleet.list()
    await fleet.refresh()
    await fleet.refresh()
    assert await fleet.known() == set()
    fleet.list(R)
    await fleet.refresh()
    fleet.report(R)
    assert await fleet.known() == {R}


async def test_a_replica_that_drains_stays_away_however_often_it_reports() -> None:
    fleet = Fleet()
    fleet.list(R, S)
    for replica in (R, S):
        fleet.report(replica)
    fleet.list(S)
    await fleet.refresh()
    for _ in range(3):
        await fleet.refresh()
        fleet.report(R)
        assert await fleet.known() == {S}


async def test_a_planned_scale_in_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    actor = RouterActor()
    router = actor.router
    router.take(a_report(R))
    with caplog.at_level(logging.INFO, logger="cato"):
        await router.left(frozenset({R}))
        router.lose(R, "its link ended")  # as each replica that has drained
    decided = await router.decisions()
    assert [(d.kind, d.replica, d.reason) for d in decided.newest] == [
        ("left", R, "left the deployment")
    ]
    assert {r.levelname for r in caplog.records} == {"INFO"}
    router.take(a_report(S))
    with caplog.at_level(logging.INFO, logger="cato"):
        router.lose(S, "its link ended")
    assert caplog.records[-1].levelname == "WARNING"
    assert [d.kind for d in (await router.decisions()).newest] == ["left", "lost"]


async def test_a_restarted_router_hears_which_replicas_drain() -> None:
    fleet = Fleet()
    fleet.list(R)
    fleet.list()
    await fleet.refresh()
    await fleet.refresh()
    fleet.actors = [RouterActor()]
    fleet.report(R)
    await fleet.refresh()
    assert await fleet.known() == set()


async def test_what_another_ingress_told_and_could_not_take_back_is_corrected() -> None:
    """It ended between the unlisting and the listing."""
    fleet = Fleet(shards=2)
    fleet.list(R, S)
    fleet.report(R, shard=1)
    fleet.report(S, shard=0)
    for actor in fleet.actors:
        await actor.router.left(frozenset({R}))
    fleet.report(R, shard=1)
    assert await fleet.known() == {S}
    await fleet.refresh()
    fleet.report(R, shard=1)
    assert await fleet.known() == {R, S}


async def test_an_ingress_says_nothing_about_replicas_that_serve_has_not_listed_to_it() -> None:
    fleet = Fleet()
    fleet.report(R)
    await fleet.refresh()
    assert await fleet.known() == {R}


async def test_a_slot_that_serve_unlists_for_a_moment_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    for module in (slots, shared_pool):
        monkeypatch.setattr(module, "_now_s", lambda: now_s)
    spec = a_pool(JAVA)
    pool = SharedPool(spec, on_each(spec, {JAVA: QUICK}), settle_s=0.0)
    shape = spec.deployments[0].name
    numbers = itertools.count(1)

    def report() -> list[ReplicaId]:
        """The slots that the pool uses once the slot has reported."""
        state, copy_id = SlotState.READY, CopyId("copy-1")
        pool.report(SlotReport(S, next(numbers), HostId("h"), shape, state, copy_id, JAVA))
        return [slot.slot for slot in pool.picture().slots]

    assert report() == [S]
    pool.leave(S)
    assert report() == []
    now_s += 0.9 * LEFT_S
    assert report() == []
    pool.leave(S)  # as a draining slot says in place of each report
    now_s += 0.9 * LEFT_S
    assert report() == []
    now_s += 0.2 * LEFT_S
    assert report() == [S]
    assert pool.residents()[0].model == JAVA


async def test_a_router_remembers_the_latest_that_left() -> None:
    actor = RouterActor()
    router = actor.router
    many = [ReplicaId(f"r{i}") for i in range(MAX_LEFT + 1)]
    for replica in many:
        router.leave(replica)
    router.take(a_report(many[0]))  # it is taken for a new one
    router.take(a_report(many[-1]))
    assert {r.id for r in (await router.picture()).replicas} == {many[0]}
