"""The Resource Provisioner's state: reports from Serve and the routers in, scaling orders out.

A pool's policy decides how many replicas the pool has; `allot` distributes them over the pool's
deployments; replicas that no host can hold are not requested. The actor gathers the inputs of a
look and passes the orders to Serve, which drains a replica before it stops it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cato.core.demand import CallBook, CallsBefore, PoolDemand, Provision, pool_loads
from cato.core.errors import UnknownNameError
from cato.core.fleet import (
    Bounds,
    HostResources,
    Room,
    ScaleTo,
    ServedDeployment,
    allot,
    call_price,
    ceiling,
    more_that_fit,
    reconcile,
    resource_needs,
    why_full,
    why_infeasible,
)
from cato.core.ids import DeploymentName, PoolName, ReplicaId, TaskName
from cato.core.profile import Profile
from cato.core.scaling import PoolLoad, ReplicaLoad, ScalingPolicy
from cato.core.topology import RAY_SERVE, DeploymentSpec, PoolScaling, Topology

# Looks kept for plots: half an hour at one per second, about 200 kB per deployment.
HISTORY_LOOKS = 1800
# A new start time weighs as much as all earlier ones: the last is the best guess of the next.
START_WEIGHT = 0.5
# A host with room starts the process of a replica within a second or two.
STUCK_AFTER_S = 10.0
# Tolerance: looks are never exactly on time.
_EARLY = 0.1


class ScalePoint(NamedTuple):
    """A deployment at one look; `queued` and `running` are calls of its pool. `at_s`: Unix time."""

    at_s: float
    ready: int
    wanted: int
    queued: int
    running: int


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """A deployment's state in its provisioner; `problem` says what prevents more replicas.

    `target` and `running` are Serve's; `starting` are ordered and take no work yet. A new replica
    takes `start_s` until it does: the mean of the latest starts, or the profile's value before the
    first.
    """

    pool: PoolName
    min: int
    max: int
    wanted: int
    target: int
    running: int
    starting: int
    start_s: float
    problem: str
    policy: str
    reason: str
    history: tuple[ScalePoint, ...]


@dataclass(slots=True)
class _Deployment:
    spec: DeploymentSpec
    pool: PoolName
    price: float
    start_s: float
    wanted: int
    is_left_to_serve: bool
    is_adopted: bool = False
    has_started: bool = False  # `start_s` was measured, not taken from the profile
    served: ServedDeployment | None = None  # None: Serve does not have it now
    fit: int = 0  # number of additional replicas that fit
    high: int = 0
    pending_since_s: float | None = None
    is_stuck: bool = False
    why_never: str = ""
    starting_since_s: dict[ReplicaId, float] = field(default_factory=dict)
    history: deque[ScalePoint] = field(default_factory=lambda: deque(maxlen=HISTORY_LOOKS))

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.spec.min_replicas, self.spec.max_replicas, self.wanted)

    @property
    def running(self) -> frozenset[ReplicaId]:
        return frozenset() if self.served is None else self.served.running


@dataclass(slots=True)
class _Pool:
    deployments: list[_Deployment]  # the cheapest first
    scaling: PoolScaling
    policy: ScalingPolicy[Any] | None = None
    state: Any = None
    reason: str = ""
    unmet: int = 0  # replicas that the policy wants and no host can hold
    ready: tuple[ReplicaLoad, ...] = ()
    was_asked: bool = False  # ask its router for its demand
    decided_at_s: float | None = None
    untold: PoolLoad | None = None

    @property
    def wanted(self) -> int:
        return sum(d.wanted for d in self.deployments)

    @property
    def start_s(self) -> float:
        """Start time of the deployment that grows next."""
        growing = (d for d in self.deployments if d.wanted < d.high)
        return next(growing, self.deployments[0]).start_s


class FleetOrchestrator:
    """Decides how many replicas each deployment of `topology` has. Deterministic.

    After a restart it adopts Serve's targets: they are what it wanted before. Arrivals in a pool's
    first look are ignored, because they cover an unknown period. A pool with Ray Serve's scheduler
    is scaled by Serve or not at all: its router sees no call.
    """

    def __init__(self, topology: Topology, profiles: Mapping[DeploymentName, Profile]) -> None:
        self.topology = topology
        self._deployments: dict[DeploymentName, _Deployment] = {}
        self._pools: dict[PoolName, _Pool] = {}
        self._tasks: dict[TaskName, CallsBefore] = {}
        self._calls = CallBook()
        for pool in topology.pools:
            mine = [
                _Deployment(
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
            self._pools[pool.name] = _Pool(mine, pool.scaling)

    @property
    def every_s(self) -> float:
        """Seconds between looks; each pool's policy is called at its own multiple of them."""
        return min(p.scaling.every_s for p in self._pools.values())

    def configure(
        self, pool: PoolName, scaling: PoolScaling, policy: ScalingPolicy[Any] | None
    ) -> None:
        """Scale `pool` by `policy`, which `scaling` names. None: keep the present replicas."""
        books = self._pools[pool]
        if scaling != books.scaling or policy != books.policy:
            books.scaling, books.policy = scaling, policy
            books.state = None if policy is None else policy.initial()
            books.reason, books.unmet, books.decided_at_s = "", 0, None

    def announce(self, tasks: Mapping[TaskName, CallsBefore]) -> None:
        """Set the order of these tasks' LLM calls, from their workflows."""
        self._tasks.update(tasks)

    def ask(self, deployment: str, replicas: int) -> int:
        """Request `replicas`; return what the bounds allow. A pool's policy may change it soon.

        Raise `UnknownNameError`.
        """
        books = self._deployments.get(DeploymentName(deployment))
        if books is None:
            raise UnknownNameError("deployment", deployment, tuple(sorted(self._deployments)))
        books.wanted, books.is_adopted = books.bounds.clamp(replicas), True
        return books.wanted

    def look(
        self,
        now_s: float,
        at_s: float,
        served: Mapping[DeploymentName, ServedDeployment],
        hosts: Sequence[HostResources],
        demands: Mapping[PoolName, PoolDemand],
    ) -> tuple[ScaleTo, ...]:
        """The changes to make now. `now_s` is any monotonic clock, `at_s` is Unix time.

        A pool without a demand, because its router did not answer, keeps its replicas.
        """
        for deployment in self._deployments.values():
            deployment.served = served.get(deployment.spec.name)
            if deployment.served is not None:
                self._observe(deployment, deployment.served, hosts, now_s)
        for name, load in self._loads(now_s, demands).items():
            pool = self._pools[name]
            self._learn_starts(pool, load, now_s)
            if all(d.served and not d.is_left_to_serve for d in pool.deployments):
                self._decide(pool, load)
            self._note(pool, load, at_s)
        return self._orders()

    def state(self) -> dict[DeploymentName, DeploymentState]:
        return {name: self._state(d) for name, d in sorted(self._deployments.items())}

    # What is seen

    def _observe(
        self,
        deployment: _Deployment,
        served: ServedDeployment,
        hosts: Sequence[HostResources],
        now_s: float,
    ) -> None:
        spec, needs = deployment.spec, resource_needs(deployment.spec)
        if deployment.is_left_to_serve:
            deployment.wanted = served.target
        elif not deployment.is_adopted:
            deployment.wanted = deployment.bounds.clamp(served.target)
            deployment.is_adopted = True
        if not served.pending:
            deployment.pending_since_s = None
        elif deployment.pending_since_s is None:
            deployment.pending_since_s = now_s
        since_s = deployment.pending_since_s
        pending_s = 0.0 if since_s is None else now_s - since_s
        deployment.is_stuck = pending_s >= STUCK_AFTER_S
        fit = deployment.fit = more_that_fit(needs, hosts, spec.max_replicas)
        deployment.high = ceiling(spec, served, fit, pending_s)
        deployment.why_never = why_infeasible(needs, [h.total for h in hosts]) or ""
        for id in served.starting | served.pending:
            deployment.starting_since_s.setdefault(id, now_s)
        if fit == 0:  # waiting for room is not part of a start
            deployment.starting_since_s.update(dict.fromkeys(served.pending, now_s))

    def _loads(
        self, now_s: float, demands: Mapping[PoolName, PoolDemand]
    ) -> dict[PoolName, PoolLoad]:
        told: dict[PoolName, PoolDemand] = {}
        provisions: dict[PoolName, Provision] = {}
        for name, demand in demands.items():
            pool = self._pools[name]
            pool.ready = _staying(pool, demand.ready)
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

    def _learn_starts(self, pool: _Pool, load: PoolLoad, now_s: float) -> None:
        ready = {r.id for r in load.ready}
        for deployment in pool.deployments:
            since_s = deployment.starting_since_s
            for id in ready & since_s.keys():
                took_s = now_s - since_s.pop(id)
                if deployment.has_started:
                    took_s = deployment.start_s + START_WEIGHT * (took_s - deployment.start_s)
                deployment.start_s, deployment.has_started = took_s, True
            served = deployment.served or ServedDeployment(0)
            for id in since_s.keys() - (served.pending | served.starting | served.running):
                del since_s[id]

    # What is decided

    def _decide(self, pool: _Pool, load: PoolLoad) -> None:
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

    # What is shown

    def _note(self, pool: _Pool, load: PoolLoad, at_s: float) -> None:
        ready = {r.id for r in load.ready}
        for d in pool.deployments:
            here = len(ready & d.running)
            d.history.append(ScalePoint(at_s, here, d.wanted, load.queued, load.running))

    def _state(self, d: _Deployment) -> DeploymentState:
        pool = self._pools[d.pool]
        ready = {r.id for r in pool.ready}
        return DeploymentState(
            pool=d.pool,
            min=d.spec.min_replicas,
            max=d.spec.max_replicas,
            wanted=d.wanted,
            target=0 if d.served is None else d.served.target,
            running=len(d.running),
            starting=max(0, d.wanted - len(ready & d.running)),
            start_s=d.start_s,
            problem=_problem(d, pool),
            policy=RAY_SERVE if d.is_left_to_serve else pool.scaling.policy,
            reason=pool.reason,
            history=tuple(d.history),
        )


def _problem(d: _Deployment, pool: _Pool) -> str:
    if d.why_never and d.spec.max_replicas > 0:
        return d.why_never
    is_short = d.is_stuck or (pool.unmet > 0 and d.high < d.spec.max_replicas)
    return why_full(resource_needs(d.spec)) if is_short and d.fit == 0 else ""


def _staying(pool: _Pool, ready: Sequence[ReplicaLoad]) -> tuple[ReplicaLoad, ...]:
    """Replicas of `ready` that do not drain.

    Serve marks draining replicas a moment after the order; until then the idle ones are assumed to
    drain.
    """
    served = [d.served for d in pool.deployments if d.served is not None]
    draining = frozenset[ReplicaId]().union(*(s.draining for s in served))
    left = [r for r in ready if r.id not in draining]
    surplus = max(0, len(left) - pool.wanted)
    leaving = {r.id for r in sorted(left, key=lambda r: (r.held, -r.idle_s))[:surplus]}
    return tuple(r for r in left if r.id not in leaving)
