"""What a provisioner knows: replicas and start times of each deployment, and what prevents more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cato.core.fleet import (
    Bounds,
    HostResources,
    ServedDeployment,
    ceiling,
    more_that_fit,
    resource_needs,
    why_full,
    why_infeasible,
)
from cato.core.ids import PoolName, ReplicaId
from cato.core.scaling import PoolLoad, ReplicaLoad, ScalingPolicy
from cato.core.topology import RAY_SERVE, DeploymentSpec, PoolScaling

# Looks kept for plots: half an hour at one per second, about 200 kB per deployment.
HISTORY_LOOKS = 1800
# A new start time weighs as much as all earlier ones: the last is the best guess of the next.
START_WEIGHT = 0.5
# A host with room starts the process of a replica within a second or two.
STUCK_AFTER_S = 10.0


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
class DeploymentBook:
    """All that is known of a deployment; `price` orders the deployments of a pool."""

    spec: DeploymentSpec
    pool: PoolName
    price: float
    start_s: float
    wanted: int
    is_left_to_serve: bool
    is_adopted: bool = False
    has_started: bool = False  # `start_s` was measured, not taken from the profile
    served: ServedDeployment | None = None  # None: Serve does not have it now
    target: int | None = None  # as Serve told it last, or took it since
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

    def observe(
        self, served: ServedDeployment, hosts: Sequence[HostResources], now_s: float
    ) -> None:
        """Take in a look at the deployment and at the room on hosts."""
        needs = resource_needs(self.spec)
        self.target = served.target
        if self.is_left_to_serve:
            self.wanted = served.target
        elif not self.is_adopted:
            self.wanted = self.bounds.clamp(served.target)
            self.is_adopted = True
        if not served.pending:
            self.pending_since_s = None
        elif self.pending_since_s is None:
            self.pending_since_s = now_s
        pending_s = 0.0 if self.pending_since_s is None else now_s - self.pending_since_s
        self.is_stuck = pending_s >= STUCK_AFTER_S
        fit = self.fit = more_that_fit(needs, hosts, self.spec.max_replicas)
        self.high = ceiling(self.spec, served, fit, pending_s)
        self.why_never = why_infeasible(needs, [h.total for h in hosts]) or ""
        for id in served.starting | served.pending:
            self.starting_since_s.setdefault(id, now_s)
        if fit == 0:  # waiting for room is not part of a start
            self.starting_since_s.update(dict.fromkeys(served.pending, now_s))

    def unlisted(self, running: frozenset[ReplicaId]) -> ServedDeployment:
        """Its state while Serve tells only which of its replicas run."""
        return ServedDeployment(len(running) if self.target is None else self.target, running)

    def learn_starts(self, ready: Set[ReplicaId], now_s: float) -> None:
        since_s = self.starting_since_s
        for id in ready & since_s.keys():
            took_s = now_s - since_s.pop(id)
            if self.has_started:
                took_s = self.start_s + START_WEIGHT * (took_s - self.start_s)
            self.start_s, self.has_started = took_s, True
        served = self.served or ServedDeployment(0)
        for id in since_s.keys() - (served.pending | served.starting | served.running):
            del since_s[id]


@dataclass(slots=True)
class PoolBook:
    """All that is known of a pool, and the state of its scaling policy."""

    deployments: list[DeploymentBook]  # the cheapest first
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

    def staying(self, ready: Sequence[ReplicaLoad]) -> tuple[ReplicaLoad, ...]:
        """Replicas of `ready` that do not drain.

        Serve marks draining replicas a moment after the order; until then the idle ones are assumed
        to drain.
        """
        served = [d.served for d in self.deployments if d.served is not None]
        draining = frozenset[ReplicaId]().union(*(s.draining for s in served))
        left = [r for r in ready if r.id not in draining]
        surplus = max(0, len(left) - self.wanted)
        leaving = {r.id for r in sorted(left, key=lambda r: (r.held, -r.idle_s))[:surplus]}
        return tuple(r for r in left if r.id not in leaving)

    def learn_starts(self, load: PoolLoad, now_s: float) -> None:
        ready = {r.id for r in load.ready}
        for deployment in self.deployments:
            deployment.learn_starts(ready, now_s)

    def note(self, load: PoolLoad, at_s: float) -> None:
        """Add a point to the history of each deployment."""
        ready = {r.id for r in load.ready}
        for d in self.deployments:
            here = len(ready & d.running)
            d.history.append(ScalePoint(at_s, here, d.wanted, load.queued, load.running))

    def state_of(self, d: DeploymentBook) -> DeploymentState:
        """The state of `d`, one of its deployments."""
        ready = {r.id for r in self.ready}
        return DeploymentState(
            pool=d.pool,
            min=d.spec.min_replicas,
            max=d.spec.max_replicas,
            wanted=d.wanted,
            target=0 if d.served is None else d.served.target,
            running=len(d.running),
            starting=max(0, d.wanted - len(ready & d.running)),
            start_s=d.start_s,
            problem=self._problem(d),
            policy=RAY_SERVE if d.is_left_to_serve else self.scaling.policy,
            reason=self.reason,
            history=tuple(d.history),
        )

    def _problem(self, d: DeploymentBook) -> str:
        if d.why_never and d.spec.max_replicas > 0:
            return d.why_never
        is_short = d.is_stuck or (self.unmet > 0 and d.high < d.spec.max_replicas)
        return why_full(resource_needs(d.spec)) if is_short and d.fit == 0 else ""
