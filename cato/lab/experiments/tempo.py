"""Tempo: mixed objectives in overload. Attainment and service gain by scheduler.

One replica with chunked prefill serves streams, calls with a deadline and collective tasks, 3 : 1 :
1, above its capacity. The ablation removes Tempo's parts one by one; a share of its tasks has no
SLO, and must not starve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan
from pathlib import Path

import numpy as np

from cato.core.errors import UnknownNameError
from cato.core.ids import PoolName
from cato.core.policies import Policies
from cato.lab.experiments import printed
from cato.policies import schedulers
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.ordering.tempo import GainDensity
from cato.policies.preemption.tempo import TempoPreemption
from cato.sim import plots
from cato.sim.experiment import Experiment, Options, Progress, run_all
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.metrics import metrics_of
from cato.sim.report import Report, Sample, Target, compare, mean_and_stderr, summarize
from cato.sim.tasks import Outcome, SimTask, service_gain
from cato.sim.workloads import (
    TEMPO_CALL,
    TEMPO_CHUNK_TOKENS,
    TEMPO_ENGINE,
    TEMPO_SHARES,
    tempo_tasks,
    with_known_lengths,
)

GROUP = 6
POOL = PoolName("tempo")
LOADS = (0.9, 1.05, 1.15, 1.3)
PROMISED_FROM = 1.05
"""Targets apply from this load on: below it every sensible policy meets nearly everything."""
COUNT = 3000
"""Tasks per run, 9 to 13 minutes of arrivals: starvation in overload shows within minutes."""
QUANTUM_TOKENS = 20
WITHOUT_SLO = 0.1
ABLATION_LOAD = 1.3
ABLATION_COUNT = 1500
QUICK_COUNT = 750
"""Tasks per run of either experiment, when quick."""
PATIENCE_S = 120.0
"""Work without an SLO counts as starved when it takes longer."""

COMPARED = ("slo_attainment", "service_gain", "tokens_per_s")
HEADLINES = ("slo_attainment",)
TOLD = "foresight, told lengths"
DENSITY = GainDensity(TEMPO_ENGINE)
TEMPO, JITSERVE = "tempo", "jitserve"


@dataclass(frozen=True, slots=True)
class Variant:
    """A scheduler, its view of the tasks, and after how many steps it may preempt.

    `chunk_tokens` None: the engine takes prompts whole, and no token comes meanwhile.
    """

    policies: Callable[[], Policies]
    shown: Callable[[Sequence[SimTask]], Sequence[SimTask]] = list
    report_steps: int = QUANTUM_TOKENS
    chunk_tokens: int | None = TEMPO_CHUNK_TOKENS


def without_stages(tasks: Sequence[SimTask]) -> list[SimTask]:
    """No graph matching: a call of any stage has the time to the task's own deadline."""
    return [replace(t, nodes=tuple(replace(n, downstream_s=0.0) for n in t.nodes)) for t in tasks]


def without_lengths(tasks: Sequence[SimTask]) -> list[SimTask]:
    """No length prediction: every call is expected to have the mean length."""
    mean = TEMPO_CALL[1]
    return [
        replace(t, nodes=tuple(replace(n, length=None, expected_tokens=mean) for n in t.nodes))
        for t in tasks
    ]


def _tempo(density: GainDensity = DENSITY) -> Policies:
    return schedulers.tempo(density)


def _foresight() -> Policies:
    """Tempo counts the gain and tokens of late work too, so its users never leave."""
    return replace(schedulers.foresight(), patience_s=inf)


def _plas() -> Policies:
    return schedulers.plas(TEMPO_ENGINE)


def _fcfs() -> Policies:
    return schedulers.in_order(FirstComeFirstServed())


def _opponent(name: str) -> Policies:
    return replace(schedulers.OF_PROFILE[name](TEMPO_ENGINE, 0), patience_s=inf)


def _jitserve(frame_s: float = 1.0, group: float = 1.25) -> Policies:
    return schedulers.jitserve(TEMPO_ENGINE, frame_s, group)


SCHEDULERS: Mapping[str, Variant] = {
    schedulers.FORESIGHT: Variant(_foresight),
    TOLD: Variant(_foresight, shown=with_known_lengths),
    TEMPO: Variant(_tempo),
    JITSERVE: Variant(_jitserve),
    "plas": Variant(_plas),
    "sjf": Variant(schedulers.sjf),
    "edf": Variant(schedulers.edf),
    **{name: Variant(partial(_opponent, name)) for name in printed.OPPONENTS},
    "fcfs": Variant(_fcfs),
    "fcfs, prompts whole": Variant(_fcfs, chunk_tokens=None),
}
"""The paper's baselines: vLLM is `fcfs` with whole prompts, Sarathi-Serve `fcfs`, Autellix
`plas`, Tempo (SJF) `sjf`; Tempo-Precise is `told lengths` of the ablation."""

