"""Belady's rule: the offline bound."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from cato.core.eviction import FleetSnapshot, Keep, Prefetch
from cato.core.ids import ModelName


@dataclass(frozen=True, slots=True)
class Belady:
    """Evict the model whose next arrival is farthest away.

    Belady, "A study of replacement algorithms" (1966). `arrivals_s` holds the times of all arrivals
    of each model, ascending: only a simulator knows them. Optimal in hits among policies that load
    on demand, for one accelerator at a time; with accelerators that are busy or loading it is a
    near bound, not a proof. A policy that loads ahead of demand may exceed it.
    """

    arrivals_s: Mapping[ModelName, tuple[float, ...]]

    def keep(self, model: ModelName, fleet: FleetSnapshot) -> Keep:
        place = fleet.models[model].queue_position
        if place is not None:
            # Waiting calls come before all future arrivals.
            return Keep(1 / place, f"wanted by number {place} of the queue")
        moments_s = self.arrivals_s.get(model, ())
        i = bisect_right(moments_s, fleet.now_s)
        next_s = moments_s[i] - fleet.now_s if i < len(moments_s) else inf
        return Keep(-next_s, f"wanted again in {next_s:.1f} s")

    def prefetch(self, fleet: FleetSnapshot) -> Prefetch | None:
        return None
