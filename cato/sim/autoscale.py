"""Autoscaling in virtual time: a fleet whose pools grow and shrink.

At each look the provisioner gathers the load counts of all pools' routers, asks each pool's scaling
policy, and starts or drains replicas. Scaling down removes starting replicas first, then the
newest ones, as Ray Serve does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cato.core.demand import CallKind, PoolMeter
from cato.core.events import Event
from cato.core.follow_ups import FollowUps, Provision, pool_loads
from cato.core.ids import NodeId, PoolName
from cato.core.profile import Profile
from cato.core.scaling import PoolLoad, ScalingPolicy
from cato.sim.fleet import Fleet, PoolSetup, SimPool
from cato.sim.tasks import Outcome, SimTask

# Interval between two looks. A start takes tens of seconds, so half a second is precise enough.
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class ScaledPool:
    """A pool with its scaling policy; it begins with the replicas of `setup`. None: not scaled."""

    setup: PoolSetup
    scaling: ScalingPolicy[Any] | None
    min_replicas: int = 1
    max_replicas: int = 6

    @property
    def profile(self) -> Profile:
        return self.setup.profiles[0]

    @property
    def places(self) -> int:
        return self.setup.max_running or self.profile.max_running


@dataclass(frozen=True, slots=True)
class PoolPoint:
    """One look at a pool. `provisioned` counts every replica that occupies an accelerator
    (starting, ready or draining); `offered` counts waiting and running calls.
    """

    at_s: float
    ready: int
    provisioned: int
    offered: int


class AutoscaledFleet:
    """A `Fleet` with a provisioner."""

    def __init__(
        self,
        pools: Sequence[ScaledPool],
        follow_ups: Mapping[CallKind, FollowUps],
        look_s: float = LOOK_S,
    ) -> None:
        self.series: dict[PoolName, list[PoolPoint]] = {p.setup.name: [] for p in pools}
        self._pools = {p.setup.name: p for p in pools}
        self._follow_ups = follow_ups
        self._look_s = look_s
        self._meters = {p.setup.name: PoolMeter(p.profile, p.places) for p in pools}
        self._states = {p.setup.name: p.scaling.initial() for p in pools if p.scaling is not None}
        self._arriving = 0
        self.fleet = Fleet([p.setup for p in pools], self._record)

    def run(self, tasks: Sequence[SimTask], duration_s: float) -> list[Outcome]:
        """Run `tasks` to their end. The provisioner looks for at least `duration_s`, and until no
        task is unfinished.
        """
        self._arriving = len(tasks)
        self._look(duration_s)
        return self.fleet.run(tasks)

    def mean_provisioned(self, until_s: float) -> float:
        """Mean number of replicas that occupied accelerators, over the looks up to `until_s`."""
        counts = [
            [p.provisioned for p in points if p.at_s < until_s] for points in self.series.values()
        ]
        return sum(sum(c) / len(c) for c in counts)

    def _record(self, pool: PoolName, event: Event) -> None:
        self._meters[pool].handle(event)

    def _look(self, duration_s: float) -> None:
        fleet, kernel = self.fleet, self.fleet.kernel
        demands = {
            name: self._meters[name].look(pool.orchestrator.picture(kernel.now_s), pool.leased)
            for name, pool in fleet.pools.items()
        }
        loads = pool_loads(
            demands,
            {name: self._provision(pool) for name, pool in fleet.pools.items()},
            self._follow_ups,
        )
        for name, load in loads.items():
            self._scale(fleet.pools[name], load)
            self.series[name].append(_point(fleet.pools[name], load))
        is_over = len(fleet.outcomes) == self._arriving and fleet.unfinished == 0
        if kernel.now_s + self._look_s < duration_s or not is_over:
            kernel.at(kernel.now_s + self._look_s, lambda: self._look(duration_s))

    def _provision(self, pool: SimPool) -> Provision:
        scaled = self._pools[pool.setup.name]
        return Provision(
            scaled.min_replicas, scaled.max_replicas, pool.starting, pool.setup.cold_start_s
        )

    def _scale(self, pool: SimPool, load: PoolLoad) -> None:
        name = pool.setup.name
        scaled = self._pools[name]
        if scaled.scaling is None:
            return
        decision, self._states[name] = scaled.scaling.decide(load, self._states[name])
        goal = load.bounded(decision.replicas)
        for _ in range(goal - load.provisioned):
            pool.start_replica(scaled.profile)
        surplus = max(0, load.provisioned - goal)
        unborn = min(surplus, pool.starting)
        for _ in range(unborn):
            pool.cancel_start()
        newest = sorted((r.id for r in load.ready), reverse=True)
        for id in newest[: surplus - unborn]:
            pool.drain_replica(id)


def _point(pool: SimPool, load: PoolLoad) -> PoolPoint:
    ready = sum(not h.draining for h in pool.replicas.values())
    provisioned = len(pool.replicas) + pool.starting
    return PoolPoint(load.now_s, ready, provisioned, load.queued + load.running)


def follow_ups_of(
    tasks: Sequence[SimTask], profiles: Mapping[PoolName, Profile], places: int
) -> dict[CallKind, FollowUps]:
    """Expected work after each kind of call, learned from earlier tasks: means over all its calls.
    A call that needs several others counts in equal parts after each. `places`: see `PoolLoad`.
    A call that needs several counts in equal parts after each. `places`: see `PoolLoad`.
    """
    after: dict[CallKind, list[dict[PoolName, float]]] = {}
    shares: dict[CallKind, list[float]] = {}
    for task in tasks:
        works = _work_after(task, profiles, places)
        firsts = sum(not n.needs for n in task.nodes)
        for i, node in enumerate(task.nodes):
            kind = CallKind(task.name, NodeId(str(i)))
            after.setdefault(kind, []).append(works[i])
            shares.setdefault(kind, []).append(0.0 if node.needs else 1 / firsts)
    table = {}
    for kind, seen in after.items():
        pools = sorted({pool for work in seen for pool in work})
        share = float(np.mean(shares[kind]))
        table[kind] = FollowUps(
            {pool: float(np.mean([w.get(pool, 0.0) for w in seen])) for pool in pools},
            begins=share > 0,
            share=share if share > 0 else 1.0,
        )
    return table


def _work_after(
    task: SimTask, profiles: Mapping[PoolName, Profile], places: int
) -> list[dict[PoolName, float]]:
    """Work by pool that follows each node; nodes are in topological order."""
    after: list[dict[PoolName, float]] = [{} for _ in task.nodes]
    for i in range(len(task.nodes) - 1, -1, -1):
        node = task.nodes[i]
        service_s = profiles[node.pool].service_s(node.prompt_tokens, node.expected_tokens, places)
        implied = dict(after[i])
        implied[node.pool] = implied.get(node.pool, 0.0) + service_s / places
        for need in node.needs:
            for pool, work_s in implied.items():
                after[need][pool] = after[need].get(pool, 0.0) + work_s / len(node.needs)
    return after
