"""Arrival rates of models: from recent traffic, daily patterns and active users."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, floor, inf, sqrt

from cato.core.ids import ModelName

# Time constant of arrival rates: long against the gaps between arrivals of a rare model (a minute),
# short against the hours after which a team changes what it works on.
RATE_MEMORY_S = 1800.0
# Rates start as if this time had passed before the first arrival: one early arrival is no rate.
RATE_PRIOR_S = 60.0

DAY_S = 86_400.0
SLICE_S = 1800.0
# The daily pattern is read from now to this much later: a load serves future calls.
AHEAD_S = 900.0
# The daily pattern weighs as much as having observed today for this long.
HISTORY_S = 1800.0
# Means forget older days than these.
MEMORY_DAYS = 10
# A clock that moved by less is not considered adjusted.
CLOCK_TOLERANCE_S = 2.0
# A longer pause of a user starts a new activity.
SESSION_S = 600.0
# A user counts as active for this many mean gaps after the last call.
GAPS = 2.0
MAX_USERS = 10_000
_SLICES = int(DAY_S / SLICE_S)
# 1 January 1970 was a Thursday; Monday is 0.
_FIRST_WEEKDAY = 3


@dataclass(frozen=True, slots=True)
class UsualArrivals:
    """Mean arrivals of a model in one time slice of working days or weekend days.

    `slice` counts slices of `SLICE_S` from midnight; the mean is over the last `days` such days.
    """

    model: ModelName
    is_weekend: bool
    slice: int
    arrivals: float
    days: int


@dataclass(slots=True)
class _Recent:
    # Arrivals, each decayed by exp(-age/RATE_MEMORY_S), as of `at_s`.
    count: float = 0.0
    at_s: float = 0.0


@dataclass(slots=True)
class _Follow:
    """What users do after calling a model."""

    calls: int = 0
    gap_s: float = 0.0
    next: Counter[ModelName] = field(default_factory=Counter)

    def note(self, model: ModelName, gap_s: float) -> None:
        self.next[model] += 1
        self.gap_s += (gap_s - self.gap_s) / self.next.total()


_Key = tuple[bool, int]
"""Whether it is a weekend day, and the slice of the day."""


class ArrivalRates:
    """Arrival rates of models, as the mean of a gamma distribution.

    `now_s` is the driver's clock. `local_s` is the wall clock: seconds since 1970 of a clock that
    shows local time; without it no daily pattern is learned.

    The rate combines recent arrivals, decayed, with arrivals at this time of other days, weighted
    as if observed for `HISTORY_S`. It is at least the rate expected of active users. A user who
    last called model A next calls model B with B's share of the calls that followed A, after A's
    mean gap.

    `unit_s`: length of one of the constants' seconds on the driver's clock. Times of day stay those
    of the wall clock.
    """

    def __init__(self, unit_s: float = 1.0) -> None:
        self._memory_s = RATE_MEMORY_S * unit_s
        self._prior_s = RATE_PRIOR_S * unit_s
        self._opened_at_s: float | None = None
        self._recent: dict[ModelName, _Recent] = {}
        self._local_minus_now_s: float | None = None
        # The current slice: its number since 1970, its arrivals, and whether it was observed in
        # full.
        self._slice = 0
        self._counts: dict[ModelName, int] = {}
        self._is_whole = False
        self._means: dict[_Key, dict[ModelName, float]] = {}
        self._days: dict[_Key, int] = {}
        self._changed: set[_Key] = set()
        # The last call of each user, latest last.
        self._last: OrderedDict[str, tuple[ModelName, float]] = OrderedDict()
        self._after: dict[ModelName, _Follow] = {}
        self._at_work: tuple[float, dict[ModelName, int]] = (-inf, {})

    def open(self, now_s: float) -> None:
        """Start observing, unless already started."""
        if self._opened_at_s is None:
            self._opened_at_s = now_s

    def note(self, now_s: float, model: ModelName, user: str = "") -> None:
        """A call for `model` arrived; `user` is empty when unknown."""
        self.open(now_s)
        self._close_slices(now_s)
        recent = self._recent.setdefault(model, _Recent(at_s=now_s))
        recent.count = recent.count * exp(-max(0.0, now_s - recent.at_s) / self._memory_s) + 1.0
        recent.at_s = max(recent.at_s, now_s)
        self._counts[model] = self._counts.get(model, 0) + 1
        if user:
            self._note_user(now_s, model, user)

    def _note_user(self, now_s: float, model: ModelName, user: str) -> None:
        last = self._last.pop(user, None)
        if last is not None and now_s - last[1] <= SESSION_S:
            self._after[last[0]].note(model, max(0.0, now_s - last[1]))
        self._after.setdefault(model, _Follow()).calls += 1
        self._last[user] = (model, now_s)
        if len(self._last) > MAX_USERS:
            self._last.popitem(last=False)
        self._at_work = (-inf, {})

    def tell_clock(self, now_s: float, local_s: float) -> None:
        """Set the wall clock; an adjusted clock invalidates the current slice."""
        offset_s, known_s = local_s - now_s, self._local_minus_now_s
        if known_s is not None and abs(offset_s - known_s) <= CLOCK_TOLERANCE_S:
            self._close_slices(now_s)
            return
        self._local_minus_now_s = offset_s
        self._slice = floor(local_s / SLICE_S)
        self._counts.clear()
        self._is_whole = local_s % SLICE_S <= CLOCK_TOLERANCE_S

    def remember(self, slices: Iterable[UsualArrivals]) -> None:
        """Load what was learned earlier; it replaces the values of these slices."""
        for s in slices:
            key = (s.is_weekend, s.slice)
            self._means.setdefault(key, {})[s.model] = s.arrivals
            self._days[key] = max(self._days.get(key, 0), s.days)

    def learnt(self) -> tuple[UsualArrivals, ...]:
        """Changes since the last call."""
        changed = tuple(
            UsualArrivals(model, *key, arrivals, self._days[key])
            for key in sorted(self._changed)
            for model, arrivals in sorted(self._means[key].items())
        )
        self._changed.clear()
        return changed

    def evidence(self, now_s: float, model: ModelName) -> float:
        """Arrivals so far, each decayed by exp(-age/RATE_MEMORY_S)."""
        recent = self._recent.get(model)
        if recent is None:
            return 0.0
        return recent.count * exp(-max(0.0, now_s - recent.at_s) / self._memory_s)

    def rate(self, now_s: float, model: ModelName) -> tuple[float, float]:
        """Expected arrivals per second from now on, and the number of arrivals behind them."""
        opened_at_s = now_s if self._opened_at_s is None else self._opened_at_s
        watched_s = max(0.0, now_s - opened_at_s) + self._prior_s
        memory_s = self._memory_s * (1 - exp(-watched_s / self._memory_s))
        evidence = self.evidence(now_s, model)
        usual_per_s = self._usual_per_s(now_s, model)
        if usual_per_s is not None:
            evidence += usual_per_s * HISTORY_S
            memory_s += HISTORY_S
        rate_per_s = evidence / memory_s
        next_per_s, seen = self._next_per_s(now_s, model)
        return (next_per_s, seen) if next_per_s > rate_per_s else (rate_per_s, evidence)

    def _next_per_s(self, now_s: float, model: ModelName) -> tuple[float, float]:
        """The rate expected of active users, and the number of calls behind the estimate."""
        if self._at_work[0] != now_s:
            self._at_work = (now_s, self._count_at_work(now_s))
        rate_per_s, seen = 0.0, 0.0
        for last, users in self._at_work[1].items():
            follow = self._after[last]
            if n := follow.next[model]:
                # Less one standard error: if users cannot be told apart, successions are random.
                rate_per_s += users * (n - sqrt(n)) / follow.calls / max(follow.gap_s, 1.0)
                seen += n
        return rate_per_s, seen

    def _count_at_work(self, now_s: float) -> dict[ModelName, int]:
        """Active users, by the model that they called last."""
        found: dict[ModelName, int] = {}
        for model, at_s in reversed(self._last.values()):
            if now_s - at_s > SESSION_S:
                break
            if now_s - at_s <= GAPS * self._after[model].gap_s:
                found[model] = found.get(model, 0) + 1
        return found

    def _usual_per_s(self, now_s: float, model: ModelName) -> float | None:
        """The usual rate at this time of day; None if unknown."""
        if self._local_minus_now_s is None:
            return None
        local_s = now_s + self._local_minus_now_s
        first = floor(local_s / SLICE_S)
        later = min(1.0, max(0.0, (local_s + AHEAD_S - (first + 1) * SLICE_S) / AHEAD_S))
        arrivals = 0.0
        for number, share in ((first, 1 - later), (first + 1, later)):
            key = _key(number)
            if share > 0 and not self._days.get(key):
                return None
            arrivals += share * self._means.get(key, {}).get(model, 0.0)
        return arrivals / SLICE_S

    def _close_slices(self, now_s: float) -> None:
        """Add the finished slices to the means of their time of day."""
        if self._local_minus_now_s is None:
            return
        current = floor((now_s + self._local_minus_now_s) / SLICE_S)
        if current <= self._slice:
            return
        if self._is_whole:
            # Slices in between had no arrivals; after a long silence one day of them is enough.
            for number in range(self._slice, min(current, self._slice + _SLICES)):
                self._add_day(_key(number))
                self._counts.clear()
        self._counts.clear()
        self._slice, self._is_whole = current, True

    def _add_day(self, key: _Key) -> None:
        days = self._days[key] = min(self._days.get(key, 0) + 1, MEMORY_DAYS)
        means = self._means.setdefault(key, {})
        for model in means.keys() | self._counts.keys():
            known = means.get(model, 0.0)
            means[model] = known + (self._counts.get(model, 0) - known) / days
        self._changed.add(key)


def _key(number: int) -> _Key:
    day, slice = divmod(number, _SLICES)
    return (day + _FIRST_WEEKDAY) % 7 >= 5, slice
