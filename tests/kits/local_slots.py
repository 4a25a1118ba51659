"""A shared pool in one process, without Ray: its real keeper, and slots with simulated engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import cast

from cato.control.messages import Generate, Joined, Stop
from cato.control.shared_pool import HostedProfiles, SharedPool
from cato.control.staged import Staged
from cato.core.commands import Dispatch
from cato.core.errors import CatoError
from cato.core.eviction import CopyId
from cato.core.ids import DeploymentName, HostId, ModelName, ReplicaId
from cato.core.profile import Profile
from cato.core.slots import SlotOrder
from cato.core.snapshot import Invocation
from cato.core.topology import SharedPoolSpec
from cato.engines.base import EngineChunk, EngineRequest
from cato.serve.engine_loader import EngineLoader
from cato.serve.ordered_models import KeeperGoneError, Loader, OrderedModels
from cato.serve.replica import Replica
from cato.wire.link.connection import Connection
from cato.wire.link.endpoints import Address

TICK_S = 0.05
NOWHERE = Address("", "", "", 0)


class LocalSlot:
    """A slot of a shared pool; it calls the keeper directly, without a link."""

    def __init__(
        self,
        pool: LocalSharedPool,
        id: ReplicaId,
        host: HostId,
        deployment: DeploymentName,
        loader: Loader,
    ) -> None:
        self._pool = pool
        self.holding = OrderedModels(host, deployment, loader, partial(pool.measured, id))
        self.replica = Replica(id, self.holding, self._tell)
        self._keeping = asyncio.create_task(self.holding.keep_forever())

    def join(self) -> None:
        """Connect to the keeper, if there is one."""
        self._tell(Joined(self.replica.id, NOWHERE))
        self.replica.report()

    def note(self, note: object) -> None:
        """The link's receiver: a message of the keeper."""
        if isinstance(note, Stop | SlotOrder):
            self.replica.note(note)

    def close(self, why: str) -> None:
        """The link was closed by this keeper; connect to the current one, if any."""

    async def end(self) -> None:
        """End the slot's process; running calls are cut off."""
        self._keeping.cancel()
        await asyncio.wait((self._keeping,))
        if self._pool.books is not None:
            self._pool.books.links.ended(self._peer)
        await self.holding.stop()

    def _tell(self, note: object) -> None:
        if self._pool.books is not None:
            self._pool.books.links.note(self._peer, note)

    @property
    def _peer(self) -> Connection:
        return cast("Connection", self)


def on_each(
    spec: SharedPoolSpec, profiles: Mapping[ModelName, Profile]
) -> dict[ModelName, dict[DeploymentName, Profile]]:
    """The same profile of a model on each deployment where it fits."""
    hosted = {h.model.name: h for h in spec.models}
    return {
        model: {d.name: profile for d in spec.where_fits(hosted[model])}
        for model, profile in profiles.items()
        if model in hosted
    }


class LocalSharedPool:
    """The slots of all deployments, on `hosts` in turn. Use it as an async context manager.

    `profiles` are the same on all deployments unless they are given by deployment. `loader`
    replaces the slots' own.
    """

    def __init__(
        self,
        spec: SharedPoolSpec,
        profiles: Mapping[ModelName, Profile] | HostedProfiles,
        *,
        hosts: tuple[str, ...] = ("host",),
        loader: Loader | None = None,
        log_folder: str | None = None,
    ) -> None:
        alike = {m: p for m, p in profiles.items() if isinstance(p, Profile)}
        by_shape = {m: p for m, p in profiles.items() if not isinstance(p, Profile)}
        self._spec = spec
        self._profiles: HostedProfiles = {**on_each(spec, alike), **by_shape}
        self.books: SharedPool | None = SharedPool(
            spec, self._profiles, settle_s=0.0, log_folder=log_folder
        )
        self._loader = loader
        self.slots: dict[ReplicaId, LocalSlot] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._hosts = hosts

    async def __aenter__(self) -> LocalSharedPool:
        shapes = [d.name for d in self._spec.deployments for _ in range(d.initial_replicas)]
        for i, shape in enumerate(shapes):
            self.add_slot(f"slot-{i}", self._hosts[i % len(self._hosts)], shape)
        self._ticker = asyncio.create_task(self._tick_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._ticker is not None
        self._ticker.cancel()
        for id in list(self.slots):
            await self.remove_slot(id)

    def add_slot(self, name: str, host: str, shape: DeploymentName | None = None) -> None:
        """`shape`: its deployment, the first one by default."""
        id = ReplicaId(name)
        spec = self._spec.deployments[0] if shape is None else self._spec.deployment(shape)
        loader = self._loader or EngineLoader(spec, "", _no_zygote)
        self.slots[id] = LocalSlot(self, id, HostId(host), spec.name, loader)
        self.slots[id].join()

    async def remove_slot(self, id: ReplicaId) -> None:
        """See `LocalSlot.end`."""
        await self.slots.pop(id).end()

    def lose_books(self) -> None:
        """The Eviction Manager is gone until `restart_books`."""
        self.books = None

    def restart_books(self) -> None:
        """Start a keeper that knows only the deployment file."""
        self.books = SharedPool(self._spec, self._profiles)
        for slot in self.slots.values():
            slot.join()

    async def lease(self, model: ModelName, invocation: Invocation) -> Dispatch:
        return await self.present_books().offer(invocation, 0, model)

    async def stream(
        self, model: ModelName, lease: Dispatch, request: EngineRequest
    ) -> AsyncGenerator[EngineChunk, None]:
        asked = Generate(request, lease.invocation_id, lease.attempt, model)
        chunks = self.slots[lease.replica_id].replica.generate(asked)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def measured(self, slot: ReplicaId, copy_id: CopyId, found: Staged | CatoError) -> None:
        self.present_books().measured(slot, copy_id, found)

    def present_books(self) -> SharedPool:
        if self.books is None:
            raise KeeperGoneError("the books are lost")
        return self.books

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for slot in self.slots.values():
                slot.replica.report()
            if self.books is not None:
                self.books.tick()


async def _no_zygote() -> str:
    raise AssertionError("simulated engines are not forked")
