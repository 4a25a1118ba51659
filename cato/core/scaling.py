"""How many replicas a pool should have: what a scaling policy is told, and what it answers.

Everything in a `PoolLoad` can be observed live: the pool's router counts arrivals, knows what waits
and what runs, and sees every end; times of service come from the profile. Work is counted in
replica-seconds: the expected service time of a call in a full batch, divided by that batch, so that
a pool of n replicas does n seconds of work in a second however many calls each runs at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from cato.core.ids import ReplicaId

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What arrived since the last look: how many, and the replica-seconds they should take.

    A count need not be whole: a run that begins with three calls at once is a third at each.
    """

    count: float = 0.0
    work_s: float = 0.0

    def __add__(self, other: Arrivals) -> Arrivals:
        return Arrivals(self.count + other.count, self.work_s + other.work_s)


@dataclass(frozen=True, slots=True)
class Finished:
    """A call that came to its part of the SLO event, the first token or the end.

    `latency_s` counts from its arrival in the pool, so it holds the queueing delay; `expected_s` is
    the execution alone, by the profile. `slack_s` was left of the run's deadline when it ended,
    `downstream_s` is expected to follow.
    """

    latency_s: float
    expected_s: float
    slack_s: float
    downstream_s: float


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica that takes work: the calls it holds, and for how long it has held none."""

    id: ReplicaId
    held: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """One pool at `now_s`, told to its scaling policy at regular looks.

    `ready` leaves out replicas that drain; `starting` are ordered and not ready, which takes
    `start_s` (0 when it was never seen). `places` is how many calls a replica runs at a time.
    `queued_s` is the work of the `queued` calls, `coming_s` the expected work of the calls that
    runs in flight, here or in other pools, will still make here. `arrived` are calls of this pool;
    `begun` are runs that began in any pool and may call this one, with the work of those calls.
    Arrivals and `finished` are told once, at the first look after they happened.
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
        """Replicas that are ready or will be."""
        return len(self.ready) + self.starting

    def bounded(self, replicas: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, replicas))

    def since(self, untold: PoolLoad) -> PoolLoad:
        """This load, with the arrivals and ends of an earlier one that no policy was told."""
        return replace(
            self,
            arrived=untold.arrived + self.arrived,
            begun=untold.begun + self.begun,
            finished=untold.finished + self.finished,
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """Have `replicas`, those that are starting included. Which one goes is not the policy's choice:
    Ray Serve takes the newest.
    """

    replicas: int
    reason: str


class ScalingPolicy(Protocol[S]):
    """How many replicas should a pool have? Must be pure: it remembers in the state it returns."""

    def initial(self) -> S: ...

    def decide(self, load: PoolLoad, state: S) -> tuple[Scale, S]: ...
