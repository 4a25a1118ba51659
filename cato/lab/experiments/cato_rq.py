"""CATO's research questions 1-3 as printed: four coding tasks on 6 + 6 replicas of two models.

Mixes, rates, judged metrics and baselines are the paper's (`printed.py`): completion and generation
are judged by TTFT, translation and summarization by E2E. Generation and translation ask model A
and then model B, the others model A alone. Three things are not as printed: replicas serve one
request at a time; the SLA is 1.5 × the mean of the judged metric on idle replicas, where the paper
uses the mean at 1.67 requests/s; and prompt lengths are assumed. Besides the paper's rates the same
mixes run at fixed utilizations of the busier model's replicas.

Rows named "..., paper" are the paper's numbers, the "upper bound" is a linear program's
(`bounds.py`), and "free preemption" has engines that preempt at no cost (`free_preemption.py`);
everything else is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cato.core.ids import PoolName
from cato.core.profile import Profile
from cato.core.topology import RAY_SERVE
from cato.lab.experiments import printed
from cato.lab.experiments.bounds import UPPER_BOUND, Capacity, attainable
from cato.lab.experiments.coding_mixes import COMPARED, ONE_AT_A_TIME
from cato.lab.experiments.common import attainment_gap, judged_s, metrics_by_task, names_by_task
from cato.lab.experiments.free_preemption import FREE, FREE_KNOWN, attained
from cato.lab.experiments.routers import ROUTERS
from cato.lab.study import Measured, Study, Trial
from cato.policies import schedulers
from cato.sim.cato_workload import (
    CATO_PRINTED_CLASSES,
    MODEL_A,
    MODEL_B,
    cato_tasks,
    load_per_task_s,
)
from cato.sim.experiment import Options
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.metrics import NAMES, metrics_of
from cato.sim.plots import curve, figure, legend, lines, save
from cato.sim.report import Mean, Report, Sample, Setting, Target, summarize
from cato.sim.tasks import SimTask

GROUP = 1
SOURCE = 'CATO, "SLA-Awareness for AI-assisted coding" (2025)'
MODELS = (PoolName(MODEL_A), PoolName(MODEL_B))
UTILIZATIONS = (0.3, 0.5, 0.7, 0.83, 0.9)
# At a fixed utilization queues need longer to settle than the paper's runs last.
SETTLED_REQUESTS = 600
PROFILE: Profile = ONE_AT_A_TIME
# With one request at a time there is no batch size to know.
POLICIES = {name: make for name, make in ROUTERS.items() if name != schedulers.KNOWS_BATCHES}
IDEALS: Mapping[str, Callable[[Sequence[SimTask], Mapping[PoolName, Capacity]], float]] = {
    FREE: partial(attained, knows_lengths=False),
    FREE_KNOWN: partial(attained, knows_lengths=True),
    UPPER_BOUND: attainable,
}
"""Shares in time without the costs of preemption, and with more knowledge."""
OPPONENTS = (RAY_SERVE, "round-robin", "cato", "edf-bounded", "sjf-bounded")
HEADLINES = ("slo_attainment", "utilization", "e2e_s_p95")
# Quantiles of latencies shown in plots.
_QUANTILES = tuple(q / 50 for q in range(51))
RATE, UTILIZATION = "rate_per_s", "utilization"

Distributions = Mapping[str, Mapping[str, Mapping[str, list[float]]]]
"""Quantiles of the judged latency by workload, task and policy, at the paper's highest rate."""


def tasks_at(shares: printed.Shares, axis: str, load: float, seed: int) -> list[SimTask]:
    """The tasks of one run: at a rate of the paper, or at a utilization of the busiest pool."""
    rate_per_s, count = load, printed.CODING_REQUESTS
    if axis == UTILIZATION:
        busy_s = max(load_per_task_s(shares, CATO_PRINTED_CLASSES, PROFILE).values())
        rate_per_s, count = load * printed.CODING_REPLICAS / busy_s, SETTLED_REQUESTS
    return cato_tasks(
        shares,
        rate_per_s,
        count,
        seed,
        profile=PROFILE,
        classes=CATO_PRINTED_CLASSES,
        judged=printed.JUDGED,
    )


