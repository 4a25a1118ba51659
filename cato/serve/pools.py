"""The executor's interface to pools; on Ray in `cato.serve.ray_pools`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol

from cato.core.commands import Dispatch
from cato.core.ids import PoolName
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.snapshot import Invocation
from cato.core.topology import ModelSpec, TemplateFacts, model_called
from cato.engines.base import EngineChunk, EngineRequest


@record
class PoolInfo:
    """A pool as the ingress knows it; `profile` is its fastest deployment's.

    `ready_replicas` counts replicas that can take work; `queued_per_place` is the number of waiting
    calls per batch slot of those. Until a replica has reported its own, `profile` is a guess.
    `template` has the facts about the chat template; None while unknown.
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
        """Maximum tokens of a prompt and its answer together; None while unknown."""
        return self.profile.context_tokens if self.is_measured else None


def pool_named(pools: Iterable[PoolInfo], model: str) -> PoolInfo | None:
    """The pool that serves `model`, by name or pattern; None if there is none."""
    known = tuple(pools)
    spec = model_called(model, (pool.model for pool in known))
    return next((pool for pool in known if pool.model is spec), None)


def is_ready(pools: Iterable[PoolInfo], model: str) -> bool | None:
    """Whether `model` has a replica that can take work; None when no pool serves it."""
    pool = pool_named(pools, model)
    return None if pool is None else pool.ready_replicas > 0


class Pools(Protocol):
    """Leases and token streams for an ingress."""

    def all(self) -> Sequence[PoolInfo]: ...

    def pool_of(self, model: str) -> PoolInfo:
        """The pool that serves `model`, as `pool_named` finds it; raise `UnknownNameError`, or
        `StartingError` while not all pools are known."""
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
