"""Least frequently used."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.eviction import FleetSnapshot, Keep, Prefetch
from cato.core.ids import ModelName


@dataclass(frozen=True, slots=True)
class LeastFrequentlyUsed:
    """Evict the model with the fewest dispatches since the start.

    Counts are of all time ("perfect LFU"), not since the load: a model that is evicted and comes
    back keeps its rank. Slow to follow a change in demand.
    """

    def keep(self, model: ModelName, fleet: FleetSnapshot) -> Keep:
        uses = fleet.models[model].uses
        return Keep(uses, f"used {uses} times")

    def prefetch(self, fleet: FleetSnapshot) -> Prefetch | None:
        return None
