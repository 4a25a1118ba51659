"""Ingress, router and replica over real links: leases, tokens, orders, and ends of peers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from ingress_kit import until
from kits.builders import a_profile, a_report, an_invocation

from cato.control.messages import CODEC, Generate, Offer, Told
from cato.control.router import ReplicaRouter
from cato.core.commands import Dispatch
from cato.core.errors import (
    EngineError,
    LinkCallError,
    LinkError,
    ReplicaLostError,
    RouterAwayError,
)
from cato.core.events import InvocationEnded, InvocationOffered, ReplicaProgressed, StreamLost
from cato.core.ids import DeploymentName, InvocationId, PoolName, ReplicaId
from cato.core.length import LengthBelief, around
from cato.core.orchestrator import PoolOrchestrator
from cato.core.snapshot import Invocation
from cato.core.topology import EngineSpec, PoolPolicies
from cato.engines.base import EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.policies.registry import policies_of
from cato.serve import lease_link
from cato.serve.held_calls import HeldCalls
from cato.serve.lease_link import LeaseLink
from cato.serve.progress import Progress
from cato.serve.token_streams import TokenStreams
from cato.wire.endpoint import Endpoint
from cato.wire.link.connection import Connection, Handler, Passive
from cato.wire.link.endpoints import Address, Listener
from tests.unit.link_kit import SECRET, dial, joined, taken

POOL, REPLICA = PoolName("p"), ReplicaId("r")
ID = InvocationId("i")


class Lives:
    """The router of a pool and its restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listener: Listener | None = None
        self._links: list[Connection] = []
        self.router = self._new()

    def _new(self) -> ReplicaRouter:
        return ReplicaRouter(POOL, PoolPolicies(scheduler="power-of-two"), a_profile())

    async def begin(self) -> None:
        self.router = self._new()
        self._listener = await taken(self.router.links, self._folder)

    def end(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for link in self._links:
            link.close("killed")
        self._listener = None

    async def dial(self, shard: int, handler: Handler) -> tuple[Connection, bytes]:
        if self._listener is None:
            raise LinkError("router", "being restarted")
        self._links.append(await dial(self._listener.address, SECRET, "router", handler))
        return self._links[-1], SECRET

    async def queued(self, calls: int) -> None:
        """Return when so many calls wait."""
        async with asyncio.timeout(5):
            while (await self.router.picture()).queued != calls:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
async def lives(tmp_path: Path) -> AsyncIterator[Lives]:
    lives = Lives(tmp_path)
    await lives.begin()
    yield lives
    lives.end()


async def test_a_link_may_be_opened_before_the_first_offer(lives: Lives) -> None:
    dialled: list[int] = []

    async def dial(shard: int, handler: Handler) -> tuple[Connection, bytes]:
        dialled.append(1)
        return await lives.dial(shard, handler)

    link = LeaseLink(POOL, dial)
    link.open()
    link.open()
    await link._connected()
    link.open()
    leasing = asyncio.ensure_future(link.lease(an_invocation("i")))
    await asyncio.sleep(0.05)
    assert len(dialled) == 1
    leasing.cancel()


async def test_a_lease_names_its_replica_and_where_it_takes_links(
    lives: Lives, tmp_path: Path
) -> None:
    link = LeaseLink(POOL, lives.dial)
    own = Address("h", "/a/socket", "127.0.0.1", 1)
    lives.router.take(a_report(REPLICA))
    async with joined(lives.router, REPLICA, tmp_path, own):
        leased = await link.lease(an_invocation("i"))
    assert (leased.dispatch.replica_id, leased.address, link.secret) == (REPLICA, own, SECRET)


async def test_a_call_that_breaks_the_router_is_not_offered_again(
    lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would break it each time, without end."""
    link, offer = LeaseLink(POOL, lives.dial), lives.router.offer
    offered: list[InvocationId] = []

    async def breaking(invocation: Invocation, shared_blocks: int = 0) -> Dispatch:
        offered.append(invocation.id)
        if invocation.id == ID:
            raise ZeroDivisionError
        return await offer(invocation, shared_blocks)

    monkeypatch.setattr(lives.router, "offer", breaking)
    lives.router.take(a_report(REPLICA))
    async with joined(lives.router, REPLICA, tmp_path):
        with pytest.raises(LinkCallError, match="ZeroDivisionError"):
            await link.lease(an_invocation(ID))
        assert (await link.lease(an_invocation("j"))).dispatch.replica_id == REPLICA
    assert offered == [ID, "j"]


@pytest.mark.parametrize("belief", [LengthBelief((16.0,)), around(50)])
def test_what_is_believed_of_an_output_arrives_whole(belief: LengthBelief) -> None:
    offer = Offer(replace(an_invocation("i"), length=belief))
    assert CODEC.unpack(CODEC.pack(offer)) == offer


async def test_what_a_dead_ingress_has_waiting_is_withdrawn_at_once(lives: Lives) -> None:
    dead, _ = await lives.dial(0, Passive())
    waiting = asyncio.ensure_future(dead.ask(Offer(an_invocation("i"))))
    await lives.queued(1)
    dead.close("killed")
    await lives.queued(0)
    with pytest.raises(LinkError):
        await waiting


async def test_to_give_up_waiting_is_to_withdraw(lives: Lives) -> None:
    waiting = asyncio.ensure_future(LeaseLink(POOL, lives.dial).lease(an_invocation("i")))
    await lives.queued(1)
    waiting.cancel()
    await lives.queued(0)


class Waiting(Lives):
    """Its routers keep what they are offered."""

    def _new(self) -> ReplicaRouter:
        router = super()._new()
        offered, offer = self.offered, router.offer

        async def noted(invocation: Invocation, shared_blocks: int = 0) -> Dispatch:
            offered.append(invocation)
            return await offer(invocation, shared_blocks)

        router.offer = noted  # type: ignore[method-assign]
        return router

    def __init__(self, folder: Path) -> None:
        self.offered: list[Invocation] = []
        super().__init__(folder)


async def test_what_waits_outlives_the_router(tmp_path: Path) -> None:
    lives = Waiting(tmp_path)
    await lives.begin()
    link = LeaseLink(POOL, lives.dial)
    calls = [an_invocation(f"i{n}") for n in range(20)]
    leases = [asyncio.ensure_future(link.lease(call)) for call in calls]
    await lives.queued(20)
    await asyncio.sleep(0.05)
    lives.end()
    await lives.begin()
    await lives.queued(20)
    lives.router.take(a_report(REPLICA, slots=20))
    async with asyncio.timeout(5):
        granted = await asyncio.gather(*leases)
    assert {lease.dispatch.replica_id for lease in granted} == {REPLICA}
    again = lives.offered[20:]
    assert all(call.was_taken for call in again)
    assert max(call.arrived_at_s for call in again) <= -0.05, "the clock of the SLO went on"
    lives.end()


async def test_a_router_that_stays_away_is_reported_as_such(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_link, "PATIENCE_S", 0.2)
    lives.end()
    with pytest.raises(RouterAwayError, match="does not answer"):
        await LeaseLink(POOL, lives.dial).lease(an_invocation("i"))


async def test_a_router_that_lost_a_prefix_is_sent_all_of_it(lives: Lives) -> None:
    lives.router.take(a_report(REPLICA))
    call = replace(an_invocation("i"), session="s", prefix=(1, 2, 3), shared_blocks=2)
    leased = await LeaseLink(POOL, lives.dial).lease(call)
    assert leased.dispatch.invocation_id == call.id


async def test_the_leases_of_a_replica_end_with_its_link(lives: Lives, tmp_path: Path) -> None:
    async with joined(lives.router, REPLICA, tmp_path):
        lives.router.take(a_report(REPLICA))
        await lives.router.offer(an_invocation("i"))
    waiting = asyncio.ensure_future(lives.router.offer(an_invocation("next")))
    await lives.queued(1)  # it is leased to nobody: the replica takes no work
    lives.router.take(a_report(REPLICA))
    assert (await asyncio.wait_for(waiting, 5)).replica_id == REPLICA


async def test_a_stream_that_breaks_ends_only_its_own_lease_while_the_replica_is_linked(
    lives: Lives, tmp_path: Path
) -> None:
    ingress, _ = await lives.dial(0, Passive())
    lost = StreamLost(0.0, REPLICA, InvocationId("broken"), 1, "its stream broke")
    async with joined(lives.router, REPLICA, tmp_path):
        lives.router.take(a_report(REPLICA, slots=3))
        for id in ("broken", "well"):
            await lives.router.offer(an_invocation(id))
        ingress.note(lost)
        await until(lambda: lives.router._core.leased == {"well"}, within_s=5)
        waiting = asyncio.ensure_future(lives.router.offer(an_invocation("broken", attempt=2)))
        await lives.queued(1)
        lives.router.take(a_report(REPLICA, slots=3, held=["well"]))
        assert (await asyncio.wait_for(waiting, 5)).replica_id == REPLICA
    lives.router.take(a_report(REPLICA, slots=3, held=["well"]))
    ingress.note(lost)
    await until(lambda: not lives.router._core.replicas, within_s=5)


# Tokens


class Replica(Passive):
    """Streams five tokens, or what its prompt orders."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def stream(self, peer: Connection, asked: object) -> AsyncGenerator[EngineChunk, None]:
        assert isinstance(asked, Generate)
        prompt = asked.request.body["prompt"]
        if prompt == "too long":
            raise EngineError("too long", 400)
        try:
            for n in range(1, 5):
                yield EngineChunk("x", n)
            if prompt == "die":
                peer.close("killed")
            if prompt == "hang":
                await asyncio.sleep(100)
            yield EngineChunk("x", 5, 1, 0, "length")
        finally:
            self.left.set()


def a_lease() -> Dispatch:
    return Dispatch(ID, 1, REPLICA, DeploymentName("d"), 0, 0.0, 1.0, 0.1, "the only one")


@pytest.fixture
async def replica() -> Replica:
    return Replica()


@pytest.fixture
async def address(replica: Replica, tmp_path: Path) -> AsyncIterator[Address]:
    listener = await taken(replica, tmp_path)
    yield listener.address
    listener.close()


def tokens_of(
    streams: TokenStreams, prompt: str
) -> contextlib.aclosing[AsyncGenerator[EngineChunk, None]]:
    request = EngineRequest("i.1", Endpoint.COMPLETIONS, {"prompt": prompt})
    return contextlib.aclosing(streams.stream(a_lease(), request))


async def test_tokens_come_straight_from_the_replica(address: Address) -> None:
    streams = TokenStreams(dial)
    assert await streams.reach(a_lease(), address, SECRET) == a_lease()
    async with tokens_of(streams, "go") as chunks:
        read = [chunk async for chunk in chunks]
    assert "".join(chunk.text for chunk in read) == "xxxxx"
    assert read[-1] == EngineChunk("x", 5, 1, 0, "length")


async def test_a_link_that_ends_is_a_lost_replica_and_the_next_lease_connects_anew(
    address: Address,
) -> None:
    streams = TokenStreams(dial)
    for _ in range(2):
        await streams.reach(a_lease(), address, SECRET)
        async with tokens_of(streams, "die") as chunks:
            read = [await anext(chunks) for _ in range(4)]
            with pytest.raises(ReplicaLostError) as lost:
                await anext(chunks)
        assert (lost.value.replica, lost.value.was_reached) == (REPLICA, True)
        assert read[-1].output_tokens == 4, "nothing of what was sent is lost"


async def test_what_the_engine_refuses_is_told_as_it_was(address: Address) -> None:
    streams = TokenStreams(dial)
    await streams.reach(a_lease(), address, SECRET)
    with pytest.raises(EngineError, match="too long") as refused:
        async with tokens_of(streams, "too long") as chunks:
            await anext(chunks)
    assert refused.value.status == 400


async def test_a_reader_that_leaves_ends_its_stream(address: Address, replica: Replica) -> None:
    streams = TokenStreams(dial)
    await streams.reach(a_lease(), address, SECRET)
    async with tokens_of(streams, "hang") as chunks:
        await anext(chunks)
        assert not replica.left.is_set()
    await asyncio.wait_for(replica.left.wait(), 5)


async def test_the_receipt_says_that_a_stream_goes_through_serve(address: Address) -> None:
    streams = TokenStreams(dial)
    refused = await streams.reach(a_lease(), address, b"another secret")
    assert refused.reason.startswith("the only one; through Serve's handle: ")
    unknown = await streams.reach(a_lease(), None, SECRET)
    assert "has not sent its address" in unknown.reason


# What a replica tells of its streams, and what it is told of them


async def test_an_order_stops_the_attempt_that_it_names_also_when_it_comes_first() -> None:
    held: dict[InvocationId, int] = {}
    progress = Progress(REPLICA, held, lambda told: None)
    progress.stop(ID, 2)
    held[ID] = 1
    progress.begin(ID)
    assert not progress.note(ID, 1, 1)
    progress.stop(ID, 1)
    assert progress.note(ID, 1, 2)
    progress.stop(ID, 2)
    held[ID] = 2
    progress.begin(ID)
    assert progress.stop_of(ID).is_set()
    assert progress.note(ID, 2, 1)


async def test_an_attempt_stops_once_a_later_one_has_come_and_gone() -> None:
    """Its reader is gone, and the replica does not know that yet."""
    told: list[Told] = []
    calls, engine = HeldCalls(REPLICA, told.append), Halting(a_profile(), EngineSpec("simulated"))
    await engine.start()

    async def texts(attempt: int) -> list[str]:
        request = EngineRequest("i", Endpoint.COMPLETIONS, {"attempt": attempt})
        chunks = calls.stream(engine, a_profile(), request, ID, attempt)
        return [chunk.text async for chunk in chunks]

    first = asyncio.ensure_future(texts(1))
    await until(lambda: bool(calls.attempts), within_s=5)
    await asyncio.sleep(0)
    assert "".join(await texts(2)) == "abc"
    engine.may_go_on.set()
    assert "c" not in "".join(await first)
    assert not calls.attempts
    await asyncio.sleep(0)
    ends = [(x.attempt, x.outcome) for x in told if isinstance(x, InvocationEnded)]
    assert ends == [(2, "done")]
    # No entry of the first attempt is left to be reported.
    calls.attempts[InvocationId("other")] = 1
    calls.progress.begin(InvocationId("other"))
    calls.progress.note(InvocationId("other"), 1, 20)
    await until(lambda: isinstance(told[-1], ReplicaProgressed), within_s=5)
    assert told[-1] == ReplicaProgressed(0.0, REPLICA, ((InvocationId("other"), 20),))


class Halting(SimulatedEngine):
    """Stops its first answer after a token, until it `may_go_on`."""

    may_go_on = asyncio.Event()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        yield EngineChunk("a", 1)
        if request.body["attempt"] == 1:
            await self.may_go_on.wait()
        yield EngineChunk("b", 2)
        yield EngineChunk("c", 3, 5, 0, "stop")


async def test_progress_is_told_every_twenty_tokens() -> None:
    told: asyncio.Queue[Told] = asyncio.Queue()
    progress = Progress(REPLICA, {ID: 1}, told.put_nowait)
    progress.begin(ID)
    for tokens in range(1, 20):
        progress.note(ID, 1, tokens)
    await asyncio.sleep(0.01)
    assert told.empty()
    progress.note(ID, 1, 20)
    assert await asyncio.wait_for(told.get(), 5) == ReplicaProgressed(0.0, REPLICA, ((ID, 20),))


async def test_tokens_of_a_preempted_attempt_are_not_told_as_those_of_the_next() -> None:
    """It is stopped with its engine's next token; the router may have leased the next attempt to
    the same replica by then."""
    told: list[Told] = []
    other = InvocationId("other")
    progress = Progress(REPLICA, {ID: 1, other: 1}, told.append)
    for id in (ID, other):
        progress.begin(id)
        assert not progress.note(id, 1, 30)
    progress.stop(ID, 1)
    await until(lambda: bool(told), within_s=5)
    pool = PoolOrchestrator(POOL, policies_of(PoolPolicies()))
    pool.handle(a_report(REPLICA, slots=2))
    for call in (an_invocation(other), replace(an_invocation(ID), attempt=2, generated=30)):
        pool.handle(InvocationOffered(0.0, call))
    (report,) = told
    assert isinstance(report, ReplicaProgressed)
    pool.handle(report)
    running = {r.invocation.id: r.tokens for r in pool.accepting[0].running}
    assert running == {other: 30, ID: 0}
    assert progress.note(ID, 1, 31), "it must stop"
