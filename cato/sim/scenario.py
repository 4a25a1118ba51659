"""Scenarios: a user's own fleet and traffic, run in virtual time. Takes values and returns metrics;
files are read in `cato.sim.scenario_file`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cato.core.budgets import longest_after
from cato.core.errors import UnknownNameError
from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.core.topology import RAY_SERVE
from cato.policies import schedulers
from cato.sim import plots
from cato.sim.experiment import Experiment, Options, Progress, run_all
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.metrics import metrics_of
from cato.sim.report import Report, Sample, compare, summarize
from cato.sim.tasks import Outcome, SimNode, SimTask, task_metrics
from cato.sim.traces import TraceRow
from cato.sim.workflow_tasks import WorkflowClass, drawn_task
from cato.sim.workloads import ARRIVALS, belief, lengths

SCHEDULERS = schedulers.OF_PROFILE
BASELINE = RAY_SERVE
"""The scheduler to compare with: the rule of plain Ray Serve."""

EVERY_TASK = "all"
_SEED_STREAM = 9  # distinct from the streams of `cato.sim.workloads`


@dataclass(frozen=True, slots=True)
class ScenarioPool:
    """A pool of equal replicas. `cold_start_s`: from the start of the run until they accept work;
    `max_replicas`: the largest number that a plan may use. `max_running` None: the profile's.
    """

    name: PoolName
    profile: Profile
    replicas: int
    max_replicas: int
    max_running: int | None = None
    chunk_tokens: int | None = None
    cold_start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScenarioCall:
    """An LLM call of a task class: mean tokens, deviation of their logarithms, and its probability.
    `needs` are indexes of earlier calls; when a call is skipped, its dependents inherit its
    needs. `before_s`: time between its needs and it that is not an LLM call.
    """

    pool: PoolName
    prompt_tokens: float
    output_tokens: float
    spread: float
    needs: tuple[int, ...] = ()
    before_s: float = 0.0
    chance: float = 1.0


@dataclass(frozen=True, slots=True)
class Sla:
    """`target_s` for TTFT or E2E, and a pace required of the last call's stream (inf: none)."""

    metric: SloMetric
    target_s: float
    tpot_target_s: float = inf


@dataclass(frozen=True, slots=True)
class TaskClass:
    """A class with `share` parts of all tasks; calls in topological order, the last is streamed."""

    name: TaskName
    share: float
    sla: Sla
    calls: tuple[ScenarioCall, ...]


@dataclass(frozen=True, slots=True)
class DrawnTraffic:
    """Tasks drawn from classes; `arrivals` is a name in `cato.sim.workloads.ARRIVALS`."""

    rate_per_s: float
    arrivals: str
    duration_s: float
    classes: tuple[TaskClass | WorkflowClass, ...]


@dataclass(frozen=True, slots=True)
class TraceClass:
    """Trace requests with at most `up_to_tokens` of output that no smaller class takes."""

    name: TaskName
    up_to_tokens: float
    sla: Sla


