"""Metrics of a run on a fleet."""

from __future__ import annotations

from collections.abc import Sequence

from cato.sim.fleet import Fleet
from cato.sim.tasks import Outcome, task_metrics


def metrics_of(fleet: Fleet, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The metrics common to all reports: `task_metrics`, and the fleet's cost."""
    preempted = float(sum(p.preempted for p in fleet.pools.values()))
    return task_metrics(outcomes) | {"utilization": fleet.utilization(), "preempted": preempted}
