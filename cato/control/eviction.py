"""The Eviction Manager actor: which model sits on which card.

It keeps the book of loaded models. Of shared pools it is the router as well: which invocation runs
in which slot and which model that slot loads is one decision.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cato.control.links import Told
from cato.control.shared_pool import ATTEND_S, SharedPool
from cato.control.staged import Staged
from cato.core.arrival_rates import UsualArrivals
from cato.core.commands import Dispatch
from cato.core.errors import CatoError, InputError, PoolClosedError, UnknownNameError
from cato.core.eviction import CopyId
from cato.core.ids import InvocationId, ModelName, PoolName, ReplicaId
from cato.core.profile import Profile
from cato.core.residency import Residency, Resident
from cato.core.slots import HostedPart, SharedPoolPicture, SlotOrder, SlotReport, StopCalls
from cato.core.snapshot import Invocation
from cato.core.topology import HostedModel, SharedPoolPolicies, SharedPoolSpec
from cato.store.errors import StoreError
from cato.store.in_thread import with_store
from cato.store.records import RegisteredModel
from cato.telemetry.decisions import PoolDecisions

log = logging.getLogger("cato.eviction")
SILENCE_S = 10.0
TICK_S = 0.5
# After a restart of this actor the control plane tells it its pools within two seconds.
KNOWN_WITHIN_S = 5.0
POLL_S = 0.1


class EvictionManager:
    """Residency of models, as replicas report it, and the shared pools."""

    def __init__(self) -> None:
        self._book = Residency()
        self._shared: dict[PoolName, SharedPool] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._store: str | None = None
        # Whose models and arrivals the store could not tell yet.
        self._unread_models: set[PoolName] = set()
        self._unread_arrivals: set[PoolName] = set()
        self._registering = asyncio.Lock()
        self._life = uuid.uuid4().hex

    async def life(self) -> str:
        """A name of this life of the actor; after a restart it is another."""
        return self._life

    async def report(self, resident: Resident) -> None:
        self._book.report(time.monotonic(), resident)

    async def remove(self, replica_id: ReplicaId) -> None:
        self._book.remove(replica_id)

    async def residents(self) -> tuple[Resident, ...]:
        self._book.forget_silent(time.monotonic(), SILENCE_S)
        in_slots = [r for pool in self._shared.values() for r in pool.residents()]
        return (*self._book.all(), *in_slots)

    async def why_not_unload(self, replica_id: ReplicaId, min_copies: int) -> str | None:
        """Why a copy must stay; None when it may be unloaded."""
        self._book.forget_silent(time.monotonic(), SILENCE_S)
        return self._book.why_not_unload(replica_id, min_copies)

    # Shared pools

    async def register(
        self,
        pools: Sequence[tuple[SharedPoolSpec, Mapping[ModelName, Profile]]],
        policies: Mapping[PoolName, SharedPoolPolicies],
        store: str | None,
        event_log: str | None = None,
    ) -> None:
        """The deployment file's shared pools, and how each decides now; `store` holds the models
        that were added to them since. May be told again and again; a pool whose file changed begins
        with new books."""
        async with self._registering:  # the store may take longer than who tells waits
            self._store = store
            known = {spec.name for spec, _ in pools}
            for name in self._shared.keys() - known:
                self._shared.pop(name).close()
            for spec, profiles in pools:
                pool = former = self._shared.get(spec.name)
                if pool is None or pool.spec != spec:
                    pool = SharedPool(spec, profiles, log_folder=event_log)
                    self._unread_models.add(spec.name)
                    self._unread_arrivals.add(spec.name)
                await self._read(pool)
                self._shared[spec.name] = pool
                if former is not None and former is not pool:
                    pool.left(former.have_left)
                    former.close()
                pool.configure(policies[spec.name])
            if self._ticker is None or self._ticker.done():
                self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def _read(self, pool: SharedPool) -> None:
        """What the store knows of the pool and has not told yet. While it cannot be read, and a
        line in the log says so, models that were added are not served, and what is learnt of times
        of day is not kept."""
        name = pool.spec.name
        try:
            if name in self._unread_models:
                self._add_all(pool, await with_store(self._store, lambda store: store.models()))
                self._unread_models.discard(name)
        except StoreError as error:
            log.error("models that were added to %s are not served: %s", name, error)
        try:
            if name in self._unread_arrivals:
                slices = await with_store(self._store, lambda store: store.arrivals_of(name))
                pool.remember_arrivals(slices)
                self._unread_arrivals.discard(name)
        except StoreError as error:
            log.error("when the models of %s are asked for is not known: %s", name, error)

    def _add_all(self, pool: SharedPool, models: Iterable[RegisteredModel]) -> None:
        """The newest version of each of the pool's."""
        newest = {m.name: m for m in models if m.pool == pool.spec.name}
        for added in newest.values():
            why_not = pool.why_not_add(added.hosted)
            if why_not is None:
                pool.add_model(added.hosted, added.profile.to_profile())
            else:
                log.warning("%s is not served by %s: %s", added.name, added.pool, why_not)

    async def parts(self) -> tuple[HostedPart, ...] | None:
        """What ingresses can offer to; None until `register`, after a restart of this actor too."""
        if self._ticker is None:
            return None
        return tuple(part for pool in self._shared.values() for part in pool.parts())

    async def pictures(self) -> tuple[SharedPoolPicture, ...]:
        return tuple(pool.picture() for pool in self._shared.values())

    async def add_model(self, added: RegisteredModel) -> None:
        """The model can be asked for from now on; raise `InputError` when its name is taken."""
        pool = await self._pool(added.pool)
        why_not = pool.why_not_add(added.hosted)
        if why_not is not None:
            raise InputError(why_not)
        pool.add_model(added.hosted, added.profile.to_profile())

    async def remove_model(self, pool: PoolName, name: ModelName) -> None:
        """See `SharedPool.remove_model`."""
        await (await self._pool(pool)).remove_model(name)

    async def decisions(self) -> dict[PoolName, PoolDecisions]:
        """Of each shared pool, the newest decisions with their reasons, and all counted."""
        return {name: pool.decisions.all() for name, pool in self._shared.items()}

    async def policies(self, pool: PoolName) -> SharedPoolPolicies:
        return (await self._pool(pool)).policies

    async def reset(self, pool: PoolName, unit_s: float = 1.0) -> None:
        """Empty the slots and the books of an idle pool; see `SharedPool.reset`."""
        (await self._pool(pool)).reset(unit_s)

    async def offer(self, pool: PoolName, model: ModelName, invocation: Invocation) -> Dispatch:
        """Wait for a lease; see `SharedPool.offer`. It is offered again to books that take the
        place of others."""
        began_s = time.monotonic()
        while True:
            books = await self._pool(pool)
            waited_s = time.monotonic() - began_s
            try:
                return await books.offer(model, invocation.on_clock(-waited_s))
            except PoolClosedError as error:
                log.info("invocation %s: %s", invocation.id, error)
                invocation = replace(invocation, was_taken=True)

    async def withdraw(self, pool: PoolName, id: InvocationId, attempt: int) -> None:
        """See `SharedPool.withdraw`."""
        if pool in self._shared:
            self._shared[pool].withdraw(id, attempt)

    async def left(self, pool: PoolName, slots: frozenset[ReplicaId]) -> None:
        """Serve lists these slots no longer; see `SharedPool.left`."""
        if pool in self._shared:
            self._shared[pool].left(slots)

    async def lost(self, pool: PoolName, slot: ReplicaId, why: str) -> None:
        if pool in self._shared:
            self._shared[pool].lost(slot, why)

    async def attend(self, pool: PoolName, report: SlotReport) -> SlotOrder | StopCalls | None:
        """A slot reports and waits for an order; see `SharedPool.attend`."""
        if pool not in self._shared:
            await asyncio.sleep(ATTEND_S)
            return None
        return await self._shared[pool].attend(report)

    async def report_slot(self, pool: PoolName, report: SlotReport) -> None:
        if pool in self._shared:
            self._shared[pool].report(report)

    async def tell(
        self, pool: PoolName, slot: ReplicaId, model: ModelName, told: tuple[Told, ...]
    ) -> None:
        """What became of calls in a slot; see `SharedPool.tell`."""
        if pool in self._shared:
            self._shared[pool].tell(slot, model, told)

    async def leave(self, pool: PoolName, slot: ReplicaId) -> None:
        if pool in self._shared:
            self._shared[pool].leave(slot)

    async def measure(self, pool: PoolName, hosted: HostedModel, profile: Profile | None) -> Staged:
        """Measure a model in an idle slot of the pool; see `SharedPool.measure`."""
        return await (await self._pool(pool)).measure(hosted, profile)

    async def measured(
        self, pool: PoolName, slot: ReplicaId, copy_id: CopyId, found: Staged | CatoError
    ) -> None:
        """What a slot was lent for is done."""
        if pool in self._shared:
            self._shared[pool].measured(slot, copy_id, found)

    async def _pool(self, name: PoolName) -> SharedPool:
        deadline_s = time.monotonic() + KNOWN_WITHIN_S
        while name not in self._shared:
            if time.monotonic() > deadline_s:
                raise UnknownNameError("shared pool", name, tuple(self._shared))
            await asyncio.sleep(POLL_S)
        return self._shared[name]

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for name, pool in list(self._shared.items()):
                try:
                    pool.tick()
                except Exception:
                    # One pool's broken books must not stop the others.
                    log.exception("shared pool %s could not look", name)
                if name not in self._unread_arrivals and (slices := pool.learnt_arrivals()):
                    await self._keep_arrivals(name, slices)

    async def _keep_arrivals(self, pool: PoolName, slices: tuple[UsualArrivals, ...]) -> None:
        """Once in half an hour. What cannot be kept is learnt again on other days."""
        try:
            await with_store(self._store, lambda store: store.save_arrivals(pool, slices))
        except StoreError as error:
            log.error("when the models of %s are asked for was not kept: %s", pool, error)