def a_fleet(policy: str) -> Fleet:
    """Six replicas of each model with the given policy."""
    return Fleet(
        [
            PoolSetup(name, (PROFILE,) * printed.CODING_REPLICAS, POLICIES[policy]())
            for name in MODELS
        ]
    )


def measured_at(shares: printed.Shares, axis: str, load: float, policy: str, seed: int) -> Measured:
    """Metrics, and the judged latencies of each task."""
    tasks = tasks_at(shares, axis, load, seed)
    if policy in IDEALS:
        pools = dict.fromkeys(MODELS, Capacity(PROFILE, printed.CODING_REPLICAS))
        return Measured({"slo_attainment": IDEALS[policy](tasks, pools)}, {})
    fleet = a_fleet(policy)
    outcomes = fleet.run(tasks)
    return Measured(metrics_of(fleet, outcomes) | metrics_by_task(outcomes), judged_s(outcomes))


def _cells(paper: printed.Coding, options: Options) -> list[Trial]:
    loads = [(RATE, r) for r in paper.rates_per_s] + [(UTILIZATION, u) for u in UTILIZATIONS]
    return [
        Trial({"workload": workload, axis: load}, partial(measured_at, shares, axis, load))
        for workload, shares in paper.mixes.items()
        for axis, load in loads
    ]


def metrics_in(paper: printed.Coding) -> tuple[str, ...]:
    """The metrics of the fleet, and those of each task of the mixes."""
    tasks = dict.fromkeys(task for shares in paper.mixes.values() for task in shares)
    return (*NAMES, *names_by_task(tasks))


def with_printed(paper: printed.Coding, samples: Sequence[Sample]) -> tuple[Mean, ...]:
    """The rows of the samples, and the paper's."""
    return (*summarize(samples), *(r.mean for r in paper.results))


def _extra(
    paper: printed.Coding, options: Options, samples: Sequence[Sample]
) -> dict[str, Distributions]:
    highest = [s for s in samples if s.setting.get(RATE) == paper.rates_per_s[-1]]
    return {"distributions": _distributions(highest)}


def _distributions(samples: Sequence[Sample]) -> Distributions:
    pooled: dict[tuple[str, str, str], list[float]] = {}
    for s in samples:
        for task, times in s.further.items():
            key = (str(s.setting["workload"]), task, s.policy)
            pooled.setdefault(key, []).extend(times)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (workload, task, policy), times in pooled.items():
        if times:
            quantiles = [float(q) for q in np.quantile(times, _QUANTILES)]
            found.setdefault(workload, {}).setdefault(task, {})[policy] = quantiles
    return found


def _targets(paper: printed.Coding, samples: Sequence[Sample]) -> list[Target]:
    """Versus every baseline at the paper's rates, versus Ray Serve's router at two utilizations."""
    targets: list[Target] = []
    for workload in paper.mixes:
        for rate in paper.rates_per_s:
            wanted: Setting = {"workload": workload, RATE: rate}
            known = [(g, n) for n in OPPONENTS if (g := _gap(samples, n, wanted)) is not None]
            if known:
                gap, name = min(known, key=lambda g: g[0][0])
                text = f"{workload} at {rate:g}/s: points over the strongest opponent ({name})"
                targets.append(Target(GROUP, text, -0.5, *gap))
        for load, goal in ((0.7, 10.0), (0.83, 25.0)):
            over = _gap(samples, RAY_SERVE, {"workload": workload, UTILIZATION: load})
            if over is not None:
                text = f"{workload} at utilization {load:g}: points over {RAY_SERVE}"
                targets.append(Target(GROUP, text, goal, *over))
    return targets


def _gap(samples: Sequence[Sample], baseline: str, wanted: Setting) -> tuple[float, float] | None:
    return attainment_gap(samples, schedulers.FORESIGHT, baseline, wanted.__eq__)