PARTS: Mapping[str, Variant] = {
    TEMPO: Variant(_tempo),
    "over the time budget": Variant(lambda: _tempo(replace(DENSITY, over_budget=True))),
    "no quantum": Variant(
        lambda: replace(_tempo(), preemption=TempoPreemption(DENSITY, quantum_tokens=1)),
        report_steps=1,
    ),
    "no quantum, loss not counted": Variant(
        lambda: replace(
            _tempo(), preemption=TempoPreemption(DENSITY, quantum_tokens=1, counts_loss=False)
        ),
        report_steps=1,
    ),
    "loss not counted": Variant(
        lambda: replace(_tempo(), preemption=TempoPreemption(DENSITY, counts_loss=False))
    ),
    "no preemption": Variant(lambda: replace(_tempo(), preemption=None)),
    "no reserve": Variant(lambda: schedulers.tempo(DENSITY, reserve=0.0)),
    "no fairness": Variant(lambda: schedulers.tempo(DENSITY, fairness=0.0)),
    "bounds not refined": Variant(lambda: _tempo(replace(DENSITY, is_refined=False))),
    "medians for bounds": Variant(lambda: _tempo(replace(DENSITY, level=0.5))),
    "told lengths": Variant(_tempo, shown=with_known_lengths),
    "no graph matching": Variant(_tempo, shown=without_stages),
    "no predicted lengths": Variant(_tempo, shown=without_lengths),
    "fcfs": Variant(_fcfs),
    JITSERVE: Variant(_jitserve),
    "jitserve, nothing waits for its time": Variant(partial(_jitserve, frame_s=inf)),
    "jitserve, no groups": Variant(partial(_jitserve, group=1.0)),
    "jitserve, no preemption": Variant(lambda: replace(_jitserve(), preemption=None)),
    "jitserve, told lengths": Variant(_jitserve, shown=with_known_lengths),
    schedulers.FORESIGHT: Variant(_foresight),
}
"""Tempo, Tempo without one of its parts, its successor likewise, and the default. All collective
tasks have the same stages, so that graphs are matched without error."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One seed of one setting; `names` are keys of `SCHEDULERS` or, in the ablation, of `PARTS`."""

    load: float
    without_slo: float
    count: int
    seed: int
    names: tuple[str, ...]
    is_ablation: bool


def _run(job: _Job) -> list[Sample]:
    variants = PARTS if job.is_ablation else SCHEDULERS
    setting: dict[str, str | float] = {"load": job.load, "without_slo": job.without_slo}
    tasks = tempo_tasks(job.load, job.count, job.seed, POOL, job.without_slo)
    samples = []
    for name in job.names:
        fleet, outcomes = ran(variants[name], tasks)
        metrics = metrics_of(fleet, outcomes) | class_metrics(outcomes)
        samples.append(Sample(setting, name, job.seed, metrics))
    return samples


def ran(variant: Variant, tasks: Sequence[SimTask]) -> tuple[Fleet, Sequence[Outcome]]:
    """Run the tasks on a fresh replica, to the end."""
    setup = PoolSetup(
        POOL,
        (TEMPO_ENGINE,),
        variant.policies(),
        chunk_tokens=variant.chunk_tokens,
        report_steps=variant.report_steps,
    )
    fleet = Fleet([setup])
    return fleet, fleet.run(variant.shown(tasks))


