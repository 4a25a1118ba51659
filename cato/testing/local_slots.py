"""A shared pool in one process, without Ray: its real books and slots with simulated engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

from cato.control.links import Told
from cato.control.shared_pool import SharedPool
from cato.control.staged import Staged
from cato.core.commands import Dispatch
from cato.core.errors import CatoError
from cato.core.eviction import CopyId
from cato.core.ids import HostId, ModelName, ReplicaId
from cato.core.profile import Profile
from cato.core.slots import SlotOrder, SlotReport, StopCalls
from cato.core.snapshot import Invocation
from cato.core.topology import SharedPoolSpec
from cato.engines.base import EngineChunk, EngineRequest
from cato.serve.card_slot import CardSlot, KeeperGoneError, Loader
from cato.serve.engine_loader import EngineLoader

TICK_S = 0.05


class LocalSharedPool:
    """`spec.slots.initial_replicas` slots on `hosts` in turns. Use it as an async context manager.

    `loader` takes the place of the slots' own.
    """

    def __init__(
        self,
        spec: SharedPoolSpec,
        profiles: Mapping[ModelName, Profile],
        *,
        hosts: tuple[str, ...] = ("host",),
        loader: Loader | None = None,
        log_folder: str | None = None,
    ) -> None:
        self._spec, self._profiles = spec, profiles
        self.books: SharedPool | None = SharedPool(
            spec, profiles, settle_s=0.0, log_folder=log_folder
        )
        self._loader = loader or EngineLoader(spec.slots, "", _no_zygote)
        self.slots: dict[ReplicaId, CardSlot] = {}
        self._attending: dict[ReplicaId, asyncio.Task[None]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._hosts = hosts

    async def __aenter__(self) -> LocalSharedPool:
        for i in range(self._spec.slots.initial_replicas):
            self.add_slot(f"slot-{i}", self._hosts[i % len(self._hosts)])
        self._ticker = asyncio.create_task(self._tick_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._ticker is not None
        self._ticker.cancel()
        for id in list(self.slots):
            await self.remove_slot(id)

    def add_slot(self, name: str, host: str) -> None:
        id = ReplicaId(name)
        self.slots[id] = CardSlot(id, HostId(host), _LocalKeeper(self), self._loader)
        self._attending[id] = asyncio.create_task(self.slots[id].attend_forever())

    async def remove_slot(self, id: ReplicaId) -> None:
        """The slot ends, as when Serve stops its replica; what runs there is cut off."""
        task = self._attending.pop(id)
        task.cancel()
        await asyncio.wait((task,))
        await self.slots.pop(id).shutdown()

    def lose_books(self) -> None:
        """The Eviction Manager is gone until `restart_books`."""
        self.books = None

    def restart_books(self) -> None:
        """Books that know nothing but the deployment file."""
        self.books = SharedPool(self._spec, self._profiles)

    async def lease(self, model: ModelName, invocation: Invocation) -> Dispatch:
        return await self.present_books().offer(model, invocation)

    async def stream(
        self, model: ModelName, lease: Dispatch, request: EngineRequest
    ) -> AsyncGenerator[EngineChunk, None]:
        chunks = self.slots[lease.replica_id].generate(
            model, request, lease.invocation_id, lease.attempt
        )
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    def present_books(self) -> SharedPool:
        if self.books is None:
            raise KeeperGoneError("the books are lost")
        return self.books

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.books is not None:
                self.books.tick()


class _LocalKeeper:
    def __init__(self, pool: LocalSharedPool) -> None:
        self._pool = pool

    async def attend(self, report: SlotReport) -> SlotOrder | StopCalls | None:
        return await self._pool.present_books().attend(report)

    async def report(self, report: SlotReport) -> None:
        self._pool.present_books().report(report)

    async def tell(self, slot: ReplicaId, model: ModelName, told: tuple[Told, ...]) -> None:
        self._pool.present_books().tell(slot, model, told)

    async def leave(self, slot: ReplicaId) -> None:
        self._pool.present_books().leave(slot)

    async def measured(self, slot: ReplicaId, copy_id: CopyId, found: Staged | CatoError) -> None:
        self._pool.present_books().measured(slot, copy_id, found)


async def _no_zygote() -> str:
    raise AssertionError("simulated engines are not forked")
