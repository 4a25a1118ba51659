"""Metrics of a run on a fleet."""

from __future__ import annotations

from collections.abc import Sequence

from cato.sim.fleet import Fleet
from cato.sim.tasks import Outcome, task_metrics

OF_FLEETS = ("utilization", "preempted")
NAMES = (*task_metrics(()), *OF_FLEETS)
"""What `metrics_of` measures."""


def metrics_of(fleet: Fleet, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The metrics common to all reports: `task_metrics`, and the fleet's cost."""
    preempted = float(sum(p.preempted for p in fleet.pools.values()))
    of_fleet = dict(zip(OF_FLEETS, (fleet.utilization(), preempted), strict=True))
    return task_metrics(outcomes) | of_fleet