@dataclass(frozen=True, slots=True)
class TraceTraffic:
    """A recorded trace on one pool, replayed `speed` times as fast.

    The first half gives the length beliefs of each class and the second half is replayed, so that
    no policy knows an answer before it is given. `duration_s` ends the replay earlier.
    """

    rows: tuple[TraceRow, ...]
    pool: PoolName
    speed: float
    duration_s: float
    classes: tuple[TraceClass, ...]  # ascending; the last one takes all


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet, its traffic and its scheduler."""

    name: str
    scheduler: str
    seeds: tuple[int, ...]
    pools: tuple[ScenarioPool, ...]
    traffic: DrawnTraffic | TraceTraffic

    def with_replicas(self, counts: Mapping[PoolName, int]) -> Scenario:
        return replace(self, pools=tuple(replace(p, replicas=counts[p.name]) for p in self.pools))


# Traffic


def tasks_of(scenario: Scenario, seed: int) -> list[SimTask]:
    """The tasks of one seed; they do not depend on the numbers of replicas or the scheduler."""
    rng = np.random.default_rng([seed, _SEED_STREAM])
    traffic = scenario.traffic
    if isinstance(traffic, TraceTraffic):
        return _replayed(traffic, rng)
    profiles = {p.name: p.profile for p in scenario.pools}
    calls = (c for c in traffic.classes if isinstance(c, TaskClass))
    after_s = {c.name: _after_s(c, profiles) for c in calls}
    shares = np.array([c.share for c in traffic.classes])
    times = _times(traffic, seed)
    chosen = rng.choice(len(traffic.classes), len(times), p=shares / shares.sum())
    tasks: list[SimTask] = []
    for i, (at_s, k) in enumerate(zip(times, chosen, strict=True)):
        id, kind = f"t{i:06d}", traffic.classes[k]
        if isinstance(kind, WorkflowClass):
            tasks.append(drawn_task(id, kind, at_s, rng))
        else:
            tasks.append(_drawn(id, kind, at_s, after_s[kind.name], rng))
    return tasks


def _times(traffic: DrawnTraffic, seed: int) -> list[float]:
    """Arrivals up to the end; redrawn with twice as many when they do not reach it."""
    n = int(traffic.rate_per_s * traffic.duration_s * 1.2) + 30
    while True:
        rng = np.random.default_rng([seed, _SEED_STREAM, 1])
        times = ARRIVALS[traffic.arrivals](rng, traffic.rate_per_s, n)
        if times[-1] >= traffic.duration_s:
            return [t for t in times if t < traffic.duration_s]
        n *= 2


def _after_s(kind: TaskClass, profiles: Mapping[PoolName, Profile]) -> list[float]:
    """Expected time from the end of each call to the SLO event, every call alone on a replica."""
    order = [str(i) for i in range(len(kind.calls))]
    weights = {}
    for i, call in zip(order, kind.calls, strict=True):
        profile = profiles[call.pool]
        prompt, output = round(call.prompt_tokens), round(call.output_tokens)
        is_event = kind.sla.metric is SloMetric.TTFT and i == order[-1]
        own_s = profile.first_token_s(prompt) if is_event else profile.service_s(prompt, output)
        weights[i] = (call.before_s + own_s) * call.chance
    needs = {i: [str(n) for n in c.needs] for i, c in zip(order, kind.calls, strict=True)}
    after = longest_after(order, needs, weights)
    return [after[i] for i in order]


def _drawn(
    id: str, kind: TaskClass, at_s: float, after_s: Sequence[float], rng: np.random.Generator
) -> SimTask:
    nodes: list[SimNode] = []
    places: list[tuple[int, ...]] = []
    for call, downstream_s in zip(kind.calls, after_s, strict=True):
        # Drawn whether the call happens or not, so that the draws of other calls do not change.
        happens = rng.random() < call.chance
        prompt = int(lengths(rng, call.prompt_tokens, 1, call.spread)[0])
        output = int(lengths(rng, call.output_tokens, 1, call.spread)[0])
        needs = tuple(sorted({p for need in call.needs for p in places[need]}))
        if not happens:
            places.append(needs)
            continue
        places.append((len(nodes),))
        known = belief(call.output_tokens, call.spread)
        nodes.append(
            SimNode(
                call.pool,
                prompt,
                output,
                round(known.mean),
                known,
                needs,
                call.before_s,
                downstream_s,
            )
        )
    draws = tuple(float(d) for d in rng.random(len(nodes)))
    sla = kind.sla
    return SimTask(
        id, kind.name, at_s, sla.metric, sla.target_s, tuple(nodes), draws, sla.tpot_target_s
    )


def _replayed(traffic: TraceTraffic, rng: np.random.Generator) -> list[SimTask]:
    half = len(traffic.rows) // 2
    learned, rows = traffic.rows[:half], traffic.rows[half:]
    known = {
        c.name: LengthBelief.of(
            [float(r.output_tokens) for r in learned if _class_of(traffic, r) is c]
            or [float(r.output_tokens) for r in learned]
        )
        for c in traffic.classes
    }
    tasks = []
    for i, row in enumerate(rows):
        at_s = (row.arrived_at_s - rows[0].arrived_at_s) / traffic.speed
        if at_s >= traffic.duration_s:
            break
        kind = _class_of(traffic, row)
        length = known[kind.name]
        node = SimNode(
            traffic.pool,
            max(1, row.prompt_tokens),
            row.output_tokens,
            max(1, round(length.mean)),
            length,
        )
        sla = kind.sla
        tasks.append(
            SimTask(
                f"t{i:06d}",
                kind.name,
                at_s,
                sla.metric,
                sla.target_s,
                (node,),
                (float(rng.random()),),
                sla.tpot_target_s,
            )
        )
    return tasks


def _class_of(traffic: TraceTraffic, row: TraceRow) -> TraceClass:
    return next(c for c in traffic.classes if row.output_tokens <= c.up_to_tokens)


# Runs


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
    return Run(metrics_of(fleet, outcomes), classes)


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
        samples = [s for part in run_all(_samples, jobs, progress, options.jobs) for s in part]
        metrics = ("slo_attainment", "goodput_per_s", "ttft_s_mean", "e2e_s_p95")
        return Report(
            scenario.name, options.seeds, summarize(samples), compare(samples, names[0], metrics)
        )

    def plot(report: Report, folder: Path) -> tuple[Path, ...]:
        return (plots.save(_bars(report), folder, scenario.name),)

    title = f"{len(scenario.pools)} pools, {sum(p.replicas for p in scenario.pools)} replicas"
    return Experiment(scenario.name, title, "a scenario file", run, plot)


def _bars(report: Report) -> Figure:
    """SLO attainment by class of tasks, one bar per scheduler."""
    fig, (axes,) = plots.figure()
    means = [m for m in report.means if m.metric == "slo_attainment"]
    groups = list(dict.fromkeys(str(m.setting["task"]) for m in means))
    policies = list(dict.fromkeys(m.policy for m in means))
    width = 0.8 / len(policies)
    for i, policy in enumerate(policies):
        mine = {str(m.setting["task"]): m for m in means if m.policy == policy}
        present = [g for g in groups if g in mine]
        axes.bar(
            [groups.index(g) + (i - (len(policies) - 1) / 2) * width for g in present],
            [100 * mine[g].mean for g in present],
            width,
            yerr=[196 * mine[g].stderr for g in present],
            label=policy,
            capsize=2,
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("SLO attainment [%]")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return fig
