"""Speeds of running calls by load, from the progress that replicas report.

SABER fits its law of speed to such pairs of load and speed, measured with the engine (its offline
phase). A router measures them all the time, so that the law follows the engine that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cato.core.events import Event, ReplicaLost, ReplicaProgressed
from cato.core.ids import InvocationId, ReplicaId

Speeds = Mapping[int, float]
"""Tokens per second of one call, by the calls that run together, itself included."""
NO_SPEEDS: Speeds = MappingProxyType({})

# Intervals of a load before its mean counts, and intervals that a mean remembers.
LEAST_INTERVALS, INTERVALS_KEPT = 5, 50


@dataclass(slots=True)
class _Mean:
    intervals: int = 0
    tokens_per_s: float = 0.0

    def saw(self, tokens_per_s: float) -> None:
        self.intervals += 1
        weight = 1 / min(self.intervals, INTERVALS_KEPT)
        self.tokens_per_s += weight * (tokens_per_s - self.tokens_per_s)


@dataclass(slots=True)
class SpeedMeter:
    """Mean speeds by load, over a pool's replicas. Mutable; one owner.

    An interval lies between two reports of a replica. Its load is the mean of both reports', and
    the calls in both have its speed, slowed by prompts that joined meanwhile, as in the paper.
    """

    _last: dict[ReplicaId, tuple[float, dict[InvocationId, int]]] = field(default_factory=dict)
    _means: dict[int, _Mean] = field(default_factory=dict)
    _is_new: bool = False

    def handle(self, event: Event) -> None:
        match event:
            case ReplicaProgressed(now_s, replica, tokens):
                self._progress(now_s, replica, dict(tokens))
            case ReplicaLost(_, replica):
                self._last.pop(replica, None)
            case _:
                pass

    def news(self) -> Speeds | None:
        """All speeds, if intervals came since the last look and a load has enough of them."""
        if not self._is_new:
            return None
        self._is_new = False
        known = {
            load: mean.tokens_per_s
            for load, mean in sorted(self._means.items())
            if mean.intervals >= LEAST_INTERVALS
        }
        return known or None

    def _progress(self, now_s: float, replica: ReplicaId, tokens: dict[InvocationId, int]) -> None:
        since_s, before = self._last.get(replica, (now_s, {}))
        self._last[replica] = (now_s, tokens)
        both = [n - before[id] for id, n in tokens.items() if id in before]
        # A preempted call counts its tokens from 0 again.
        if now_s <= since_s or not both or min(both) < 0 or not any(both):
            return
        load = max(1, round((len(before) + len(tokens)) / 2))
        self._means.setdefault(load, _Mean()).saw(sum(both) / len(both) / (now_s - since_s))
        self._is_new = True
