"""Interfaces of a pool's policies. Every answer must be pure: values in, values out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, runtime_checkable

from cato.core.decision import Admit, Batch, Defer, Hold, Rank, Route
from cato.core.ids import InvocationId
from cato.core.record import record
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView


class RoutingPolicy(Protocol):
    """Chooses the replica of `pool` that takes `invocation` now.

    `pool.replicas` holds only the candidates: with late binding those with room.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold: ...


@record
class Work:
    """Expected seconds of an invocation that starts now, alone, on the pool's fastest replica.

    `remaining_s`: to the SLO event, with downstream nodes. `service_s`: to its last token.
    `token_s`: per token beyond the expected ones. `load_s`: its replica-seconds when all batch
    slots are busy, `decoding_s` of them for decoding. `start_by_s`: when its place in the plan of
    its queue must have started (see `Plan`); inf: it has none. `in_vain`: see `QueueLoad`; 0 but
    for a stream that rests and whose pace is an SLO. `crowded_s`: see `QueueLoad`.
    """

    remaining_s: float
    service_s: float
    token_s: float
    load_s: float = 0.0
    decoding_s: float = 0.0
    start_by_s: float = inf
    in_vain: float = 0.0
    crowded_s: float = 0.0


# Of calls that must have started by the same time the shortest goes first: seconds per second of
# its load, too few to change a time.
BY_LOAD = 1e-4

# A queued call that can be in time: by when it should start, its replica-seconds, its id.
Queued = tuple[float, float, InvocationId]

# Of a plan so many calls are searched at once.
BLOCK = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The queued calls that are kept in time, in the order in which they should start.

    `start_by_s`: by when each must start, so that it and those behind it are in time, plus
    `BY_LOAD`. `least_dropped_s`: the least load of a call that is not kept; inf if all are. In the
    same order `ends_s`, when each ends, and `loads_s`.
    """

    start_by_s: Mapping[InvocationId, float]
    least_dropped_s: float = inf
    ends_s: Sequence[float] = ()
    loads_s: Sequence[float] = ()
    _places: Sequence[float] = field(init=False)
    _least_s: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        starts = range(0, len(self.loads_s), BLOCK)
        least_s = [min(self.loads_s[start : start + BLOCK]) for start in starts]
        object.__setattr__(self, "_places", list(self.start_by_s.values()))
        object.__setattr__(self, "_least_s", least_s)

    def place_of(self, id: InvocationId, latest_s: float, load_s: float) -> float:
        """Its `start_by_s`; inf if it is not kept.

        A call that came later goes after the last one that is not larger and ends before it must
        start. Larger ones behind that one can wait for it as well, or the next plan drops one.
        """
        place = self.start_by_s.get(id)
        if place is not None:
            return place
        if load_s >= self.least_dropped_s:
            return inf
        after = self._last_not_larger(load_s, bisect_right(self.ends_s, latest_s))
        place = latest_s + BY_LOAD * load_s
        if after >= 0:
            return min(place, self._places[after])
        if self._places:
            return min(place, self._places[0] - BY_LOAD * (self.loads_s[0] - load_s))
        return place

    def _last_not_larger(self, load_s: float, before: int) -> int:
        """The last one of the first `before` calls that is not larger; -1 if there is none."""
        for start in range((before - 1) // BLOCK * BLOCK, -1, -BLOCK):
            if self._least_s[start // BLOCK] <= load_s:
                for at in range(min(before, start + BLOCK) - 1, start - 1, -1):
                    if self.loads_s[at] <= load_s:
                        return at
        return -1


NO_PLAN = Plan({})


class OrderingPolicy(Protocol):
    """Ranks `invocation` in the queue at `now_s`."""

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank: ...


@runtime_checkable
class PlanningPolicy(OrderingPolicy, Protocol):
    """An order that looks at the whole queue, which `replicas` serve.

    `offered_load`: work that came lately, as a share of what the replicas can do. `missed`: see
    `QueueLoad`. `reserve_s`: how long before its latest start a call should have started.
    """

    def reserve_s(self, invocation: Invocation, work: Work) -> float: ...

    def plan(
        self,
        queued: Sequence[Queued],
        replicas: float,
        now_s: float,
        offered_load: float,
        missed: float,
    ) -> Plan: ...


class AdmissionPolicy(Protocol):
    """Decides whether `invocation` may join the running batch of `replica`."""

    def admit(
        self, invocation: Invocation, replica: ReplicaView, now_s: float
    ) -> Admit | Defer: ...


def _no_rest(_: float) -> float:
    return 0.0


@record
class QueueLoad:
    """In `ahead_s` all queued calls that can be in time are expected to have started, but for
    streams that rest and whose pace is no SLO; in `rest_s` all that have tokens already, too, to
    have ended: a call that yields now rests that long at most, if no others come. For `crowded_s`
    calls that can be in time have been queued without a break. `missed` is the share of work missed
    lately, `in_vain` that of rests of streams whose pace is an SLO that ended while newcomers
    waited, or too late to keep the pace.
    `rest_before_s(latest_s)`: how long one whose pace is an SLO rests, if it must go on by
    `latest_s`: new calls go before it, and those that must go on sooner.
    """

    ahead_s: float = 0.0
    rest_s: float = 0.0
    crowded_s: float = 0.0
    missed: float = 0.0
    in_vain: float = 0.0
    rest_before_s: Callable[[float], float] = _no_rest


NO_LOAD = QueueLoad()


class PreemptionPolicy(Protocol):
    """Chooses running invocations that should give way to queued ones.

    Called at every progress report of a replica, and for some new calls (`Policies.asks_at_once`).
    `waiting` is the head of the queue, in order, and `place_s()` returns the seconds until
    the pool's next batch slot is expected to be free.
    """

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
        load: QueueLoad = NO_LOAD,
    ) -> Sequence[tuple[InvocationId, str]]: ...


class MappingPolicy(Protocol):
    """Chooses which of `waiting`, in queue order, `replica` should start now. It has room."""

    def start(self, waiting: Sequence[Invocation], replica: ReplicaView, now_s: float) -> Batch: ...


@dataclass(frozen=True, slots=True)
class AdmitAlways:
    """Admits everything that finds a slot; the engine's own limit is the only bound."""

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        return Admit("has room")


