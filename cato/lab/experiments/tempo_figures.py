"""Tempo's figures besides its end-to-end table: types, decay, SLO scale, mixes, bursts.

Same engine, tasks and schedulers as `tempo-e2e`, whose loads are Fig. 13, and `tempo-ablation`,
which is Fig. 15. Loads, scales and mixes that the paper shows only in images are our choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from cato.lab.experiments import printed
from cato.lab.experiments.tempo import OF_CLASSES, SOURCE, class_metrics, gain_share
from cato.lab.experiments.tempo_variants import (
    DENSITY,
    JITSERVE,
    POOL,
    SCHEDULERS,
    TEMPO,
    Variant,
    ran,
)
from cato.lab.study import Study, Trial, no_targets
from cato.policies import schedulers
from cato.sim import plots
from cato.sim.experiment import Options
from cato.sim.metrics import NAMES, metrics_of
from cato.sim.report import Report
from cato.sim.tasks import Outcome, SimTask
from cato.sim.tempo_workload import TEMPO_SHARES, tempo_rate_per_s, tempo_tasks
from cato.sim.traces import load_trace
from cato.sim.workloads import ARRIVALS, Arrivals, poisson

COUNT, QUICK_COUNT, QUICK_SEEDS = 3000, 1000, 3
LOAD = 1.05
LEVELS = (50, 95)  # percentiles by type
DECAYS = (0.5, 1.0, 2.0, 4.0, 8.0)
SLO_SCALES = (0.75, 1.0, 1.5, 2.0, 3.0)
BURST_LOADS = (0.7, 0.9, 1.05)
FCFS = "fcfs"
ARMS = (
    schedulers.FORESIGHT,
    TEMPO,
    JITSERVE,
    "plas",
    "sjf",
    *printed.OPPONENTS,
    FCFS,
    "fcfs, prompts whole",
)
FEW_ARMS = (schedulers.FORESIGHT, TEMPO, JITSERVE, "plas", "edf-bounded", FCFS)
MIXES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "3:1:1": TEMPO_SHARES,
        "1:1:1": {"latency": 1 / 3, "throughput": 1 / 3, "collective": 1 / 3},
        "1:3:1": {"latency": 0.2, "throughput": 0.6, "collective": 0.2},
        "1:1:3": {"latency": 0.2, "throughput": 0.2, "collective": 0.6},
        "streams": {"latency": 1.0, "throughput": 0.0, "collective": 0.0},
        "throughput": {"latency": 0.0, "throughput": 1.0, "collective": 0.0},
        "collective": {"latency": 0.0, "throughput": 0.0, "collective": 1.0},
    }
)


@dataclass(frozen=True)
class Traffic:
    """The tasks of a trial; `decay` of the gain, in the metric and in the schedulers' density."""

    load: float
    count: int
    mix: str = "3:1:1"
    slo_scale: float = 1.0
    decay: float = 1.0
    arrivals: Arrivals = field(default=poisson)


@lru_cache(maxsize=4)
def tasks_of(traffic: Traffic, seed: int) -> Sequence[SimTask]:
    """The tasks of a seed, the same for every arm."""
    tasks = tempo_tasks(
        traffic.load,
        traffic.count,
        seed,
        POOL,
        shares=MIXES[traffic.mix],
        arrivals=traffic.arrivals,
    )
    scale = traffic.slo_scale
    return [
        replace(t, target_s=scale * t.target_s, tpot_target_s=scale * t.tpot_target_s)
        for t in tasks
    ]


def variant_of(arm: str, decay: float) -> Variant:
    """The variant of `tempo-e2e`; Tempo uses the decay by which it is judged."""
    if arm == TEMPO and decay != 1.0:
        return Variant(partial(schedulers.tempo, replace(DENSITY, a=decay)))
    return SCHEDULERS[arm]


def _measured(traffic: Traffic, arm: str, seed: int) -> dict[str, float]:
    fleet, outcomes = ran(variant_of(arm, traffic.decay), tasks_of(traffic, seed))
    metrics = metrics_of(fleet, outcomes) | class_metrics(outcomes)
    return metrics | {"gain_share": gain_share(outcomes, traffic.decay)} | _by_type(outcomes)


