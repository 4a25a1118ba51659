"""CATO's research question 4 as printed: the coding tasks on one to six replicas of each model.

Mixes, rates, judged metrics and limits are the paper's (`printed.py`): one violation triggers
CATO's scaling. A method is a router with a scaling policy; Ray Serve's router and round robin come
with the autoscaler by queue length, whose 30 s upscale delay can be left out ("up at once"). As in
the experiments without scaling, replicas serve one request at a time and the SLA is 1.5 × the mean
on idle replicas; the cold start takes 20 s (assumed). A run is 200 requests, as the paper's
longest. Utilization counts replicas that are ready or draining.

Rows named "..., paper" are the paper's numbers; everything else is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from cato.core.demand import CallKind
from cato.core.follow_ups import FollowUps
from cato.lab.experiments import cato_rq, printed
from cato.lab.experiments.coding_scaling import (
    PAST_SEED,
    PAST_TASKS,
    RAY,
    RAY_UP_AT_ONCE,
    Method,
    scaled_fleet,
)
from cato.lab.experiments.common import attainment_gap, metrics_by_task
from cato.lab.experiments.routers import AS_PRINTED, ROUTERS
from cato.lab.study import Study, Trial
from cato.policies import schedulers
from cato.policies.scaling.cato import CatoScaling
from cato.policies.scaling.forecast import Forecast
from cato.sim.autoscale import AutoscaledFleet, follow_ups_of
from cato.sim.cato_workload import CATO_PRINTED_CLASSES, cato_tasks
from cato.sim.experiment import Options
from cato.sim.metrics import metrics_of
from cato.sim.plots import figure, legend, lines, save
from cato.sim.report import Report, Sample, Setting, Target

NAME = "cato-rq4"
PAPER = printed.CODING[NAME]
OURS = "foresight + forecast"
UP_AT_ONCE = "ray-serve + queue-length, up at once"
LINE_24 = "cato + cato, line 24 as printed"
_PUBLISHED = CatoScaling(max_exceeded_times=printed.VIOLATIONS)
_LITERAL = CatoScaling(max_exceeded_times=printed.VIOLATIONS, is_literal=True)
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        OURS: Method(schedulers.foresight, Forecast()),
        printed.SCALED_CATO: Method(schedulers.cato, _PUBLISHED),
        LINE_24: Method(ROUTERS[AS_PRINTED], _PUBLISHED),
        "cato + cato, read literally": Method(schedulers.cato, _LITERAL),
        printed.SCALED_RAY: Method(schedulers.ray_serve, RAY),
        UP_AT_ONCE: Method(schedulers.ray_serve, RAY_UP_AT_ONCE),
        printed.SCALED_ROUND_ROBIN: Method(partial(schedulers.early, "round-robin"), RAY),
        "power-of-two + queue-length": Method(partial(schedulers.early, "power-of-two"), RAY),
    }
)
HEADLINES = ("slo_attainment", "utilization", "mean_replicas")


@cache
def _follow_ups(workload: str) -> dict[CallKind, FollowUps]:
    """Policies' knowledge of the workload, from earlier tasks."""
    past = cato_tasks(
        PAPER.mixes[workload],
        1.0,
        PAST_TASKS,
        PAST_SEED,
        classes=CATO_PRINTED_CLASSES,
        judged=printed.JUDGED,
    )
    return follow_ups_of(past, dict.fromkeys(cato_rq.MODELS, cato_rq.PROFILE), 1)


def a_fleet(method: str, workload: str) -> AutoscaledFleet:
    """One replica of each model with the given method; its policies know `workload`."""
    return scaled_fleet(METHODS[method], cato_rq.MODELS, _follow_ups(workload))


def _measured(workload: str, rate_per_s: float, method: str, seed: int) -> dict[str, float]:
    tasks = cato_rq.tasks_at(PAPER.mixes[workload], cato_rq.RATE, rate_per_s, seed)
    duration_s = tasks[-1].arrived_at_s
    scaled = a_fleet(method, workload)
    outcomes = scaled.run(tasks, duration_s)
    metrics = metrics_of(scaled.fleet, outcomes) | metrics_by_task(outcomes)
    return metrics | {"mean_replicas": scaled.mean_provisioned(duration_s)}


def _cells(options: Options) -> list[Trial]:
    return [
        Trial({"workload": workload, cato_rq.RATE: rate}, partial(_measured, workload, rate))
        for workload in PAPER.mixes
        for rate in PAPER.rates_per_s
    ]


def _targets(samples: Sequence[Sample]) -> list[Target]:
    """At every rate, versus both readings of the paper's method, and its baseline."""
    targets = []
    for workload in PAPER.mixes:
        for rate in PAPER.rates_per_s:
            wanted: Setting = {"workload": workload, cato_rq.RATE: rate}
            for method in (printed.SCALED_CATO, LINE_24, printed.SCALED_RAY):
                gap = attainment_gap(samples, OURS, method, wanted.__eq__)
                if gap is not None:
                    text = f"{workload} at {rate:g}/s: points over {method}"
                    targets.append(Target(2, text, -0.5, *gap))
    return targets


def plot(report: Report, folder: Path) -> list[Path]:
    """Goodput and latencies of each task, utilization and replicas, over the rate."""
    paths = []
    for workload, shares in PAPER.mixes.items():
        means = [m for m in report.means if m.setting["workload"] == workload]
        paths += cato_rq.plot_tasks(NAME, f"-{workload}", means, shares, folder)
        fig, axes = figure(3)
        for axis, metric in zip(
            axes, ("slo_attainment", "utilization", "mean_replicas"), strict=True
        ):
            shown = [m for m in means if m.metric == metric]
            label = {"slo_attainment": "SLO attainment", "mean_replicas": "replicas (mean)"}
            lines(axis, shown, cato_rq.RATE, label.get(metric, metric))
        legend(fig)
        paths.append(save(fig, folder, f"{NAME}-utilization-{workload}"))
    return paths


STUDY = Study(
    NAME,
    "scaling from one replica of each model to six, both of the paper's patterns",
    f"{cato_rq.SOURCE}, RQ4",
    tuple(METHODS),
    _cells,
    _targets,
    plot,
    HEADLINES,
    ("slo_attainment", "mean_replicas", "e2e_s_p95"),
    means=partial(cato_rq.with_printed, PAPER),
    metrics=(*cato_rq.metrics_in(PAPER), "mean_replicas"),
    reference=OURS,
    called="scaling method",
)
