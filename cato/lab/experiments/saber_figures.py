"""SABER's figures besides its tables: completion times by task, stability, and the estimators.

Engine, classes and rates are those of `saber-rq1`, 100 requests per run. The caps are those that
the paper found best; the best in our runs are in `saber-rq1`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from cato.core.policies import Policies
from cato.core.profile import Profile
from cato.lab.experiments.saber import POOL, REQUESTS, SOURCE, cap_name
from cato.lab.experiments.saber_estimators import CURVES, USL, offline_fit
from cato.lab.study import NO_POLICIES, Cell, Study, no_targets
from cato.policies import schedulers
from cato.sim import plots
from cato.sim.experiment import Options
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.looks import look_of
from cato.sim.metrics import NAMES, metrics_of
from cato.sim.report import Report, Sample, summarize
from cato.sim.workloads import (
    SABER_CLASSES,
    SABER_ENGINE,
    SABER_RATES_PER_S,
    SABER_SHARES,
    saber_tasks,
)

SABER = "saber"
# Fig. 4: workload, requests per second, the best static cap there (from the text).
PANELS = (("W1", 5.0, 50), ("W2", 20.0, 100), ("W3", 10.0, 80))
# Fig. 6 and 7: the best cap of each workload (from Fig. 1).
BEST_CAPS: Mapping[str, int] = MappingProxyType({"W1": 30, "W2": 70, "W3": 80})
QUICK_RATES_PER_S = (1.0, 5.0, 10.0, 20.0)
QUICK_SEEDS = 5
# Times of a CDF, as fractions of the class's SLA.
SHARES = tuple(float(x) for x in np.round(np.arange(0.1, 3.01, 0.1), 1))
_DONE = "done_"
_OVER_SLA = ("completion_over_sla_mean", "completion_over_sla_std")


def _estimator(curve: str) -> str:
    return f"saber, {curve}"


def _saber(curve: str, profile: Profile, places: int) -> Policies:
    return schedulers.saber(offline_fit(curve))


def _capped(cap: int, profile: Profile, places: int) -> Policies:
    return schedulers.static_cap(cap)


_CAPS = sorted({*BEST_CAPS.values(), *(cap for _, _, cap in PANELS)})
_SCHEDULERS: Mapping[str, Callable[[Profile, int], Policies]] = MappingProxyType(
    {
        **schedulers.OF_PROFILE,
        SABER: partial(_saber, USL),
        **{_estimator(c): partial(_saber, c) for c in CURVES},
        **{cap_name(cap): partial(_capped, cap) for cap in _CAPS},
    }
)


def _measured(workload: str, rate_per_s: float, pool: PoolSetup, seed: int) -> dict[str, float]:
    """Attainment, and completion times by class as fractions of the class's SLA."""
    fleet = Fleet([pool])
    outcomes = fleet.run(saber_tasks(workload, rate_per_s, REQUESTS, seed, POOL))
    metrics = metrics_of(fleet, outcomes)
    ratios = {
        name: np.array([o.e2e_s / o.task.target_s for o in outcomes if o.task.name == name])
        for name in SABER_CLASSES
    }
    every = np.concatenate(list(ratios.values()))
    metrics |= zip(_OVER_SLA, (float(every.mean()), float(every.std())), strict=True)
    for name, mine in ratios.items():
        if mine.size:
            within = [float(np.mean(mine <= x)) for x in (1 + 1e-9, *SHARES)]
            metrics |= zip(_of_class(name), within, strict=True)
    return metrics


def _of_class(name: str) -> tuple[str, ...]:
    """The metrics of one class."""
    return (f"attainment_{name}", *(f"{_DONE}{name}_{x}" for x in SHARES))


def _cell(workload: str, rate_per_s: float, arms: tuple[str, ...]) -> Cell:
    return Cell(
        {"workload": workload, "rate_per_s": rate_per_s},
        PoolSetup(POOL, (SABER_ENGINE,), NO_POLICIES),
        partial(_measured, workload, rate_per_s),
        arms,
        _SCHEDULERS,
    )


def _by_task(options: Options) -> list[Cell]:
    return [_cell(w, rate, (SABER, cap_name(cap))) for w, rate, cap in PANELS]


def _rates(options: Options) -> Sequence[float]:
    return QUICK_RATES_PER_S if options.quick else SABER_RATES_PER_S


def _over_load(options: Options) -> list[Cell]:
    return [
        _cell(w, rate, (SABER, cap_name(BEST_CAPS[w])))
        for w in SABER_SHARES
        for rate in _rates(options)
    ]


def _estimators(options: Options) -> list[Cell]:
    arms = tuple(_estimator(c) for c in CURVES)
    return [
        _cell(w, rate, (*arms, cap_name(BEST_CAPS[w])))
        for w in SABER_SHARES
        for rate in _rates(options)
    ]