ADMIT_ALWAYS = AdmitAlways()


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of one pool; see `cato.core.topology.PoolPolicies` for the settings.

    `window` bounds how many calls of the queue are tried at one event, in order (0: all), or with
    `shuffled` in the order of their draws. `strict`: while a call is passed over, none with a
    larger rank value is tried. `reserve`: the share of dispatches for calls without an SLO while
    one of them has waited for `reserve_after_s`, so that they never starve; late binding only.
    `corrects`: profiles are corrected by observations, and so are guesses about lengths (see
    `cato.core.pool.pace`, `cato.core.pool.usual_lengths`). `max_queued_tokens`, `refuse_late` and
    `patience_s` (inf: all may wait) as in `PoolPolicies`. `mapping` chooses from the whole queue,
    in the order of `ordering`: admission (and, with late binding, routing) is then not asked, and
    `window` and `reserve` have no effect. `retain_s`: how long the KV blocks of an answer with a
    tool call are protected from eviction (simulated engines only: vLLM has no such order).
    `by_turns`: a call may start only after `TurnCame`, for pools that share their replicas.
    `asks_at_once`: a new call that comes first and that no replica takes asks `preemption` at once;
    late binding only. `knows_stages`: calls of one run that are here at once know of each other
    (`Invocation.stage`).
    """

    routing: RoutingPolicy
    ordering: OrderingPolicy
    late_binding: bool = True
    max_queued: int = 1000
    admission: AdmissionPolicy = ADMIT_ALWAYS
    preemption: PreemptionPolicy | None = None
    window: int = 0
    shuffled: bool = False
    strict: bool = False
    reserve: float = 0.0
    reserve_after_s: float = 0.0
    corrects: bool = False
    max_queued_tokens: int | None = None
    refuse_late: bool = False
    patience_s: float = inf
    mapping: MappingPolicy | None = None
    retain_s: float = 0.0
    by_turns: bool = False
    asks_at_once: bool = False
    knows_stages: bool = False
