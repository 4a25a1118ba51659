"""An ingress, two router shards and their replicas over real links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from kits.builders import a_profile, a_report, an_invocation
from link_kit import SECRET, dial, taken

from cato.control.router import ReplicaRouter
from cato.core.errors import CapacityError, LinkError
from cato.core.events import (
    InvocationEnded,
    PoliciesChanged,
    ReplicaProgressed,
    ReplicaReported,
)
from cato.core.ids import DeploymentName, InvocationId, PoolName, ReplicaId
from cato.core.profile import UNMEASURED
from cato.core.shards import homes_of, shard_of
from cato.core.slots import SlotOrder
from cato.core.snapshot import ReplicaView
from cato.core.topology import PoolPolicies, Shards
from cato.serve import replica_link
from cato.serve.lease_link import LeaseLink
from cato.serve.replica import Replica
from cato.serve.replica_link import ReplicaLink
from cato.wire.link.connection import Connection, Handler
from cato.wire.link.endpoints import Listener

POOL, DEPLOYMENT = PoolName("p"), DeploymentName("d")


class Reports:
    """A replica that says that it is there."""

    def join(self, replica: Replica) -> None:
        self._replica = replica

    def report(self) -> ReplicaReported:
        return a_report(self._replica.id)

    def obey(self, order: SlotOrder) -> None:
        raise AssertionError

    async def keep_forever(self) -> None:
        raise AssertionError

    async def stop(self) -> None:
        raise AssertionError


class TwoShards:
    """Two shards of one pool, which may be killed and come back."""

    def __init__(self, folder: Path, sizes: Shards) -> None:
        self._folder, self.sizes = folder, sizes
        self._listeners: dict[int, Listener] = {}
        self._links: dict[int, list[Connection]] = {0: [], 1: []}
        self.routers: dict[int, ReplicaRouter] = {}

    async def begin(self, shard: int) -> None:
        policies = PoolPolicies(scheduler="power-of-two")
        router = ReplicaRouter(POOL, policies, a_profile(), None, SECRET, shard, self.sizes)
        self.routers[shard] = router
        self._listeners[shard] = await taken(router.links, self._folder)

    def end(self, shard: int) -> None:
        self._listeners.pop(shard).close()
        for link in self._links[shard]:
            link.close("killed")

    async def dial(self, shard: int, handler: Handler) -> tuple[Connection, bytes]:
        if shard not in self._listeners:
            raise LinkError(f"shard {shard}", "being restarted")
        address = self._listeners[shard].address
        self._links[shard].append(await dial(address, SECRET, f"shard {shard}", handler))
        return self._links[shard][-1], SECRET

    async def owned(self, shard: int) -> set[str]:
        picture = await self.routers[shard].picture()
        return {r.id for r in picture.replicas if r.accepting}

    async def until_owned(self, shard: int, replicas: set[str]) -> None:
        async with asyncio.timeout(10):
            while await self.owned(shard) != replicas:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def shards(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[TwoShards]:
    shards = TwoShards(tmp_path, getattr(request, "param", Shards(2)))
    for shard in (0, 1):
        await shards.begin(shard)
    yield shards
    for shard in list(shards._listeners):
        shards.end(shard)


def a_link(shards: TwoShards) -> LeaseLink:
    link = LeaseLink(POOL, shards.dial)
    link.resize(shards.sizes, UNMEASURED)
    return link


@pytest.mark.parametrize("shards", [Shards(1), Shards(2)], indirect=True)
async def test_a_call_that_waits_in_a_removed_pool_is_refused_while_its_router_still_runs(
    shards: TwoShards,
) -> None:
    """A new deployment file: the old router ends once all parts of the new one are up."""
    link = a_link(shards)
    waiting = asyncio.ensure_future((await connected(link)).lease(an_invocation("a")))
    async with asyncio.timeout(5):
        while not any([(await r.picture()).queued for r in shards.routers.values()]):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        link.close()
        with pytest.raises(CapacityError, match="it was removed"):
            await waiting


async def connected(link: LeaseLink) -> LeaseLink:
    link.open()
    async with asyncio.timeout(5):
        while not all(s.is_open for s in link._shards):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return link


async def test_calls_go_to_the_shard_that_has_replicas(shards: TwoShards) -> None:
    shards.routers[1].take(a_report("r", slots=20))
    link = await connected(a_link(shards))
    leases = [await link.lease(an_invocation(f"i{n}")) for n in range(5)]
    assert {lease.dispatch.replica_id for lease in leases} == {"r"}


async def test_what_waits_in_a_shard_without_replicas_moves_to_one_that_has_some(
    shards: TwoShards,
) -> None:
    link = await connected(a_link(shards))
    calls = [an_invocation(f"i{n}") for n in range(10)]
    waiting = [asyncio.ensure_future(link.lease(call)) for call in calls]
    await asyncio.sleep(0.05)
    assert not any(lease.done() for lease in waiting)
    shards.routers[0].take(a_report("r", slots=20))
    async with asyncio.timeout(5):
        leases = await asyncio.gather(*waiting)
    assert {lease.dispatch.replica_id for lease in leases} == {"r"}
    assert (await shards.routers[1].picture()).queued == 0, "nothing is left behind"


async def test_what_waits_in_a_shard_that_dies_is_offered_to_the_other(shards: TwoShards) -> None:
    for shard in (0, 1):
        shards.routers[shard].take(a_report(f"r{shard}", slots=1))
    link = await connected(a_link(shards))
    home = shard_of("bx", (0, 1))
    calls = [replace(an_invocation(f"i{n}"), buffer="x", run_id=f"run{n}") for n in range(2)]
    first = await link.lease(calls[0])
    assert first.dispatch.replica_id == f"r{home}"
    shards.end(home)
    second = await asyncio.wait_for(link.lease(calls[1]), 5)
    assert second.dispatch.replica_id == f"r{1 - home}"


@dataclass(frozen=True, slots=True)
class YieldsOnce:
    """The call "a" yields while it is there."""

    def preempt(
        self, replica: ReplicaView, *_: object, **__: object
    ) -> Sequence[tuple[InvocationId, str]]:
        return [(r.invocation.id, "yields") for r in replica.running if r.invocation.id == "a"]


@pytest.mark.parametrize("is_stranded", [False, True])
async def test_what_a_shard_preempted_is_offered_to_it_again(
    shards: TwoShards, *, is_stranded: bool
) -> None:
    """It has queued the call itself; if it has lost its replicas, the call leaves it."""
    for shard in (0, 1):
        shards.routers[shard].take(a_report(f"r{shard}", slots=1))
    link = await connected(a_link(shards))
    call = an_invocation("a", deadline_s=100.0)
    first = await link.lease(call)
    replica = first.dispatch.replica_id
    home = int(replica[1])
    router = shards.routers[home]
    policies = router._core._backlog.policies
    router.take(PoliciesChanged(0.0, replace(policies, late_binding=True, preemption=YieldsOnce())))
    other = asyncio.ensure_future(router.offer(an_invocation("b", deadline_s=5.0)))
    await asyncio.sleep(0)
    router.take(ReplicaProgressed(0.0, replica, ((call.id, 5),)))
    assert (await other).replica_id == replica
    if is_stranded:
        router.take(a_report(replica, slots=1, accepting=False, held=("b",)))
        async with asyncio.timeout(5):
            while not link._choice.is_stranded(home):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    again = asyncio.ensure_future(link.lease(replace(call, attempt=2, generated=5)))
    await asyncio.sleep(0.05)
    router.take(InvocationEnded(0.0, InvocationId("b"), 1, 5, "done"))
    async with asyncio.timeout(5):
        found = (await again).dispatch.replica_id
    assert found == (f"r{1 - home}" if is_stranded else replica)
    assert [(await shards.routers[s].picture()).queued for s in (0, 1)] == [0, 0]


async def test_a_withdrawal_goes_to_the_shard_that_has_the_call(shards: TwoShards) -> None:
    for shard in (0, 1):
        shards.routers[shard].take(a_report(f"r{shard}", slots=1))
    link = await connected(a_link(shards))
    leased = await link.lease(an_invocation("i"))
    shard = int(leased.dispatch.replica_id[1:])
    assert shards.routers[shard]._core.leased
    link.withdraw(an_invocation("i").id, 1, "the client left")
    async with asyncio.timeout(5):
        while shards.routers[shard]._core.leased:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
def begun(
    shards: TwoShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], None]]:
    """Begins the replica of a rank, which keeps its links to the shards."""
    monkeypatch.setattr(replica_link, "REPORT_S", 0.02)
    monkeypatch.setattr(replica_link, "GO_HOME_S", 0.05)
    monkeypatch.setattr(replica_link, "RETRY_S", 0.02)

    async def to_router(
        pool: PoolName, handler: Handler, shard: int, tries: int, *, is_shared: bool
    ) -> tuple[Connection, bytes]:
        assert not is_shared
        return await shards.dial(shard, handler)

    listeners: list[Listener] = []

    async def take(handler: Handler, secret: bytes, name: str) -> Listener:
        listeners.append(await taken(handler, tmp_path))
        return listeners[-1]

    monkeypatch.setattr(replica_link, "link_to_router", to_router)
    monkeypatch.setattr(replica_link, "take", take)

    replicas = []

    def begin(rank: int) -> None:
        link = ReplicaLink(POOL, DEPLOYMENT, partial(int, rank))
        replica = Replica(ReplicaId(f"r{rank}"), Reports(), link.tell)
        replicas.append(asyncio.ensure_future(link.keep_forever(replica)))

    yield begin
    for task in replicas:
        task.cancel()
    for listener in listeners:
        listener.close()


async def test_replicas_belong_to_their_shard_and_to_the_other_while_it_is_away(
    shards: TwoShards, begun: Callable[[int], None]
) -> None:
    for rank in (0, 1):
        begun(rank)
    home = {rank: homes_of(DEPLOYMENT, rank, Shards(2))[0] for rank in (0, 1)}
    for rank, shard in home.items():
        await shards.until_owned(shard, {f"r{rank}"})
    shards.end(home[0])
    await shards.until_owned(home[1], {"r0", "r1"})
    await shards.begin(home[0])
    await shards.until_owned(home[0], {"r0"})
    await shards.until_owned(home[1], {"r1"})


@pytest.mark.parametrize("shards", [Shards(1, standby=1)], indirect=True)
async def test_a_router_that_stands_by_leases_while_the_other_is_away(
    shards: TwoShards, begun: Callable[[int], None]
) -> None:
    for rank in (0, 1):
        begun(rank)
    await shards.until_owned(0, {"r0", "r1"})
    assert await shards.owned(1) == set(), "it has no replicas of its own"
    link = await connected(a_link(shards))
    await link.lease(an_invocation("before"))
    assert not shards.routers[1]._core.leased
    shards.end(0)
    away = await asyncio.wait_for(link.lease(an_invocation("away")), 5)
    assert away.dispatch.replica_id in await shards.owned(1)
    await shards.begin(0)
    await shards.until_owned(0, {"r0", "r1"})
    await shards.until_owned(1, set())
    again = await asyncio.wait_for(link.lease(an_invocation("again")), 5)
    assert again.dispatch.replica_id in await shards.owned(0)
    shards.end(0)  # a restarted router has told its replicas of the other one
    await shards.until_owned(1, {"r0", "r1"})
