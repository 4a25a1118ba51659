"""What an ingress offers to an actor that leases outlives the actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from ray.exceptions import RayActorError

from cato.control.router import ReplicaRouter
from cato.core.commands import Dispatch
from cato.core.errors import CapacityError
from cato.core.ids import PoolName
from cato.core.topology import PoolPolicies
from cato.serve import router_link
from cato.serve.router_link import RouterLink
from cato.testing.builders import a_profile, a_report, an_invocation

POOL = PoolName("p")


class Actor:
    """A router that can die. As on Ray, calls under way are not told; later ones are refused."""

    def __init__(self) -> None:
        self.router: ReplicaRouter | None = None
        self.pings = 0
        self.had = 0  # offers that an earlier life had taken
        self.restart()

    def restart(self) -> None:
        self.router = ReplicaRouter(POOL, PoolPolicies(scheduler="power-of-two"), a_profile())

    def present(self) -> ReplicaRouter:
        if self.router is None:
            raise RayActorError
        return self.router

    def report(self) -> None:
        self.present().take(a_report(slots=20))

    async def ping(self) -> str:
        self.pings += 1
        return str(id(self.present()))

    def offers(self, id: str, waited: list[float]) -> Callable[[float, bool], Awaitable[Dispatch]]:
        def offer(waited_s: float, was_taken: bool) -> Awaitable[Dispatch]:
            waited.append(waited_s)
            self.had += was_taken
            return self._offer(id, waited_s)

        return offer

    async def _offer(self, id: str, waited_s: float) -> Dispatch:
        return await self.present().offer(an_invocation(id).on_clock(-waited_s))


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    monkeypatch.setattr(router_link, "WATCH_S", 0.01)
    monkeypatch.setattr(router_link, "IDLE_WATCH_S", 0.01)
    monkeypatch.setattr(router_link, "POLL_S", 0.02)
    return Actor()


@pytest.fixture
async def link(actor: Actor) -> RouterLink:
    return RouterLink(actor.ping)


async def test_what_an_earlier_life_was_offered_is_offered_to_the_next(
    actor: Actor, link: RouterLink
) -> None:
    waited: list[float] = []
    leases = [
        asyncio.create_task(link.lease(POOL, actor.offers(f"i{n}", waited))) for n in range(20)
    ]
    await asyncio.sleep(0.05)
    assert not any(lease.done() for lease in leases)  # there is no replica yet
    actor.restart()
    actor.report()
    async with asyncio.timeout(5):
        granted = await asyncio.gather(*leases)
    assert {g.replica_id for g in granted} == {"r"}
    assert [len(waited), waited[:20]] == [40, pytest.approx([0.0] * 20, abs=0.05)]
    assert min(waited[20:]) >= 0.05  # the clock of the SLO went on
    assert actor.had == 20


async def test_a_call_that_had_waited_for_long_survives_a_restart_too(
    actor: Actor, link: RouterLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "PATIENCE_S", 0.1)
    waited: list[float] = []
    lease = asyncio.create_task(link.lease(POOL, actor.offers("i", waited)))
    await asyncio.sleep(0.3)
    actor.restart()
    actor.report()
    async with asyncio.timeout(5):
        assert (await lease).replica_id == "r"
    assert [len(waited), waited[1] >= 0.3] == [2, True]


async def test_an_actor_that_is_away_is_asked_by_one_for_all(
    actor: Actor, link: RouterLink
) -> None:
    actor.router = None
    waited: list[float] = []
    leases = [
        asyncio.create_task(link.lease(POOL, actor.offers(f"i{n}", waited))) for n in range(10)
    ]
    await asyncio.sleep(0.1)
    assert len(waited) == 10
    assert actor.pings < 30
    actor.restart()
    actor.report()
    async with asyncio.timeout(5):
        granted = await asyncio.gather(*leases)
    assert len({g.invocation_id for g in granted}) == 10
    assert actor.had == 0  # nobody had them: its bounds hold


async def test_who_gives_up_is_told_so(actor: Actor, link: RouterLink) -> None:
    waited: list[float] = []
    lease = asyncio.create_task(link.lease(POOL, actor.offers("i", waited)))
    await asyncio.sleep(0.02)
    lease.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lease
    actor.restart()
    await asyncio.sleep(0.05)
    assert len(waited) == 1


async def test_an_actor_that_stays_away_is_no_capacity(
    actor: Actor, link: RouterLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "PATIENCE_S", 0.2)
    actor.router = None
    with pytest.raises(CapacityError, match="does not answer"):
        await link.lease(POOL, actor.offers("i", []))