def class_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Metrics by class, share of the possible gain, and work without an SLO; times in seconds."""
    metrics: dict[str, float] = {}
    for name in TEMPO_SHARES:
        mine = [o for o in outcomes if o.task.name == name]
        metrics[f"attainment_{name}"] = sum(o.is_met for o in mine) / len(mine) if mine else nan
    metrics["gain_share"] = gain_share(outcomes)
    unbound = [o for o in outcomes if o.task.target_s == inf]
    if unbound:
        e2e_s = [o.e2e_s if o.is_finished else inf for o in unbound]
        metrics["unbound_e2e_s_mean"] = float(np.mean(e2e_s))
        metrics["unbound_e2e_s_max"] = float(np.max(e2e_s))
        metrics["unbound_within_patience"] = float(np.mean([s <= PATIENCE_S for s in e2e_s]))
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


def _chosen(options: Options, known: Mapping[str, Variant]) -> tuple[str, ...]:
    for name in options.policies:
        if name not in known:
            raise UnknownNameError("scheduler", name, tuple(known))
    return options.policies or tuple(known)


def run_e2e(options: Options, progress: Progress, count: int = COUNT) -> Report:
    """Schedulers over load; raise `UnknownNameError` for an unknown one."""
    names = _chosen(options, SCHEDULERS)
    count = min(count, QUICK_COUNT) if options.quick else count
    jobs = [_Job(load, 0.0, count, seed, names, False) for load in LOADS for seed in options.seeds]
    samples = [s for part in run_all(_run, jobs, progress, options.jobs) for s in part]
    return Report(
        "tempo-e2e",
        options.seeds,
        summarize(samples),
        compare(samples, schedulers.FORESIGHT, COMPARED),
        _targets(samples),
        {"tasks_per_run": count},
    )


def run_ablation(options: Options, progress: Progress, count: int = ABLATION_COUNT) -> Report:
    """Tempo's parts, one by one, with and without tasks that have no SLO.

    Raise `UnknownNameError` for an unknown variant.
    """
    names = _chosen(options, PARTS)
    count = min(count, QUICK_COUNT) if options.quick else count
    jobs = [
        _Job(ABLATION_LOAD, share, count, seed, names, True)
        for share in (0.0, WITHOUT_SLO)
        for seed in options.seeds
    ]
    samples = [s for part in run_all(_run, jobs, progress, options.jobs) for s in part]
    return Report(
        "tempo-ablation",
        options.seeds,
        summarize(samples),
        compare(samples, TEMPO, (*COMPARED, "preempted")),
        extra={"tasks_per_run": count, "patience_s": PATIENCE_S},
    )


def _points(mine: float, other: float) -> float:
    return 100 * (mine - other)


def _ratio(mine: float, other: float) -> float:
    return mine / other


# Baseline, metric, comparison, target value, and its description.
_PROMISES: tuple[tuple[str, str, Callable[[float, float], float], float, str], ...] = (
    ("plas", "slo_attainment", _points, 5.0, "attainment above plas, points"),
    ("sjf", "slo_attainment", _points, 8.0, "attainment above sjf, points"),
    ("plas", "service_gain", _ratio, 1.4, "gain over that of plas"),
    (TEMPO, "slo_attainment", _points, 3.0, "attainment above tempo, points"),
    (TOLD, "service_gain", _ratio, 0.95, "gain over that of foresight with known lengths"),
    ("fcfs", "tokens_per_s", _ratio, 0.96, "tokens per second over those of fcfs"),
)


def _targets(samples: Sequence[Sample]) -> tuple[Target, ...]:
    """Every target at every load from `PROMISED_FROM` on, paired by seed."""
    runs = {(float(s.setting["load"]), s.seed, s.policy): s.metrics for s in samples}
    found = []
    for baseline, metric, compared, goal, words in _PROMISES:
        for load in LOADS:
            values = [
                compared(metrics[metric], runs[at, seed, baseline][metric])
                for (at, seed, policy), metrics in runs.items()
                if at == load
                and policy == schedulers.FORESIGHT
                and (at, seed, baseline) in runs
                and load >= PROMISED_FROM
            ]
            if values:
                text = f"foresight: {words}, load {load}"
                found.append(Target(GROUP, text, goal, *mean_and_stderr(values)))
    return tuple(found)


def plot_e2e(report: Report, folder: Path) -> Sequence[Path]:
    """Attainment, gain and throughput over load; attainment by class."""
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
        plots.lines(ax, [m for m in report.means if m.metric == metric], "load", label, scale)
    plots.legend(fig)
    overview = plots.save(fig, folder, "tempo-e2e")
    fig, axes = plots.figure(len(TEMPO_SHARES))
    for ax, name in zip(axes, TEMPO_SHARES, strict=True):
        mine = [m for m in report.means if m.metric == f"attainment_{name}"]
        plots.lines(ax, mine, "load", "SLO attainment (%)", 100.0)
        ax.set_title(name)
        ax.set_ylim(-2, 102)
    plots.legend(fig)
    return (overview, plots.save(fig, folder, "tempo-e2e-classes"))


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
            xerr=[1.96 * m.stderr * scale for m in rows],
            capsize=2,
        )
        ax.invert_yaxis()
        ax.set_xlabel(label)
        ax.tick_params(axis="y", labelsize=7)
        ax.grid(alpha=0.3, axis="x")
        if metric == "preempted":
            ax.set_xscale("symlog", linthresh=10)
    return (plots.save(fig, folder, "tempo-ablation"),)


E2E = Experiment(
    name="tempo-e2e",
    title="Mixed objectives in overload: attainment and service gain by scheduler and load",
    source="Tempo: Application-aware LLM Serving with Mixed SLO Requirements (2025), evaluation",
    run=run_e2e,
    plot=plot_e2e,
    headlines=HEADLINES,
)
ABLATION = Experiment(
    name="tempo-ablation",
    title="The value of each part of Tempo",
    source="Tempo: Application-aware LLM Serving with Mixed SLO Requirements (2025), ablation",
    run=run_ablation,
    plot=plot_ablation,
    headlines=HEADLINES,
)
EXPERIMENTS = (E2E, ABLATION)
