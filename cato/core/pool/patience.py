"""Clients leave: which of the late calls that wait can have a first token before theirs does?

A call is late when it would miss its SLO even if it started now, alone. It gets a place when those
that can be in time leave one. How soon, is seen: `LateService` remembers how much late work was
dispatched while some waited, `Line` says what of it goes before a given call.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import exp

# All late calls are judged so often, and newcomers by the last judgement.
EVERY_S = 1.0
# What was seen is forgotten with this time constant: clients wait for a minute and more.
MEMORY_S = 60.0
# At first late calls are expected to be served at full speed: that weighs as much as having seen
# it for this time. So a short burst turns nobody away, and some late calls always wait for a lull.
PRIOR_S = 10.0
# Newcomers are judged by the queue as it was within `EVERY_S`, and by all that joined since: at
# most so much, in seconds of all replicas' work.
LINED_UP_S = 10.0

Order = tuple[int, float, float, str]
"""Place in a queue: a rank's value and key, then arrival and id."""


@dataclass(slots=True)
class LateService:
    """How fast late calls are served, in replica-seconds of their work a second."""

    _served_s: float = 0.0
    _watched_s: float = 0.0
    _at_s: float = 0.0

    def watch(self, now_s: float, *, have_waited: bool) -> None:
        """From the call before until now, some late calls waited, or none did."""
        kept = exp(-max(0.0, now_s - self._at_s) / MEMORY_S)
        self._served_s *= kept
        self._watched_s *= kept
        if have_waited:
            self._watched_s += MEMORY_S * (1 - kept)
        self._at_s = now_s

    def served(self, load_s: float) -> None:
        """One that waited was dispatched."""
        self._served_s += load_s

    def speed(self, replicas: int) -> float:
        """At most `replicas`, and above 0 if that is."""
        seen = (PRIOR_S * replicas + self._served_s) / (PRIOR_S + self._watched_s)
        return min(float(replicas), seen)


@dataclass(slots=True)
class Line:
    """Calls in the order in which they are served, at `speed`, in replica-seconds a second."""

    speed: float = 1.0
    _orders: list[Order] = field(default_factory=list)
    _loads_s: list[float] = field(default_factory=lambda: [0.0])  # of the first n together

    def __len__(self) -> int:
        return len(self._orders)

    def join(self, order: Order, load_s: float) -> None:
        """Behind all that joined before."""
        self._orders.append(order)
        self._loads_s.append(self._loads_s[-1] + load_s)

    def wait_s(self, order: Order) -> float:
        """Expected wait of a call at that place."""
        return self._loads_s[bisect_left(self._orders, order)] / self.speed
