"""Runs of a scenario on its fleet: with its scheduler, and with that of plain Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from cato.core.errors import UnknownNameError
from cato.core.topology import RAY_SERVE
from cato.policies import schedulers
from cato.sim import metrics, plots
from cato.sim.experiment import Experiment, Interrupted, Options, Progress, run_all
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.report import Report, Sample, compare, summarize
from cato.sim.scenario import Scenario, ScenarioPool
from cato.sim.scenario_tasks import tasks_of
from cato.sim.tasks import Outcome, SimTask, task_metrics

SCHEDULERS = schedulers.OF_PROFILE
BASELINE = RAY_SERVE
"""The scheduler to compare with: the rule of plain Ray Serve."""

EVERY_TASK = "all"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: metrics of all tasks and the fleet, and of the tasks of each class."""

    metrics: Mapping[str, float]
    by_class: Mapping[str, Mapping[str, float]]


def run_once(scenario: Scenario, scheduler: str, tasks: Sequence[SimTask]) -> Run:
    """`tasks` on the scenario's fleet; raise `UnknownNameError` for an unknown scheduler."""
    if scheduler not in SCHEDULERS:
        raise UnknownNameError("scheduler", scheduler, tuple(SCHEDULERS))
    fleet = Fleet([_setup(p, scheduler) for p in scenario.pools])
    for pool in scenario.pools:
        if pool.cold_start_s > 0:
            for _ in range(pool.replicas):
                fleet.pools[pool.name].start_replica(pool.profile)
    outcomes = fleet.run(tasks)
    by_class: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_class.setdefault(outcome.task.name, []).append(outcome)
    classes = {name: task_metrics(by_class[name]) for name in sorted(by_class)}
    return Run(metrics.metrics_of(fleet, outcomes), classes)


def _setup(pool: ScenarioPool, scheduler: str) -> PoolSetup:
    places = pool.max_running or pool.profile.max_running
    return PoolSetup(
        pool.name,
        () if pool.cold_start_s > 0 else (pool.profile,) * pool.replicas,
        SCHEDULERS[scheduler](pool.profile, places),
        pool.max_running,
        pool.chunk_tokens,
        cold_start_s=pool.cold_start_s,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    scenario: Scenario
    scheduler: str
    seed: int


def _samples(job: _Job) -> list[Sample]:
    run = run_once(job.scenario, job.scheduler, tasks_of(job.scenario, job.seed))
    groups = {EVERY_TASK: run.metrics, **run.by_class}
    return [Sample({"task": k}, job.scheduler, job.seed, m) for k, m in groups.items()]


def as_experiment(scenario: Scenario) -> Experiment:
    """`scenario` as `cato simulate` runs it: with its scheduler and with `BASELINE`."""

    def run(options: Options, progress: Progress) -> Report:
        names = options.policies or tuple(dict.fromkeys((scenario.scheduler, BASELINE)))
        for name in names:
            if name not in SCHEDULERS:
                raise UnknownNameError("scheduler", name, tuple(SCHEDULERS))
        jobs = [_Job(scenario, name, seed) for seed in options.seeds for name in names]
        extra: Mapping[str, object] = {}
        try:
            parts = run_all(_samples, jobs, progress, options.jobs)
        except Interrupted as stop:
            parts, extra = stop.whole([job.seed for job in jobs]), stop.told()
        samples = [s for part in parts for s in part]
        seeds = tuple(s for s in options.seeds if s in {x.seed for x in samples})
        compared = ("slo_attainment", "goodput_per_s", "ttft_s_mean", "e2e_s_p95")
        means, differences = summarize(samples), compare(samples, names[0], compared)
        return Report(scenario.name, seeds, means, differences, extra=extra)

    def plot(report: Report, folder: Path) -> tuple[Path, ...]:
        return (plots.save(_bars(report), folder, scenario.name),)

    title = f"{len(scenario.pools)} pools, {sum(p.replicas for p in scenario.pools)} replicas"
    return Experiment(scenario.name, title, "a scenario file", run, plot, metrics.NAMES)


def _bars(report: Report) -> Figure:
    """SLO attainment by class of tasks, one bar per scheduler."""
    fig, (axes,) = plots.figure()
    means = [m for m in report.means if m.metric == "slo_attainment"]
    groups = list(dict.fromkeys(str(m.setting["task"]) for m in means))
    plots.bars(axes, means, groups, "task", "SLO attainment [%]", scale=100.0)
    axes.set_ylim(0, 105)
    plots.legend(fig)
    return fig
