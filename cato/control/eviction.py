"""The Eviction Manager actor: which model is loaded on which accelerator.

It tracks the loaded models of all pools. It is also the router of shared pools: choosing the
slot for an invocation and the model that the slot loads is one decision.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from cato.control.messages import Door
from cato.control.shared_pool import HostedProfiles, SharedPool
from cato.control.staged import Staged
from cato.core.arrival_rates import UsualArrivals
from cato.core.errors import CatoError, InputError, UnknownNameError
from cato.core.eviction import CopyId
from cato.core.ids import ModelName, PoolName, ReplicaId
from cato.core.profile import Profile
from cato.core.residency import Residency, Resident
from cato.core.slots import HostedPart, SharedPoolPicture
from cato.core.topology import HostedModel, SharedPoolPolicies, SharedPoolSpec
from cato.store.errors import StoreError
from cato.store.in_thread import with_store
from cato.store.records import RegisteredModel
from cato.telemetry.decisions import PoolDecisions

log = logging.getLogger("cato.eviction")
SILENCE_S = 10.0
TICK_S = 0.5
# After a restart of this actor the control plane registers its pools within two seconds.
KNOWN_WITHIN_S = 5.0
POLL_S = 0.1


class EvictionManager:
    """Residency of models, as replicas report it, and the shared pools."""

    def __init__(self, secret: bytes = b"") -> None:
        """`secret` outlives restarts; the secret of each pool's links is derived from it."""
        self._secret = secret
        self._book = Residency()
        self._shared: dict[PoolName, SharedPool] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._store: str | None = None
        # Pools whose models and arrivals could not be read from the store yet.
        self._unread_models: set[PoolName] = set()
        self._unread_arrivals: set[PoolName] = set()
        self._registering = asyncio.Lock()

    async def door(self, pool: PoolName) -> Door:
        """Where the shared pool accepts links; raise `UnknownNameError` if it does not exist."""
        return await (await self._pool(pool)).links.door()

    def _secret_of(self, pool: PoolName) -> bytes:
        return hmac.digest(self._secret, pool.encode(), "sha256")

    async def report(self, resident: Resident) -> None:
        self._book.report(time.monotonic(), resident)

    async def remove(self, replica_id: ReplicaId) -> None:
        self._book.remove(replica_id)

    async def residents(self) -> tuple[Resident, ...]:
        self._book.forget_silent(time.monotonic(), SILENCE_S)
        in_slots = [r for pool in self._shared.values() for r in pool.residents()]
        return (*self._book.all(), *in_slots)

    async def why_not_unload(self, replica_id: ReplicaId, min_copies: int) -> str | None:
        """Why a replica must stay loaded; None when it may be unloaded."""
        self._book.forget_silent(time.monotonic(), SILENCE_S)
        return self._book.why_not_unload(replica_id, min_copies)

    # Shared pools

    async def register(
        self,
        pools: Sequence[tuple[SharedPoolSpec, HostedProfiles]],
        policies: Mapping[PoolName, SharedPoolPolicies],
        store: str | None,
        event_log: str | None = None,
    ) -> None:
        """The deployment file's shared pools and their current policies; `store` holds the models
        that were added to them since. May be called again; a pool whose file changed starts with
        fresh state."""
        async with self._registering:  # reading the store may outlast the caller's timeout
            self._store = store
            known = {spec.name for spec, _ in pools}
            for name in self._shared.keys() - known:
                self._shared.pop(name).close()
            for spec, profiles in pools:
                pool = former = self._shared.get(spec.name)
                if pool is None or pool.spec != spec:
                    pool = SharedPool(
                        spec, profiles, log_folder=event_log, secret=self._secret_of(spec.name)
                    )
                    self._unread_models.add(spec.name)
                    self._unread_arrivals.add(spec.name)
                await self._read(pool)
                self._shared[spec.name] = pool
                if former is not None and former is not pool:
                    pool.slots.leave(former.slots.have_left)
                    former.close()
                pool.configure(policies[spec.name])
            if self._ticker is None or self._ticker.done():
                self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def _read(self, pool: SharedPool) -> None:
        """Read from the store what the pool lacks. While the store cannot be read (an error is
        logged), added models are not served, and learnt arrival times are not saved."""
        name = pool.spec.name
        try:
            if name in self._unread_models:
                self._add_all(pool, await with_store(self._store, lambda store: store.models()))
                self._unread_models.discard(name)
        except StoreError as error:
            log.error("models added to %s are not served: cannot read the store: %s", name, error)
        try:
            if name in self._unread_arrivals:
                slices = await with_store(self._store, lambda store: store.arrivals_of(name))
                pool.remember_arrivals(slices)
                self._unread_arrivals.discard(name)
        except StoreError as error:
            log.error("arrival times of %s are unknown: cannot read the store: %s", name, error)

    def _add_all(self, pool: SharedPool, models: Iterable[RegisteredModel]) -> None:
        """Add the newest version of each of the pool's models."""
        newest = {m.name: m for m in models if m.pool == pool.spec.name}
        for added in newest.values():
            why_not = pool.why_not_add(added.hosted)
            if why_not is None:
                pool.add_model(added.hosted, added.profile.to_profile())
            else:
                log.warning("%s is not served by %s: %s", added.name, added.pool, why_not)

    async def parts(self) -> tuple[HostedPart, ...] | None:
        """What ingresses can offer to; None before `register`, also after a restart."""
        if self._ticker is None:
            return None
        return tuple(part for pool in self._shared.values() for part in pool.parts())

    async def pictures(self) -> tuple[SharedPoolPicture, ...]:
        return tuple(pool.picture() for pool in self._shared.values())

    async def add_model(self, added: RegisteredModel) -> None:
        """Accept calls for the model from now on; raise `InputError` when its name is taken."""
        await self._pool(added.pool)
        async with self._registering:  # new state may have read the store before
            pool = self._present(added.pool)
            why_not = pool.why_not_add(added.hosted)
            if why_not is not None:
                raise InputError(why_not)
            if added.name not in pool.hosted:
                # A slot that was not connected at a removal may hold weights of the same name.
                pool.slots.clear(added.name)
            pool.add_model(added.hosted, added.profile.to_profile())

    async def remove_model(self, pool: PoolName, name: ModelName) -> None:
        """See `SharedPool.remove_model`. Meanwhile new state may take the pool's place: it has read
        the model from the store."""
        shared = await self._pool(pool)
        while True:
            await shared.remove_model(name)
            async with self._registering:
                now = self._shared.get(pool, shared)
            if now is shared or name not in now.hosted:
                return
            shared = now

    async def decisions(self) -> dict[PoolName, PoolDecisions]:
        """For each shared pool: its newest decisions with their reasons, and the counts of all."""
        return {name: pool.decisions.all() for name, pool in self._shared.items()}

    async def policies(self, pool: PoolName) -> SharedPoolPolicies:
        return (await self._pool(pool)).policies

    async def reset(self, pool: PoolName, unit_s: float = 1.0) -> None:
        """Empty the slots and the state of an idle pool; see `SharedPool.reset`."""
        (await self._pool(pool)).reset(unit_s)

    async def measure(self, pool: PoolName, hosted: HostedModel, profile: Profile | None) -> Staged:
        """Measure a model in an idle slot of the pool; see `SharedPool.measure`."""
        return await (await self._pool(pool)).measure(hosted, profile)

    async def measured(
        self, pool: PoolName, slot: ReplicaId, copy_id: CopyId, found: Staged | CatoError
    ) -> None:
        """Result of the measurement that a slot was lent for."""
        if pool in self._shared:
            self._shared[pool].measured(slot, copy_id, found)

    async def _pool(self, name: PoolName) -> SharedPool:
        deadline_s = time.monotonic() + KNOWN_WITHIN_S
        while name not in self._shared:
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(POLL_S)
        return self._present(name)

    def _present(self, name: PoolName) -> SharedPool:
        if name not in self._shared:
            raise UnknownNameError("shared pool", name, tuple(self._shared))
        return self._shared[name]

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for name, pool in list(self._shared.items()):
                try:
                    pool.tick()
                except Exception:
                    # A failure in one pool must not stop the others.
                    log.exception("periodic check of shared pool %s failed", name)
                if name not in self._unread_arrivals and (slices := pool.learnt_arrivals()):
                    await self._keep_arrivals(name, slices)

    async def _keep_arrivals(self, pool: PoolName, slices: tuple[UsualArrivals, ...]) -> None:
        """Every half hour. Slices that cannot be stored are learnt again on later days."""
        try:
            await with_store(self._store, lambda store: store.save_arrivals(pool, slices))
        except StoreError as error:
            log.error("arrival times of the models of %s were not stored: %s", pool, error)
