"""What the executor needs of the pools; on Ray in `ray_pools`, in one process in `local_pools`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cato.core.commands import Dispatch
from cato.core.ids import PoolName
from cato.core.profile import Profile
from cato.core.snapshot import Invocation
from cato.core.topology import ModelSpec, TemplateFacts, model_called
from cato.engines.base import EngineChunk, EngineRequest


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """A pool as the ingress knows it; `profile` is its fastest deployment's.

    `ready_replicas` is 0 while none can take work; `queued_per_place` counts the calls that wait
    for each place of those that can. While no replica has told its own, `profile` is a guess.
    `template` is what its engines make of conversations; None while that is not known.
    """

    name: PoolName
    model: ModelSpec
    profile: Profile
    simulated: bool
    ready_replicas: int
    queued_per_place: float = 0.0
    is_measured: bool = True
    template: TemplateFacts | None = None

    @property
    def context_tokens(self) -> int | None:
        """The most that a prompt and its answer may have; None while nobody knows."""
        return self.profile.context_tokens if self.is_measured else None


def pool_named(pools: Iterable[PoolInfo], model: str) -> PoolInfo | None:
    """The pool that serves `model`, a name or what fits a pattern; None when none does."""
    known = tuple(pools)
    spec = model_called(model, (pool.model for pool in known))
    return next((pool for pool in known if pool.model is spec), None)


def is_ready(pools: Iterable[PoolInfo], model: str) -> bool | None:
    """Whether `model` has a replica that can take work; None when no pool serves it."""
    pool = pool_named(pools, model)
    return None if pool is None else pool.ready_replicas > 0


class Pools(Protocol):
    """The way from an ingress to leases and tokens."""

    def all(self) -> Sequence[PoolInfo]: ...

    def pool_of(self, model: str) -> PoolInfo:
        """The pool that serves `model`, as `pool_named` finds it; raise `UnknownNameError`, or
        `StartingError` while none is known."""
        ...

    async def lease(self, pool: PoolName, invocation: Invocation) -> Dispatch:
        """Wait in the pool's queue; raise `CapacityError` when refused.

        `invocation` counts time from now: `arrived_at_s` is 0 or negative (the time already
        waited), `deadline_s` the slack. Cancelling the call withdraws the invocation.
        """
        ...

    def stream(
        self, pool: PoolName, lease: Dispatch, request: EngineRequest
    ) -> AsyncGenerator[EngineChunk, None]:
        """Tokens of the leased replica.

        Raise `ReplicaLostError` when it is gone and `EngineError` when it refuses. Closing the
        iterator cancels the invocation down to the engine.
        """
        ...
