"""Replica scaling: the load that a scaling policy sees, and its answer.

Everything in a `PoolLoad` can be observed live: the pool's router counts arrivals, knows the queued
and running calls, and sees every end; service times come from the profile. Work is counted in
replica-seconds: the expected service time of a call in a full batch, divided by that batch. A pool
of n replicas thus does n seconds of work per second, whatever its batch size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from cato.core.ids import ReplicaId
from cato.core.record import record

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals since the last look: their number, and their expected replica-seconds.

    The count may be fractional: a run that begins with three calls at once counts a third for each.
    """

    count: float = 0.0
    work_s: float = 0.0

    def __add__(self, other: Arrivals) -> Arrivals:
        return Arrivals(self.count + other.count, self.work_s + other.work_s)


@record
class Finished:
    """A call that has reached its part of the SLO event, the first token or the end.

    `latency_s` counts from its arrival in the pool and includes queueing; `expected_s` is the
    execution alone, by the profile. `slack_s` was left of the run's deadline when it ended;
    `downstream_s` is expected to follow.
    """

    latency_s: float
    expected_s: float
    slack_s: float
    downstream_s: float


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica that takes work: its calls, and how long it has been without one."""

    id: ReplicaId
    held: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """One pool at `now_s`, passed to its scaling policy at regular looks.

    `ready` excludes draining replicas; `starting` are ordered and not ready, which takes `start_s`
    (0 if never measured). `places` is the number of calls that a replica runs at a time. `queued_s`
    is the work of the `queued` calls, `coming_s` the expected work here of future calls of runs in
    flight, in any pool. `arrived` are calls of this pool; `begun` are runs that began in any pool
    and may call this one, with the work of those calls. Arrivals and `finished` are reported once,
    at the first look after they happened.
    """

    now_s: float
    min_replicas: int
    max_replicas: int
    ready: tuple[ReplicaLoad, ...]
    starting: int
    start_s: float
    places: int
    queued: int
    running: int
    queued_s: float
    coming_s: float
    arrived: Arrivals
    begun: Arrivals
    finished: tuple[Finished, ...] = ()

    @property
    def provisioned(self) -> int:
        """Replicas that are ready or starting."""
        return len(self.ready) + self.starting

    def bounded(self, replicas: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, replicas))

    def since(self, untold: PoolLoad) -> PoolLoad:
        """This load plus the arrivals and ends of an earlier one that no policy has seen."""
        return replace(
            self,
            arrived=untold.arrived + self.arrived,
            begun=untold.begun + self.begun,
            finished=untold.finished + self.finished,
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """Have `replicas`, including those that are starting.

    The policy does not choose which replica stops: Ray Serve stops the newest.
    """

    replicas: int
    reason: str


class ScalingPolicy(Protocol[S]):
    """Decides how many replicas a pool should have.

    Must be pure: its memory is the state it returns.
    """

    def initial(self) -> S: ...

    def decide(self, load: PoolLoad, state: S) -> tuple[Scale, S]: ...
