"""Least recently used."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.eviction import FleetSnapshot, Keep, Prefetch
from cato.core.ids import ModelName


@dataclass(frozen=True, slots=True)
class LeastRecentlyUsed:
    """Evict the model without a dispatch for the longest time; the baseline of CACE."""

    def keep(self, model: ModelName, fleet: FleetSnapshot) -> Keep:
        idle_s = fleet.models[model].idle_s
        return Keep(-idle_s, f"last used {idle_s:.1f} s ago")

    def prefetch(self, fleet: FleetSnapshot) -> Prefetch | None:
        return None
