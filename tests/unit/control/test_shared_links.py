"""Calls of a shared pool over real links: ingress, books and slots, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kits.local_slots import on_each
from test_shared_pool import (
    GO,
    JAVA,
    QUICK,
    SLOW,
    a_pool,
    a_request,
    an_invocation,
    text_of,
    until,
)

from cato.control.shared_pool import SharedPool
from cato.core.errors import EngineDeadError, LinkError, ReplicaLostError
from cato.core.events import StreamLost
from cato.core.ids import HostId, InvocationId, ModelName, PoolName, ReplicaId
from cato.core.topology import SharedPoolSpec
from cato.serve import replica_link
from cato.serve.engine_loader import EngineLoader
from cato.serve.lease_link import LeaseLink
from cato.serve.ordered_models import OrderedModels
from cato.serve.replica import Replica
from cato.serve.replica_link import REPORT_S, ReplicaLink
from cato.serve.token_streams import TokenStreams
from cato.wire.link.connection import Connection, Handler
from cato.wire.link.endpoints import Listener
from tests.unit.link_kit import SECRET, dial, taken


class Slot:
    """A replica with its links, as in a process of its own."""

    def __init__(self, name: str, spec: SharedPoolSpec) -> None:
        self.link = ReplicaLink(spec.name, spec.deployments[0].name, lambda: 0, is_shared=True)
        self.holding = OrderedModels(
            HostId("h"),
            spec.deployments[0].name,
            EngineLoader(spec.deployments[0], "", _nothing_forks),
            _nothing_is_measured,
        )
        self.replica = Replica(ReplicaId(name), self.holding, self.link.tell)
        loop = asyncio.get_running_loop()
        keeping = (self.link.keep_forever(self.replica), self.holding.keep_forever())
        self._tasks = [loop.create_task(kept) for kept in keeping]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.link.close()
        await self.holding.stop()


class Cluster:
    """Books and slots of one pool, and an ingress."""

    def __init__(self, spec: SharedPoolSpec, folder: Path) -> None:
        self.spec, self._folder = spec, folder
        self.books = self._new_books()
        self._listener: Listener | None = None
        self.ingress = LeaseLink(spec.name, lambda shard, handler: self.link_to_books(handler))
        self.streams = TokenStreams(dial)
        self.slots: dict[str, Slot] = {}

    def _new_books(self) -> SharedPool:
        return SharedPool(self.spec, on_each(self.spec, {JAVA: SLOW, GO: QUICK}), settle_s=0.0)

    async def begin(self) -> None:
        self._listener = self.books.links._listener = await taken(self.books.links, self._folder)

    async def restart(self) -> None:
        self.books.close()
        self.books = self._new_books()
        await self.begin()

    async def link_to_books(self, handler: Handler) -> tuple[Connection, bytes]:
        if self._listener is None:
            raise LinkError("books", "they are being opened")
        return await dial(self._listener.address, SECRET, "books", handler), SECRET

    def add(self, name: str) -> Slot:
        self.slots[name] = Slot(name, self.spec)
        return self.slots[name]

    async def ask(self, id: str, model: ModelName, tokens: int = 8) -> str:
        leased = await self.ingress.lease(an_invocation(id), model)
        lease = await self.streams.reach(leased.dispatch, leased.address, SECRET)
        assert "Serve" not in lease.reason
        chunks = self.streams.stream(lease, a_request(id, tokens), model)
        return "".join([chunk.text async for chunk in chunks])


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    cluster = Cluster(a_pool(JAVA, GO, slots=2), tmp_path)

    async def to_books(
        pool: PoolName, handler: Handler, shard: int, tries: int, *, is_shared: bool
    ) -> tuple[Connection, bytes]:
        assert (pool, shard, is_shared) == (cluster.spec.name, 0, True)
        return await cluster.link_to_books(handler)

    async def take(handler: Handler, secret: bytes, name: str) -> Listener:
        return await taken(handler, tmp_path)

    monkeypatch.setattr(replica_link, "link_to_router", to_books)
    monkeypatch.setattr(replica_link, "take", take)
    await cluster.begin()
    yield cluster
    for slot in cluster.slots.values():
        await slot.end()
    for link in cluster.streams._links._open.values():
        link.close("the test is over")
    cluster.ingress.close()
    cluster.books.close()


async def _nothing_forks() -> str:
    raise AssertionError


async def _nothing_is_measured(*_: object) -> None:
    raise AssertionError


def held(slot: Slot) -> int:
    return len(slot.replica.calls.attempts)


async def test_a_slot_that_cannot_accept_links_leaves_none_open_and_waits_longer_each_time(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[Connection] = []
    tried_at_s: list[float] = []
    monkeypatch.setattr(replica_link, "RETRY_S", 0.01)

    async def to_books(
        pool: PoolName, handler: Handler, shard: int, tries: int, *, is_shared: bool
    ) -> tuple[Connection, bytes]:
        link, secret = await cluster.link_to_books(handler)
        links.append(link)
        return link, secret

    async def take(handler: Handler, secret: bytes, name: str) -> Listener:
        tried_at_s.append(asyncio.get_running_loop().time())
        if len(tried_at_s) <= 4:
            raise OSError("no file is left")
        return await taken(handler, tmp_path)

    monkeypatch.setattr(replica_link, "link_to_router", to_books)
    monkeypatch.setattr(replica_link, "take", take)
    cluster.add("a")
    await until(lambda: len(cluster.books.picture().slots) == 1)
    assert [link.is_open for link in links] == [False] * 4 + [True]
    assert tried_at_s[4] - tried_at_s[3] > 0.1, "ten times the first wait"
    assert await cluster.ask("1", JAVA) == text_of(JAVA)


async def test_leases_orders_and_tokens_go_over_links(cluster: Cluster) -> None:
    cluster.add("a")
    assert await cluster.ask("1", JAVA) == text_of(JAVA)
    assert await cluster.ask("2", GO) == text_of(GO)
    assert await cluster.ask("3", JAVA) == text_of(JAVA)
    counts = cluster.books.picture().counts
    assert (counts.served, counts.failures) == (3, 0)
    await until(lambda: all(s.running == 0 for s in cluster.books.picture().slots))


async def test_a_slot_that_ends_is_lost_at_once_and_the_call_is_served_by_another(
    cluster: Cluster,
) -> None:
    first = cluster.add("a")
    call = asyncio.create_task(cluster.ask("1", JAVA, 2000))
    await until(lambda: held(first) == 1)
    await cluster.slots.pop("a").end()
    with pytest.raises((ReplicaLostError, EngineDeadError)):
        await call
    await until(lambda: cluster.books.picture().slots == ())
    cluster.add("b")
    assert await cluster.ask("1", JAVA) == text_of(JAVA)


async def test_a_stream_that_breaks_unloads_no_model(cluster: Cluster) -> None:
    slot = cluster.add("a")
    cluster.add("b")
    assert await cluster.ask("1", JAVA) == text_of(JAVA)
    assert await cluster.ask("2", GO) == text_of(GO)
    before = {s.slot: s.model for s in cluster.books.picture().slots}
    holder = next(s.slot for s in cluster.books.picture().slots if s.model == JAVA)
    cluster.ingress.tell(StreamLost(0.0, holder, InvocationId("1"), 1, "its stream broke"))
    assert await cluster.ask("3", JAVA) == text_of(JAVA)
    await asyncio.sleep(2 * REPORT_S)
    picture = cluster.books.picture()
    assert {s.slot: s.model for s in picture.slots} == before
    assert picture.counts.loads == 2
    assert held(slot) == 0


async def test_new_books_cut_no_stream_and_find_what_runs(cluster: Cluster) -> None:
    slot = cluster.add("a")
    call = asyncio.create_task(cluster.ask("1", JAVA, 100))
    await until(lambda: held(slot) == 1)
    await cluster.restart()
    await until(lambda: [s.running for s in cluster.books.picture().slots] == [1])
    assert not call.done()
    assert await call == text_of(JAVA, 100)
    assert await cluster.ask("2", JAVA) == text_of(JAVA)
    assert cluster.books.picture().counts.loads == 0


async def test_a_slot_that_drains_ends_its_streams_and_gets_no_more(cluster: Cluster) -> None:
    slot = cluster.add("a")
    call = asyncio.create_task(cluster.ask("1", JAVA, 50))
    await until(lambda: held(slot) == 1)
    draining = asyncio.create_task(slot.replica.drain())
    await until(lambda: cluster.books.picture().slots == ())
    cluster.add("b")
    assert await cluster.ask("2", JAVA) == text_of(JAVA)
    assert await call == text_of(JAVA, 50)
    await draining
