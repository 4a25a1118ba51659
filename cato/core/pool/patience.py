"""Client patience: which queued late calls can still get a first token before the client leaves.

A call is late if it would miss its SLO even if it started now, alone. Late calls get the slots that
calls in time leave free. `LateService` measures how fast late work is dispatched; `Line` tells how
much late work is ahead of a given call.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import exp

# Interval between judgements of all late calls; new calls are judged by the last one.
EVERY_S = 1.0
# Time constant of the average: clients wait for a minute and more.
MEMORY_S = 60.0
# Initially late calls are expected to be served at full speed, with the weight of an observation
# this long. So a short burst refuses no call, and some late calls always wait for a lull.
PRIOR_S = 10.0
# New calls are judged by the queue of up to `EVERY_S` ago plus the calls that joined since; these
# may add at most this many seconds of all replicas' work.
LINED_UP_S = 10.0

Order = tuple[int, float, float, str]
"""Place in a queue: the rank's value and key, then arrival and id."""


@dataclass(slots=True)
class LateService:
    """Observed service rate of late calls, in replica-seconds of their work per second."""

    _served_s: float = 0.0
    _watched_s: float = 0.0
    _at_s: float = 0.0

    def watch(self, now_s: float, *, have_waited: bool) -> None:
        """Note whether late calls have waited since the last call of `watch`."""
        kept = exp(-max(0.0, now_s - self._at_s) / MEMORY_S)
        self._served_s *= kept
        self._watched_s *= kept
        if have_waited:
            self._watched_s += MEMORY_S * (1 - kept)
        self._at_s = now_s

    def served(self, load_s: float) -> None:
        """A late call that waited was dispatched."""
        self._served_s += load_s

    def speed(self, replicas: int) -> float:
        """The rate: at most `replicas`, and positive if `replicas` is."""
        seen = (PRIOR_S * replicas + self._served_s) / (PRIOR_S + self._watched_s)
        return min(float(replicas), seen)


@dataclass(slots=True)
class Line:
    """Calls in order of service, at `speed` replica-seconds per second."""

    speed: float = 1.0
    _orders: list[Order] = field(default_factory=list)
    _loads_s: list[float] = field(default_factory=lambda: [0.0])  # cumulative

    def __len__(self) -> int:
        return len(self._orders)

    def join(self, order: Order, load_s: float) -> None:
        """Join behind all that joined before."""
        self._orders.append(order)
        self._loads_s.append(self._loads_s[-1] + load_s)

    def wait_s(self, order: Order) -> float:
        """Expected wait of a call at that place."""
        return self._loads_s[bisect_left(self._orders, order)] / self.speed
