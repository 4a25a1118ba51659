"""A pool with several router shards in virtual time: each owns a part of the replicas.

Ingresses choose the shard of a task by `cato.core.shards`, as live ones do, from loads published
every `LOAD_EVERY_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol
from zlib import crc32

from cato.core.ids import PoolName
from cato.core.profile import Profile
from cato.core.shards import ShardChoice, ShardLoad, load_now
from cato.core.snapshot import Invocation
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.tasks import Outcome, SimTask

# Same value as in `cato.control.router_links`.
LOAD_EVERY_S = 0.05


class Choice(Protocol):
    """An ingress' choice of the shard of each call; see `ShardChoice`."""

    def tell(self, shard: int, load: ShardLoad) -> None: ...

    def choose(self, invocation: Invocation, shards: Sequence[int], profile: Profile) -> int: ...


class ShardedFleet(Fleet):
    """One pool whose replicas are divided among `shards` routers; tasks arrive at `ingresses`."""

    def __init__(
        self,
        setup: PoolSetup,
        shards: int,
        ingresses: int,
        choice: Callable[[int], Choice] = ShardChoice,
    ) -> None:
        """`choice` makes the choice of an ingress, given the number of shards."""
        parts = [
            replace(setup, name=_part(setup, n), profiles=setup.profiles[n::shards])
            for n in range(shards)
        ]
        super().__init__(parts)
        self._setup = setup
        self._choices = [choice(shards) for _ in range(ingresses)]
        self._told_at_s = -inf
        self.sent = [0] * shards

    def begin(self, task: SimTask) -> Outcome:
        """The task arrives at one of the ingresses."""
        if self.kernel.now_s - self._told_at_s >= LOAD_EVERY_S:
            self._told_at_s = self.kernel.now_s
            self._tell_loads()
        invocation = task.invocation(0, self.kernel.now_s, 0.0)
        choice = self._choices[crc32(task.id.encode()) % len(self._choices)]
        shard = choice.choose(invocation, range(len(self.sent)), self._setup.profiles[0])
        self.sent[shard] += 1
        pool = _part(self._setup, shard)
        return super().begin(replace(task, nodes=tuple(replace(n, pool=pool) for n in task.nodes)))

    def _tell_loads(self) -> None:
        for number, pool in enumerate(self.pools.values()):
            load = replace(load_now(pool.orchestrator), offered=self.sent[number])
            for choice in self._choices:
                choice.tell(number, load)


def _part(setup: PoolSetup, shard: int) -> PoolName:
    return PoolName(f"{setup.name}.{shard}")
