"""The Resource Provisioner's state: reports from Serve and the routers in, scaling orders out.

A pool's policy decides how many replicas the pool has; `allot` distributes them over the pool's
deployments; replicas that no host can hold are not requested. The actor gathers the inputs of a
look and passes the orders to Serve, which drains a replica before it stops it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cato.core.demand import PoolDemand
from cato.core.deployment_state import DeploymentBook, DeploymentState, PoolBook
from cato.core.errors import UnknownNameError
from cato.core.fleet import (
    HostResources,
    Room,
    ScaleTo,
    ServedFleet,
    allot,
    call_price,
    reconcile,
)
from cato.core.follow_ups import CallBook, CallsBefore, Provision, pool_loads
from cato.core.ids import DeploymentName, PoolName, TaskName
from cato.core.profile import Profile
from cato.core.scaling import PoolLoad, ScalingPolicy
from cato.core.topology import RAY_SERVE, PoolScaling, Topology

# Tolerance: looks are never exactly on time.
_EARLY = 0.1
# Seconds between looks while there is nothing to scale: the next topology may have pools.
_IDLE_EVERY_S = 1.0


class FleetOrchestrator:
    """Decides how many replicas each deployment of `topology` has. Deterministic.

    After a restart it adopts Serve's targets: they are what it wanted before. Arrivals in a pool's
    first look are ignored, because they cover an unknown period. A pool with Ray Serve's scheduler
    is scaled by Serve or not at all: its router sees no call.
    """

    def __init__(self, topology: Topology, profiles: Mapping[DeploymentName, Profile]) -> None:
        self.topology = topology
        self._deployments: dict[DeploymentName, DeploymentBook] = {}
        self._pools: dict[PoolName, PoolBook] = {}
        self._tasks: dict[TaskName, CallsBefore] = {}
        self._calls = CallBook()
        for pool in topology.pools:
            mine = [
                DeploymentBook(
                    spec=spec,
                    pool=pool.name,
                    price=call_price(spec, profiles[spec.name]),
                    start_s=profiles[spec.name].load_s,
                    wanted=spec.initial_replicas,
                    is_left_to_serve=pool.policies.scheduler == RAY_SERVE,
                )
                for spec in pool.deployments
            ]
            mine.sort(key=lambda d: (d.price, d.spec.name))
            self._deployments.update((d.spec.name, d) for d in mine)
            self._pools[pool.name] = PoolBook(mine, pool.scaling)

    @property
    def every_s(self) -> float:
        """Seconds between looks; each pool's policy is called at its own multiple of them."""
        return min((p.scaling.every_s for p in self._pools.values()), default=_IDLE_EVERY_S)

    def configure(
        self, pool: PoolName, scaling: PoolScaling, policy: ScalingPolicy[Any] | None
    ) -> None:
        """Scale `pool` by `policy`, which `scaling` names. None: keep the present replicas."""
        known = self._pools[pool]
        if scaling != known.scaling or policy != known.policy:
            known.scaling, known.policy = scaling, policy
            known.state = None if policy is None else policy.initial()
            known.reason, known.unmet, known.decided_at_s = "", 0, None

    def announce(self, tasks: Mapping[TaskName, CallsBefore]) -> None:
        """Set the order of these tasks' LLM calls, from their workflows."""
        self._tasks.update(tasks)

    def ask(self, deployment: str, replicas: int) -> int:
        """Request `replicas`; return what the bounds allow. A pool's policy may change it soon.

        Raise `UnknownNameError`.
        """
        known = self._deployments.get(DeploymentName(deployment))
        if known is None:
            raise UnknownNameError("deployment", deployment, tuple(sorted(self._deployments)))
        known.wanted, known.is_adopted = known.bounds.clamp(replicas), True
        return known.wanted

    def look(
        self,
        now_s: float,
        at_s: float,
        fleet: ServedFleet,
        hosts: Sequence[HostResources],
        demands: Mapping[PoolName, PoolDemand],
    ) -> tuple[ScaleTo, ...]:
        """The changes to make now. `now_s` is any monotonic clock, `at_s` is Unix time.

        A pool without a demand, because its router did not answer, keeps its replicas.
        """
        for name, deployment in self._deployments.items():
            deployment.served = fleet.deployments.get(name)
            if deployment.served is None and name in fleet.unlisted:
                deployment.served = deployment.unlisted(fleet.unlisted[name])
            if deployment.served is not None:
                deployment.observe(deployment.served, hosts, now_s)
        for pool_name, load in self._loads(now_s, demands).items():
            pool = self._pools[pool_name]
            pool.learn_starts(load, now_s)
            if all(d.served and not d.is_left_to_serve for d in pool.deployments):
                self._decide(pool, load)
            pool.note(load, at_s)
        return self._orders()

    def ordered(self, deployment: DeploymentName, replicas: int) -> None:
        """Serve has taken this target; it may not list the deployment for a while."""
        self._deployments[deployment].target = replicas

    def state(self) -> dict[DeploymentName, DeploymentState]:
        return {
            name: self._pools[book.pool].state_of(book)
            for name, book in sorted(self._deployments.items())
        }

    def _loads(
        self, now_s: float, demands: Mapping[PoolName, PoolDemand]
    ) -> dict[PoolName, PoolLoad]:
        told: dict[PoolName, PoolDemand] = {}
        provisions: dict[PoolName, Provision] = {}
        for name, demand in demands.items():
            pool = self._pools[name]
            pool.ready = pool.staying(demand.ready)
            told[name] = replace(demand, now_s=now_s, ready=pool.ready)
            if not pool.was_asked:
                told[name] = replace(told[name], arrived={}, finished=())
                pool.was_asked = True
            provisions[name] = Provision(
                sum(d.spec.min_replicas for d in pool.deployments),
                sum(d.spec.max_replicas for d in pool.deployments),
                max(0, pool.wanted - len(pool.ready)),
                pool.start_s,
            )
        self._calls.learn(now_s, told)
        return pool_loads(told, provisions, self._calls.follow_ups(self._tasks))

    def _decide(self, pool: PoolBook, load: PoolLoad) -> None:
        if pool.policy is None:
            return
        if pool.untold is not None:
            load, pool.untold = load.since(pool.untold), None
        due_s = pool.scaling.every_s * (1 - _EARLY)
        if pool.decided_at_s is not None and load.now_s - pool.decided_at_s < due_s:
            pool.untold = load
            return
        pool.decided_at_s = load.now_s
        decision, pool.state = pool.policy.decide(load, pool.state)
        pool.reason = decision.reason
        rooms = [Room(d.spec.name, d.spec.min_replicas, d.high, d.price) for d in pool.deployments]
        wanted = {d.spec.name: d.wanted for d in pool.deployments}
        goal = load.bounded(decision.replicas)
        goals = allot(goal, wanted, rooms)
        pool.unmet = goal - sum(goals.values())
        for deployment in pool.deployments:
            deployment.wanted = goals[deployment.spec.name]

    def _orders(self) -> tuple[ScaleTo, ...]:
        orders = reconcile(
            {n: d.bounds for n, d in self._deployments.items() if not d.is_left_to_serve},
            {n: d.served.target for n, d in self._deployments.items() if d.served is not None},
        )
        return tuple(self._with_reason(order) for order in orders)

    def _with_reason(self, order: ScaleTo) -> ScaleTo:
        reason = self._pools[self._deployments[order.deployment].pool].reason
        return replace(order, reason=f"{order.reason}; {reason}") if reason else order
