"""Queue pressure: work that can still meet its SLO, and the share that no longer can.

While all calls can be in time, none is dropped. If some must be late, it is better to miss the long
ones. `ForesightOrdering` plans by what is measured here.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import accumulate
from math import exp

from cato.core.ids import InvocationId
from cato.core.policies import Queued

# Time constant of the averages.
MEMORY_S = 10.0
# Arrivals are averaged over `RECENT_S`, and are expected to go on like this for `TREND_S`.
RECENT_S, TREND_S = 0.1, 0.25
# The offered load is that of new calls of the last seconds, from so many on; if calls are few, of
# about so many calls' work. It counts as if so many more had come at the rate of the replicas.
OFFERED_S, FIRST_OFFERED_S = 2.0, 0.3
OFFERED_CALLS, FEW_CALLS = 10.0, 3.0
# Work done is averaged over so many replica-seconds, from `FIRST_PACE_S` of them on.
PACE_MEMORY_S, FIRST_PACE_S = 10.0, 0.5
LEAST_PACE, MOST_PACE = 0.5, 4.0
# Rests of streams whose pace is an SLO count as worth their cost until so many have ended lately.
# They are rare, and one in vain costs a stream that began in time.
FIRST_RESTS, RESTS_MEMORY_S = 4.0, 60.0
# Late turns of sessions get this share of all replicas' time, up to so many seconds at once; the
# larger share while fewer than `FEW_LATE` of the turns that ended lately were late.
LATE_SHARE, CALM_LATE_SHARE, FEW_LATE, LATE_BURST_S = 0.05, 0.2, 0.15, 20.0


class Kind(Enum):
    """Of a queued call: a stream without tokens, a call without tokens that is due as a whole, a
    stream that rests, one that rests and whose pace is an SLO, another."""

    NEW, WHOLE, REST, PACED_REST, OTHER = range(5)


NEWCOMERS = (Kind.NEW, Kind.WHOLE)
PLANNED = (Kind.NEW, Kind.PACED_REST)
GO_ON = (Kind.PACED_REST, Kind.OTHER)


@dataclass(slots=True)
class Tally:
    """What was gained and what was lost, in averages over `memory_s`."""

    memory_s: float
    gained: float = 0.0
    lost: float = 0.0
    _seen_at_s: float = 0.0

    def add(self, amount: float, now_s: float, *, is_lost: bool) -> None:
        self.see(now_s)
        if is_lost:
            self.lost += amount
        else:
            self.gained += amount

    def see(self, now_s: float) -> None:
        """Time has passed."""
        self.gained, self.lost = self.at(now_s)
        self._seen_at_s = max(self._seen_at_s, now_s)

    def at(self, now_s: float) -> tuple[float, float]:
        """What is left of both by then."""
        if now_s <= self._seen_at_s:
            return self.gained, self.lost
        kept = exp((self._seen_at_s - now_s) / self.memory_s)
        return kept * self.gained, kept * self.lost

    def share_lost(self, gained: float = 0.0, lost: float = 0.0) -> float:
        """In [0, 1], as if so much more had been gained and lost."""
        lost += self.lost
        return lost / (self.gained + gained + lost) if lost else 0.0


@dataclass(slots=True)
class Offered:
    """The load that new calls bring."""

    _loads_s: Tally = field(default_factory=lambda: Tally(OFFERED_S))
    _calls: Tally = field(default_factory=lambda: Tally(OFFERED_S))
    _first_at_s: float | None = None

    def comes(self, load_s: float, now_s: float) -> None:
        """A new call."""
        self._loads_s.add(load_s, now_s, is_lost=False)
        self._calls.add(1.0, now_s, is_lost=False)
        self._first_at_s = now_s if self._first_at_s is None else self._first_at_s

    def share(self, now_s: float, per_s: float) -> float:
        """As a share of `per_s`, the load that can be done per second; 0 before the first call.

        Of few calls a single one in a short time is no overload yet, so the work of `FEW_CALLS` is
        assumed to have come in just the time that it takes.
        """
        if self._first_at_s is None:
            return 0.0
        self._loads_s.see(now_s)
        self._calls.see(now_s)
        memory_s, calls = self._loads_s.memory_s, self._calls.gained
        over_s = memory_s * (1.0 - exp((self._first_at_s - now_s) / memory_s))
        needs_s = self._loads_s.gained / per_s
        call_s = needs_s / calls if calls > 0 else 0.0
        self._loads_s.memory_s = self._calls.memory_s = max(OFFERED_S, OFFERED_CALLS * call_s)
        few_s = FEW_CALLS * call_s
        return (needs_s + few_s) / (max(FIRST_OFFERED_S, over_s) + few_s)


@dataclass(slots=True)
class Pressure:
    """Loads in replica-seconds.

    A call counts from joining the queue until it starts, leaves, or can no longer be in time.
    `newcomers`: how many of these calls have no tokens yet; `resting`: how many are streams that
    rest and whose pace is an SLO; `resting_s`: the load of the other streams that rest. `pace`:
    work that a replica does per second while calls are queued. If it is not 1, estimates are wrong,
    and what is queued takes less time or more.
    """

    waiting_s: float = 0.0
    newcomers: int = 0
    resting: int = 0
    resting_s: float = 0.0
    _work: Tally = field(default_factory=lambda: Tally(MEMORY_S))
    _rests: Tally = field(default_factory=lambda: Tally(RESTS_MEMORY_S))
    pace: float = 1.0
    _done_s: float = 0.0
    _spent_s: float = 0.0
    _worked_at_s: float | None = None
    _arriving: Tally = field(default_factory=lambda: Tally(RECENT_S))
    _offered: Offered = field(default_factory=Offered)
    _crowded_from_s: float = 0.0
    _loads_s: dict[InvocationId, tuple[float, float, Kind]] = field(default_factory=dict)
    _by_latest: list[tuple[float, InvocationId]] = field(default_factory=list)

    def join(
        self,
        id: InvocationId,
        latest_s: float,
        load_s: float,
        now_s: float,
        kind: Kind = Kind.NEW,
    ) -> None:
        """A call joined that must start by `latest_s`."""
        self._arriving.add(load_s, now_s, is_lost=False)
        if kind in NEWCOMERS:
            self._offered.comes(load_s, now_s)
        if not self._loads_s:
            self._crowded_from_s = now_s
        self._loads_s[id] = latest_s, load_s, kind
        self.newcomers += kind in NEWCOMERS
        self.resting += kind is Kind.PACED_REST
        self.resting_s += load_s if kind is Kind.REST else 0.0
        self.waiting_s += load_s
        heapq.heappush(self._by_latest, (latest_s, id))

    def __len__(self) -> int:
        return len(self._loads_s)

    def __contains__(self, id: InvocationId) -> bool:
        return id in self._loads_s

    def queued(self) -> list[Queued]:
        """The streams that can be in time, and whose SLO is not met yet.

        A call that is due as a whole shares its replica with others for as long as it runs, so its
        latest start is not known: planned by it, many are late after all.
        """
        known = self._loads_s.items()
        return [(by_s, load_s, id) for id, (by_s, load_s, kind) in known if kind in PLANNED]

    def changed(self, id: InvocationId, load_s: float) -> None:
        """The load of a call has a new estimate."""
        known = self._loads_s.get(id)
        if known is not None:
            self.waiting_s += load_s - known[1]
            self.resting_s += load_s - known[1] if known[2] is Kind.REST else 0.0
            self._loads_s[id] = known[0], load_s, known[2]

    def leave(self, id: InvocationId) -> bool:
        """A call starts or leaves; returns whether it could still be in time."""
        known = self._loads_s.pop(id, None)
        if known is None:
            return False
        self.waiting_s -= known[1]
        self.newcomers -= known[2] in NEWCOMERS
        self.resting -= known[2] is Kind.PACED_REST
        self.resting_s -= known[1] if known[2] is Kind.REST else 0.0
        if not self._loads_s:  # rounding errors do not add up
            self.waiting_s = self.resting_s = 0.0
        return True

    def begins(self, load_s: float, now_s: float) -> None:
        """A load that can be in time starts."""
        self._work.add(load_s, now_s, is_lost=False)

    def goes_on(self, now_s: float) -> None:
        """A stream whose pace is an SLO, and that can still keep it, goes on after a rest."""
        self._rests.add(1.0, now_s, is_lost=self.newcomers > 0)

    def pass_to(self, now_s: float) -> None:
        """Calls that can no longer be in time stop counting."""
        late = self._by_latest
        while late and late[0][0] < now_s:
            latest_s, id = heapq.heappop(late)
            known = self._loads_s.get(id)
            if known is not None and known[0] == latest_s:
                self.leave(id)
                self._work.add(known[1], now_s, is_lost=True)
                if known[2] is Kind.PACED_REST:
                    self._rests.add(1.0, now_s, is_lost=True)

    def worked(self, load_s: float, now_s: float, replicas: int) -> None:
        """So much work was done while calls were queued; negative if it must be done again."""
        if self._worked_at_s is not None:
            spent_s = (now_s - self._worked_at_s) * replicas
            kept = exp(-spent_s / PACE_MEMORY_S)
            self._spent_s = self._spent_s * kept + spent_s
            self._done_s = max(0.0, self._done_s * kept + load_s)
            if self._spent_s > FIRST_PACE_S:
                self.pace = min(MOST_PACE, max(LEAST_PACE, self._done_s / self._spent_s))
        self._worked_at_s = now_s

    def rests(self) -> None:
        """Nothing is queued: the time until work is done while calls are queued does not count."""
        self._worked_at_s = None

    def ahead_s(self, now_s: float, replicas: int) -> float:
        """Seconds until `replicas` have started all queued calls that can be in time.

        If more work arrives than they can do, what will be queued soon counts as well.
        """
        self._arriving.see(now_s)
        more = self.needs_s(self._arriving.gained, replicas) / RECENT_S - 1.0
        return self.needs_s(self.waiting_s, replicas) + TREND_S * max(0.0, more)

    def rests_before(self, ahead_s: float, replicas: int) -> Callable[[float], float]:
        """A function of time: seconds until `replicas` have done what is queued and goes before a
        stream that rests, whose pace is an SLO, and that must go on by then.

        These are new calls, and streams that must go on sooner. `ahead_s`: for all new calls and
        all streams that rest and whose pace is an SLO.
        """

        @cache
        def queued() -> tuple[list[float], list[float]]:
            loads = self._loads_s.values()
            rests = sorted((by_s, load_s) for by_s, load_s, kind in loads if kind in GO_ON)
            after_s = accumulate((load_s for _, load_s in reversed(rests)), initial=0.0)
            return [by_s for by_s, _ in rests], [*after_s][::-1]

        def before_s(latest_s: float) -> float:
            by_s, after_s = queued()
            return ahead_s - self.needs_s(after_s[bisect_right(by_s, latest_s)], replicas)

        return before_s

    def crowded_s(self, now_s: float) -> float:
        """For how long calls that can be in time have been queued without a break."""
        return now_s - self._crowded_from_s if self._loads_s else 0.0

    def needs_s(self, load_s: float, replicas: int) -> float:
        """Seconds in which `replicas` do work of that load, at their pace."""
        return load_s / (replicas * self.pace)

    def in_time(self, now_s: float, replicas: int) -> float:
        """Recent share of the time of `replicas` that was used by work started in time."""
        self._work.see(now_s)
        return self._work.gained / (MEMORY_S * max(1, replicas))

    @property
    def missed(self) -> float:
        """Recent share of late work, of all work that started or became late, in [0, 1]."""
        return self._work.share_lost()

    def in_vain(self, now_s: float) -> float:
        """Recent share, by number, of rests in vain of streams whose pace is an SLO, in [0, 1).

        In vain: newcomers wait when it ends, so it made room for one call and took it from another;
        or the stream fell behind its pace. Both are known late, so rests that have not ended count.
        """
        self._rests.see(now_s)
        return self._rests.share_lost(gained=FIRST_RESTS, lost=self.resting)

    def offered_load(self, now_s: float, replicas: int) -> float:
        """Work of new calls that came lately, as a share of what `replicas` can do; 0 before the
        first."""
        return self._offered.share(now_s, replicas * self.pace)


@dataclass(slots=True)
class LateShare:
    """Replica-seconds that late turns of sessions may use while others can be in time.

    Contexts that were lost with a replica must be computed again, by turns that are late because of
    it: they may use that time in addition.
    """

    _used_s: float = 0.0  # below 0: more than their share may be used
    _seen_at_s: float = 0.0

    def left_s(self, now_s: float, replicas: int, late: float) -> float:
        """What is left; more may be used at once, and is missing then.

        `late`: the share of late ones among the turns that ended lately.
        """
        share = CALM_LATE_SHARE if late < FEW_LATE else LATE_SHARE
        regained_s = share * replicas * (now_s - self._seen_at_s)
        if self._used_s > 0.0:
            self._used_s = max(0.0, self._used_s - regained_s)
        else:  # sessions that do not come back need nothing
            self._used_s = min(0.0, self._used_s + regained_s)
        self._seen_at_s = now_s
        return LATE_BURST_S * replicas - self._used_s

    def begins(self, load_s: float, now_s: float, replicas: int, late: float) -> None:
        """A late turn of this load starts."""
        self.left_s(now_s, replicas, late)
        self._used_s += load_s

    def lost(self, work_s: float) -> None:
        """So much work was lost with a replica, or is found again with it (negative)."""
        self._used_s -= work_s