def _by_type(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Medians and tails of the judged latency of each type; seconds."""
    found: dict[str, float] = {}
    for name in TEMPO_SHARES:
        mine = [o for o in outcomes if o.task.name == name]
        for metric in _judged(name) if mine else ():
            values = [getattr(o, metric) for o in mine]
            for level in LEVELS:
                found[f"{metric}_p{level}_{name}"] = float(np.percentile(values, level))
    return found


def _judged(name: str) -> tuple[str, ...]:
    return ("ttft_s", "tpot_s") if name == "latency" else ("e2e_s",)


METRICS = (
    *NAMES,
    *OF_CLASSES,
    *(f"{m}_p{level}_{name}" for name in TEMPO_SHARES for m in _judged(name) for level in LEVELS),
)


def _count(options: Options) -> int:
    return QUICK_COUNT if options.quick else COUNT


def _trial(name: str, value: float | str, traffic: Traffic) -> Trial:
    return Trial({name: value}, partial(_measured, traffic))


def _types(options: Options) -> list[Trial]:
    return [_trial("load", LOAD, Traffic(LOAD, _count(options)))]


def _decays(options: Options) -> list[Trial]:
    return [_trial("decay", a, Traffic(LOAD, _count(options), decay=a)) for a in DECAYS]


def _scales(options: Options) -> list[Trial]:
    return [_trial("slo_scale", x, Traffic(LOAD, _count(options), slo_scale=x)) for x in SLO_SCALES]


def _mixes(options: Options) -> list[Trial]:
    """Collective tasks are nine calls: a run of them alone has a ninth of the tasks."""
    return [_trial("mix", name, Traffic(LOAD, _calls(options, name), name)) for name in MIXES]


def _calls(options: Options, mix: str) -> int:
    """Number of tasks that gives about the same number of calls in every mix."""
    return round(_count(options) * tempo_rate_per_s(1, MIXES[mix]) / tempo_rate_per_s(1))


def _bursts(options: Options) -> list[Trial]:
    """Generated arrivals, and those of `--trace`, all with the load's mean rate."""
    kinds: dict[str, Arrivals] = dict(ARRIVALS)
    if options.trace is not None:
        kinds["trace"] = partial(recorded, options.needed("trace"))
    return [
        Trial(
            {"arrivals": name, "load": load},
            partial(_measured, Traffic(load, _count(options), arrivals=arrivals)),
        )
        for name, arrivals in kinds.items()
        for load in BURST_LOADS
    ]


_loaded = lru_cache(maxsize=1)(load_trace)


def recorded(path: Path, rng: np.random.Generator, rate_per_s: float, n: int) -> list[float]:
    """`n` arrivals of a trace from a random row on, wrapping around, at that mean rate."""
    at_s = np.array([r.arrived_at_s for r in _loaded(path)])
    gaps_s = np.diff(at_s, append=at_s[-1] + at_s[-1] / len(at_s))
    chosen_s = np.resize(np.roll(gaps_s, -int(rng.integers(len(gaps_s)))), n)
    scale = n / rate_per_s / max(float(chosen_s.sum()), 1e-9)
    return [float(t) for t in np.cumsum(chosen_s * scale)]


# Plots


def _plot_types(report: Report, folder: Path) -> list[Path]:
    fig, axes = plots.figure(2, 2)
    metrics = ("ttft_s", "tpot_s", "e2e_s", "e2e_s")
    names = ("latency", "latency", "throughput", "collective")
    for ax, metric, name in zip(axes, metrics, names, strict=True):
        means = [
            replace(m, setting={"level": m.metric.split("_")[2].upper()})
            for m in report.means
            if m.metric in (f"{metric}_p50_{name}", f"{metric}_p95_{name}")
        ]
        plots.bars(ax, means, ("P50", "P95"), "level", f"{metric.removesuffix('_s').upper()} (s)")
        ax.set_title(name)
        ax.set_yscale("log")
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


def plot_lines(x: str, report: Report, folder: Path) -> list[Path]:
    """Gain and attainment over `x`, and attainment by type."""
    shown = (
        ("gain_share", "service gain (% of the maximum)"),
        ("slo_attainment", "SLO attainment (%)"),
        *((f"attainment_{k}", f"attainment, {k} (%)") for k in TEMPO_SHARES),
    )
    known = {m.metric for m in report.means if x in m.setting}
    shown = tuple(s for s in shown if s[0] in known)
    fig, axes = plots.figure(len(shown))
    for ax, (metric, label) in zip(axes, shown, strict=True):
        means = [m for m in report.means if m.metric == metric and x in m.setting]
        plots.lines(ax, means, x, label, 100.0)
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


def _plot_bars(by: str, report: Report, folder: Path) -> list[Path]:
    """Gain and attainment by kind of traffic, one column per load."""
    loads = list(dict.fromkeys(m.setting.get("load", LOAD) for m in report.means))
    fig, axes = plots.figure(len(loads), 2)
    shown = [(m, load) for m in ("gain_share", "slo_attainment") for load in loads]
    for ax, (metric, load) in zip(axes, shown, strict=True):
        means = [
            m
            for m in report.means
            if m.metric == metric and m.setting.get("load", LOAD) == load and m.mean == m.mean
        ]
        groups = list(dict.fromkeys(str(m.setting[by]) for m in means))
        plots.bars(ax, means, groups, by, metric.replace("_", " "))
        ax.set_title(f"load {load:g}")
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


def _figure(
    number: int,
    title: str,
    cells: Callable[[Options], Sequence[Trial]],
    plot: Callable[[Report, Path], Sequence[Path]],
) -> Study:
    return Study(
        f"tempo-fig{number}",
        title,
        f"{SOURCE}, Fig. {number}",
        ARMS,
        cells,
        no_targets,
        plot,
        ("slo_attainment", "gain_share"),
        ("gain_share", "slo_attainment"),
        quick_arms=FEW_ARMS,
        quick_seeds=QUICK_SEEDS,
        metrics=METRICS,
    )


STUDIES = (
    Study(
        "tempo-fig14",
        "medians and tails by type of request",
        f"{SOURCE}, Fig. 14",
        ARMS,
        _types,
        no_targets,
        _plot_types,
        ("ttft_s_p95_latency", "e2e_s_p50_throughput", "e2e_s_p50_collective"),
        quick_seeds=QUICK_SEEDS,
        metrics=METRICS,
    ),
    _figure(
        16,
        "how fast the gain of late tokens decays: a of min(1, (target/actual)^a)",
        _decays,
        partial(plot_lines, "decay"),
    ),
    _figure(
        17, "all SLOs tightened or relaxed by a factor", _scales, partial(plot_lines, "slo_scale")
    ),
    _figure(
        18,
        "other mixes of streams, throughput calls and collective tasks",
        _mixes,
        partial(_plot_bars, "mix"),
    ),
    _figure(
        19,
        "bursts: generated arrivals, and those of a BurstGPT or Azure trace (--trace)",
        _bursts,
        partial(_plot_bars, "arrivals"),
    ),
)