def _cdf(samples: Sequence[Sample]) -> list[Sample]:
    """The points of the CDFs as separate settings."""
    found = []
    for s in samples:
        for metric, value in s.metrics.items():
            if metric.startswith(_DONE):
                name, share = metric.removeprefix(_DONE).rsplit("_", 1)
                setting = {**s.setting, "task": name, "time_over_sla": float(share)}
                found.append(Sample(setting, s.policy, s.seed, {"done": value}))
    return found


# Plots


def _plot_cdf(report: Report, folder: Path) -> list[Path]:
    """Fraction of finished tasks over time: one row per workload, one column per class."""
    fig, axes = plots.figure(len(SABER_CLASSES), len(PANELS))
    cells = [(panel, name) for panel in PANELS for name in SABER_CLASSES]
    for ax, ((workload, rate_per_s, _), name) in zip(axes, cells, strict=True):
        target_s = SABER_CLASSES[name][2]
        means = [
            replace(m, setting={"s": target_s * float(m.setting["time_over_sla"])})
            for m in report.means
            if m.metric == "done"
            and m.setting["workload"] == workload
            and m.setting["task"] == name
        ]
        plots.lines(ax, means, "s", "done (%)", 100.0)
        ax.axvline(target_s, color="gray", linestyle="--")
        ax.set_ylim(-2, 102)
        ax.set_xlabel("completion time (s)")
        ax.set_title(f"{workload} at {rate_per_s:g}/s, {name}")
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


def _plot_steadiness(report: Report, folder: Path) -> list[Path]:
    """Mean completion time over the SLA, with a band of one standard deviation."""
    fig, axes = plots.figure(len(SABER_SHARES))
    for ax, workload in zip(axes, SABER_SHARES, strict=True):
        here = [m for m in report.means if m.setting.get("workload") == workload]
        for policy in dict.fromkeys(m.policy for m in here):
            rows = {
                metric: sorted(
                    (float(m.setting["rate_per_s"]), m.mean)
                    for m in here
                    if m.policy == policy and m.metric == f"completion_over_sla_{metric}"
                )
                for metric in ("mean", "std")
            }
            xs, means = np.array(rows["mean"]).T
            stds = np.array(rows["std"])[:, 1]
            plots.curve(ax, policy, xs.tolist(), means.tolist())
            color = look_of(fig, policy).color
            ax.fill_between(xs, means - stds, means + stds, color=color, alpha=0.12)
        ax.axhline(1.0, color="gray", linestyle="--")
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.05)
        ax.set_xlabel("requests per second")
        ax.set_ylabel("completion time over SLA")
        ax.set_title(workload)
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


def _plot_attainment(report: Report, folder: Path) -> list[Path]:
    fig, axes = plots.figure(len(SABER_SHARES))
    for ax, workload in zip(axes, SABER_SHARES, strict=True):
        means = [
            m
            for m in report.means
            if m.metric == "slo_attainment" and m.setting.get("workload") == workload
        ]
        plots.lines(ax, means, "rate_per_s", "goodput (% within SLA)", 100.0)
        ax.set_xlabel("requests per second")
        ax.set_title(workload)
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


_CAP_ARMS = tuple(cap_name(c) for c in _CAPS)
_METRICS = (*NAMES, *_OVER_SLA, *(metric for name in SABER_CLASSES for metric in _of_class(name)))

STUDIES = (
    Study(
        "saber-fig4",
        "how long tasks take, by class: distribution functions",
        f"{SOURCE}, Fig. 4",
        (schedulers.FORESIGHT, SABER, *_CAP_ARMS),
        _by_task,
        no_targets,
        _plot_cdf,
        ("slo_attainment", *(f"attainment_{name}" for name in SABER_CLASSES)),
        ("slo_attainment",),
        means=lambda samples: summarize((*_cdf(samples), *samples)),
        quick_seeds=QUICK_SEEDS,
        metrics=("done", *_METRICS),
    ),
    Study(
        "saber-fig6",
        "mean and deviation of completion time over SLA, by load",
        f"{SOURCE}, Fig. 6",
        (schedulers.FORESIGHT, SABER, *_CAP_ARMS),
        _over_load,
        no_targets,
        _plot_steadiness,
        (*_OVER_SLA, "cv_completion_over_sla"),
        ("completion_over_sla_mean", "cv_completion_over_sla"),
        quick_seeds=QUICK_SEEDS,
        metrics=_METRICS,
    ),
    Study(
        "saber-fig7",
        "SABER with a line, a logistic curve and the USL for the speed",
        f"{SOURCE}, Fig. 7",
        (schedulers.FORESIGHT, *(_estimator(c) for c in CURVES), *_CAP_ARMS),
        _estimators,
        no_targets,
        _plot_attainment,
        ("slo_attainment", "goodput_per_s"),
        ("slo_attainment",),
        quick_seeds=QUICK_SEEDS,
        metrics=_METRICS,
    ),
)
