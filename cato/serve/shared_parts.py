"""The shared pools as an ingress replica reaches them: a part of a pool for each of its models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cato.control import actors
from cato.core.commands import Dispatch
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.core.slots import HostedPart
from cato.core.snapshot import Invocation
from cato.serve.pools import PoolInfo


class SharedParts:
    """Messages to the Eviction Manager, which keeps what was heard of it last."""

    def __init__(self) -> None:
        self._parts: dict[PoolName, HostedPart] = {}
        self._manager: Any = None

    def __contains__(self, name: PoolName) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[HostedPart]:
        return iter(self._parts.values())

    def info(self, name: PoolName) -> PoolInfo:
        """Every slot can take any model of the pool: all are its replicas."""
        part = self._parts[name]
        return PoolInfo(
            name, part.model, part.profile, part.simulated, part.slots, template=part.template
        )

    def model_of(self, name: PoolName) -> str:
        return self._parts[name].model.name

    async def refresh(self) -> None:
        """Ask what there is; raises what Ray does when the manager does not answer."""
        parts: tuple[HostedPart, ...] | None = await self._eviction_manager().parts.remote()
        if parts is not None:  # a manager that was just restarted knows none yet
            self._parts = {part.name: part for part in parts}

    def offer(self, name: PoolName, invocation: Invocation) -> Any:
        part = self._parts[name]
        return self._eviction_manager().offer.remote(part.pool, part.model.name, invocation)

    async def ping(self) -> str:
        """The name of the manager's present life."""
        life: str = await self._eviction_manager().life.remote()
        return life

    def withdraw(self, name: PoolName, id: InvocationId, attempt: int) -> None:
        self._eviction_manager().withdraw.remote(self._parts[name].pool, id, attempt)

    def tell_left(self, name: PoolName, slots: frozenset[ReplicaId]) -> None:
        self._eviction_manager().left.remote(self._parts[name].pool, slots)

    def tell_lost(self, name: PoolName, lease: Dispatch, why: str) -> None:
        self._eviction_manager().lost.remote(self._parts[name].pool, lease.replica_id, why)

    def _eviction_manager(self) -> Any:
        if self._manager is None:
            self._manager = actors.get(actors.EVICTION_MANAGER)
        return self._manager
