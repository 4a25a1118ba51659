"""Queue pressure: work that can still meet its SLO, and the share that no longer can.

While all calls can be in time, the order is by deadline. If some must be late, it is better to miss
the long ones: shortest first. `ForesightOrdering` switches on what is measured here.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import exp

from cato.core.ids import InvocationId

# Time constant of the averages.
MEMORY_S = 10.0


@dataclass(slots=True)
class Pressure:
    """Loads in replica-seconds.

    A call counts from joining the queue until it starts, leaves, or can no longer be in time.
    """

    waiting_s: float = 0.0
    _begun_s: float = 0.0
    _missed_s: float = 0.0
    _seen_at_s: float = 0.0
    _loads_s: dict[InvocationId, tuple[float, float]] = field(default_factory=dict)
    _by_latest: list[tuple[float, InvocationId]] = field(default_factory=list)

    def join(self, id: InvocationId, latest_s: float, load_s: float) -> None:
        """A call joined that must start by `latest_s`."""
        self._loads_s[id] = latest_s, load_s
        self.waiting_s += load_s
        heapq.heappush(self._by_latest, (latest_s, id))

    def leave(self, id: InvocationId) -> bool:
        """A call starts or leaves; returns whether it could still be in time."""
        known = self._loads_s.pop(id, None)
        if known is None:
            return False
        self.waiting_s = self.waiting_s - known[1] if self._loads_s else 0.0
        return True

    def begins(self, load_s: float, now_s: float) -> None:
        """A load that can be in time starts."""
        self._see(now_s)
        self._begun_s += load_s

    def pass_to(self, now_s: float) -> None:
        """Calls that can no longer be in time stop counting."""
        late = self._by_latest
        while late and late[0][0] < now_s:
            latest_s, id = heapq.heappop(late)
            known = self._loads_s.get(id)
            if known is not None and known[0] == latest_s:
                self.leave(id)
                self._see(now_s)
                self._missed_s += known[1]

    def in_time(self, now_s: float, replicas: int) -> float:
        """Recent share of the time of `replicas` that was used by work started in time."""
        if not self._begun_s:
            return 0.0
        self._see(now_s)
        return self._begun_s / (MEMORY_S * max(1, replicas))

    @property
    def missed(self) -> float:
        """Recent share of late work, of all work that started or became late, in [0, 1]."""
        if not self._missed_s:
            return 0.0
        return self._missed_s / (self._missed_s + self._begun_s)

    def _see(self, now_s: float) -> None:
        if now_s > self._seen_at_s:
            kept = exp((self._seen_at_s - now_s) / MEMORY_S)
            self._begun_s *= kept
            self._missed_s *= kept
            self._seen_at_s = now_s
