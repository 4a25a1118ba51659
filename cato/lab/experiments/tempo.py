"""Tempo: mixed objectives in overload. Attainment and service gain by scheduler.

One replica with chunked prefill serves streams, calls with a deadline and collective tasks, 3 : 1 :
1, above its capacity, with assumed lengths and with those of the paper's Table 2. The ablation, on
assumed lengths, removes Tempo's parts one by one; a share of its tasks has no SLO, and must not
starve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from math import inf, nan
from pathlib import Path

import numpy as np

from cato.lab.experiments.common import paired_target
from cato.lab.experiments.tempo_variants import (
    DENSITY,
    PARTS,
    POOL,
    SCHEDULERS,
    TEMPO,
    TOLD,
    Variant,
    ran,
)
from cato.lab.study import Study, Trial, no_targets
from cato.policies import schedulers
from cato.sim import plots
from cato.sim.experiment import Options
from cato.sim.metrics import NAMES, metrics_of
from cato.sim.report import Mean, Report, Sample, Setting, Target
from cato.sim.tasks import Outcome, service_gain
from cato.sim.tempo_workload import ASSUMED, TEMPO_LENGTHS, TEMPO_SHARES, tempo_tasks

GROUP = 6
LOADS = (0.9, 1.05, 1.15, 1.3)
PROMISED_FROM = 1.05
"""Targets apply from this load on: below it every sensible policy meets nearly everything."""
COUNT = 3000
"""Tasks per run, 9 to 13 minutes of arrivals: starvation in overload shows within minutes."""
WITHOUT_SLO = 0.1
ABLATION_LOAD = 1.3
ABLATION_COUNT = 1500
QUICK_COUNT = 750
"""Tasks per run of either experiment, when quick."""
PATIENCE_S = 120.0
"""Work without an SLO counts as starved when it takes longer."""

COMPARED = ("slo_attainment", "service_gain", "tokens_per_s")
# Metrics of every run, and of work without an SLO.
OF_CLASSES = (*(f"attainment_{name}" for name in TEMPO_SHARES), "gain_share")
UNBOUND = ("unbound_e2e_s_mean", "unbound_e2e_s_max", "unbound_within_patience")
HEADLINES = ("slo_attainment",)


def _measured(
    variants: Mapping[str, Variant],
    load: float,
    without_slo: float,
    count: int,
    lengths: str,
    name: str,
    seed: int,
) -> dict[str, float]:
    tasks = tempo_tasks(load, count, seed, POOL, without_slo, length=lengths)
    fleet, outcomes = ran(variants[name], tasks)
    return metrics_of(fleet, outcomes) | class_metrics(outcomes)


def class_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Metrics by class, share of the possible gain, and work without an SLO; times in seconds."""
    shares = []
    for name in TEMPO_SHARES:
        mine = [o for o in outcomes if o.task.name == name]
        shares.append(sum(o.is_met for o in mine) / len(mine) if mine else nan)
    metrics = dict(zip(OF_CLASSES, (*shares, gain_share(outcomes)), strict=True))
    unbound = [o for o in outcomes if o.task.target_s == inf]
    if unbound:
        e2e_s = [o.e2e_s if o.is_finished else inf for o in unbound]
        patient = np.mean([s <= PATIENCE_S for s in e2e_s])
        values = (float(np.mean(e2e_s)), float(np.max(e2e_s)), float(patient))
        metrics |= zip(UNBOUND, values, strict=True)
    return metrics


def gain_share(outcomes: Sequence[Outcome], a: float = 1.0) -> float:
    """Service gain with decay `a`, as a fraction of the gain if all tasks were in time."""
    most = sum(w * t for o in outcomes for w, t in _tokens(o))
    return sum(service_gain(o, a=a) for o in outcomes) / most if most else nan


def _tokens(outcome: Outcome) -> tuple[tuple[float, int], ...]:
    """Weights and tokens: a task's gain if everything came in time."""
    nodes = outcome.task.nodes
    return (
        (DENSITY.w_in, sum(n.prompt_tokens for n in nodes)),
        (DENSITY.w_out, sum(n.output_tokens for n in nodes)),
    )


def _count(options: Options, usual: int) -> int:
    return min(usual, QUICK_COUNT) if options.quick else usual


def _loads(options: Options) -> list[Trial]:
    count = _count(options, COUNT)
    return [
        Trial(_setting(load, lengths), partial(_measured, SCHEDULERS, load, 0.0, count, lengths))
        for lengths in TEMPO_LENGTHS
        for load in LOADS
    ]


def _setting(load: float, lengths: str) -> Setting:
    return {"load": load, "without_slo": 0.0, "lengths": lengths}


def _shares(options: Options) -> list[Trial]:
    """With and without tasks that have no SLO."""
    count = _count(options, ABLATION_COUNT)
    return [
        Trial(
            {"load": ABLATION_LOAD, "without_slo": share},
            partial(_measured, PARTS, ABLATION_LOAD, share, count, ASSUMED),
        )
        for share in (0.0, WITHOUT_SLO)
    ]


_Metrics = Mapping[str, float]


def _points(mine: _Metrics, other: _Metrics) -> float:
    return 100 * (mine["slo_attainment"] - other["slo_attainment"])


def _gains(mine: _Metrics, other: _Metrics) -> float:
    return mine["service_gain"] / other["service_gain"]