# Plots: the paper's figures


def plot(report: Report, folder: Path) -> list[Path]:
    """Goodput, latencies and utilization per task over the rate, latency distributions, and
    attainment over the utilization.
    """
    paper = printed.CODING[report.experiment]
    paths: list[Path] = []
    for workload, shares in paper.mixes.items():
        end = f"-{workload}" if len(paper.mixes) > 1 else ""
        means = [m for m in report.means if m.setting["workload"] == workload]
        over_rates = [m for m in means if RATE in m.setting]
        paths += plot_tasks(report.experiment, end, over_rates, shares, folder)
        fig, (left, right) = figure(2)
        lines(left, [m for m in over_rates if m.metric == "utilization"], RATE, "utilization")
        loaded = [m for m in means if UTILIZATION in m.setting and m.metric == "slo_attainment"]
        lines(right, loaded, UTILIZATION, "attainment")
        legend(fig)
        paths.append(save(fig, folder, f"{report.experiment}-utilization{end}"))
        distributions = report.extra.get("distributions", {})
        assert isinstance(distributions, Mapping)
        paths.append(_plot_cdf(report.experiment + "-cdf" + end, distributions[workload], folder))
    return paths


def plot_tasks(
    name: str, end: str, means: Sequence[Mean], shares: printed.Shares, folder: Path
) -> list[Path]:
    """Goodput, and the judged latency, of each task over the rate."""
    goodput = _by_task(means, shares, (("slo_attainment", "share within its SLA"),))
    times = [(f"judged_s_{s}", f"{s} (s)") for s in ("mean", "p95", "p99")]
    latency = _by_task(means, shares, times)
    return [
        save(goodput, folder, f"{name}-goodput{end}"),
        save(latency, folder, f"{name}-latency{end}"),
    ]


def _by_task(
    means: Sequence[Mean], shares: printed.Shares, metrics: Sequence[tuple[str, str]]
) -> Figure:
    """One column per task, one row per metric."""
    fig, axes = figure(len(shares), len(metrics))
    cells = [(metric, label, task) for metric, label in metrics for task in shares]
    for axis, (metric, label, task) in zip(axes, cells, strict=True):
        shown = [m for m in means if m.metric == f"{metric}.{task}"]
        lines(axis, shown, RATE, f"{label}, {printed.JUDGED[task].value.upper()}")
        axis.set_title(task, fontsize=9)
    legend(fig)
    return fig


def _plot_cdf(
    name: str, distributions: Mapping[str, Mapping[str, list[float]]], folder: Path
) -> Path:
    """Fraction of tasks done within a time, at the paper's highest rate."""
    fig, axes = figure(len(distributions))
    for axis, (task, of_policies) in zip(axes, distributions.items(), strict=True):
        for policy, quantiles in of_policies.items():
            curve(axis, policy, quantiles, _QUANTILES)
        axis.set_xlabel(f"{printed.JUDGED[task].value.upper()} (s)")
        axis.set_ylabel("share of the tasks")
        axis.set_title(task, fontsize=9)
        axis.grid(alpha=0.3)
    legend(fig)
    return save(fig, folder, name)


def _study(name: str, number: int, title: str) -> Study:
    paper = printed.CODING[name]
    return Study(
        name,
        title,
        f"{SOURCE}, RQ{number}",
        (*POLICIES, *IDEALS),
        partial(_cells, paper),
        partial(_targets, paper),
        plot,
        HEADLINES,
        COMPARED,
        means=partial(with_printed, paper),
        extra=partial(_extra, paper),
        metrics=metrics_in(paper),
    )


STUDIES = (
    _study("cato-rq1", 1, "90 % generation, 10 % translation by router, at the paper's rates"),
    _study("cato-rq2", 2, "90 % completion, 10 % summarization by router, at the paper's rates"),
    _study("cato-rq3", 3, "all four coding tasks by router, both of the paper's patterns"),
)