def _speeds(mine: _Metrics, other: _Metrics) -> float:
    return mine["tokens_per_s"] / other["tokens_per_s"]


# Baseline, comparison, target value, and its description.
_PROMISES: tuple[tuple[str, Callable[[_Metrics, _Metrics], float], float, str], ...] = (
    ("plas", _points, 5.0, "attainment above plas, points"),
    ("sjf", _points, 8.0, "attainment above sjf, points"),
    ("plas", _gains, 1.4, "gain over that of plas"),
    (TEMPO, _points, 3.0, "attainment above tempo, points"),
    (TOLD, _gains, 0.95, "gain over that of foresight with known lengths"),
    ("fcfs", _speeds, 0.96, "tokens per second over those of fcfs"),
)


def _targets(samples: Sequence[Sample]) -> list[Target]:
    """Every target at every load from `PROMISED_FROM` on, paired by seed."""
    found = []
    loads = [load for load in LOADS if load >= PROMISED_FROM]
    for lengths, (baseline, value, goal, words), load in product(TEMPO_LENGTHS, _PROMISES, loads):
        setting = _setting(load, lengths)
        ours, theirs = (schedulers.FORESIGHT, setting), (baseline, setting)
        text = f"foresight: {words}, load {load}, lengths {lengths}"
        found += paired_target(GROUP, text, goal, samples, ours, theirs, value)
    return found


def plot_e2e(report: Report, folder: Path) -> Sequence[Path]:
    """Attainment, gain and throughput over load; attainment by class."""
    paths: list[Path] = []
    for lengths in TEMPO_LENGTHS:
        means = [m for m in report.means if m.setting["lengths"] == lengths]
        end = "" if lengths == ASSUMED else f"-{lengths}"
        paths += _plot_lengths(means, end, folder)
    return paths


def _plot_lengths(means: Sequence[Mean], end: str, folder: Path) -> Sequence[Path]:
    fig, axes = plots.figure(3)
    for ax, (metric, label, scale) in zip(
        axes,
        (
            ("slo_attainment", "SLO attainment (%)", 100.0),
            ("gain_share", "service gain (% of the maximum)", 100.0),
            ("tokens_per_s", "output tokens per second", 1.0),
        ),
        strict=True,
    ):
        plots.lines(ax, [m for m in means if m.metric == metric], "load", label, scale)
    plots.legend(fig)
    overview = plots.save(fig, folder, f"tempo-e2e{end}")
    fig, axes = plots.figure(len(TEMPO_SHARES))
    for ax, name in zip(axes, TEMPO_SHARES, strict=True):
        mine = [m for m in means if m.metric == f"attainment_{name}"]
        plots.lines(ax, mine, "load", "SLO attainment (%)", 100.0)
        ax.set_title(name)
        ax.set_ylim(-2, 102)
    plots.legend(fig)
    return (overview, plots.save(fig, folder, f"tempo-e2e-classes{end}"))


def plot_ablation(report: Report, folder: Path) -> Sequence[Path]:
    """The value of each part, and the latency of work without an SLO."""
    fig, axes = plots.figure(2, 2)
    for ax, (metric, share, label, scale) in zip(
        axes,
        (
            ("slo_attainment", 0.0, "SLO attainment (%)", 100.0),
            ("gain_share", 0.0, "service gain (% of the maximum)", 100.0),
            ("preempted", 0.0, "preemptions a run", 1.0),
            ("unbound_e2e_s_mean", WITHOUT_SLO, "mean E2E latency without an SLO (s)", 1.0),
        ),
        strict=True,
    ):
        rows = [m for m in report.means if m.metric == metric and m.setting["without_slo"] == share]
        ax.barh(
            [m.policy for m in rows],
            [m.mean * scale for m in rows],
            xerr=[plots.margin(m) * scale for m in rows],
            capsize=2,
        )
        ax.invert_yaxis()
        ax.set_xlabel(label)
        ax.tick_params(axis="y", labelsize=7)
        ax.grid(alpha=0.3, axis="x")
        if metric == "preempted":
            ax.set_xscale("symlog", linthresh=10)
    return (plots.save(fig, folder, "tempo-ablation"),)


SOURCE = "Tempo: Application-aware LLM Serving with Mixed SLO Requirements (2025)"
STUDIES = (
    Study(
        "tempo-e2e",
        "Mixed objectives in overload: attainment and service gain by scheduler and load",
        f"{SOURCE}, evaluation",
        tuple(SCHEDULERS),
        _loads,
        _targets,
        plot_e2e,
        HEADLINES,
        COMPARED,
        extra=lambda options, samples: {"tasks_per_run": _count(options, COUNT)},
        called="scheduler",
        metrics=(*NAMES, *OF_CLASSES),
    ),
    Study(
        "tempo-ablation",
        "The value of each part of Tempo",
        f"{SOURCE}, ablation",
        tuple(PARTS),
        _shares,
        no_targets,
        plot_ablation,
        HEADLINES,
        (*COMPARED, "preempted"),
        extra=lambda options, samples: {
            "tasks_per_run": _count(options, ABLATION_COUNT),
            "patience_s": PATIENCE_S,
        },
        reference=TEMPO,
        called="scheduler",
        metrics=(*NAMES, *OF_CLASSES, *UNBOUND),
    ),
)
