"""CPU time of decisions in Python and compiled code: no engine, no Ray, one thread.

The router of a pool handles one event at a time, so the time of `PoolOrchestrator.handle` bounds
how many replicas one router can serve. Times are thread CPU time: otherwise other work on the
machine would dominate the 99th percentile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from random import Random
from time import thread_time_ns

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cato.core.commands import Command, Dispatch, Preempt
from cato.core.decision import Hold, Route
from cato.core.events import (
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    PoliciesChanged,
    ReplicaProgressed,
    ReplicaReported,
)
from cato.core.ids import DeploymentName, InvocationId, NodeId, PoolName, ReplicaId, RunId, TaskName
from cato.core.orchestrator import PoolOrchestrator
from cato.core.policies import Policies, RoutingPolicy
from cato.core.snapshot import Invocation, PoolSnapshot
from cato.estimators.dag_match import FROM_USER, DagHistory, SuperGraph, SuperNode
from cato.estimators.length_bound import LengthFeatures, LengthRecord
from cato.estimators.length_forest import ForestLengths
from cato.lab.bench import door
from cato.lab.bench.simulated import WORKLOADS, Speed, simulated_tasks, simulated_turns
from cato.lab.experiments import length_bounds, length_models
from cato.lab.experiments.slo_sa import calls_to_time
from cato.lab.intervals import summary
from cato.lab.study import as_experiment
from cato.policies import schedulers
from cato.policies.mapping.registry import MAPPERS
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.routing.round_robin import RoundRobin
from cato.sim.experiment import Options, silent
from cato.sim.report import Target, finite, mean_and_stderr
from cato.sim.workloads import SABER_CLASSES, SEVEN_B, belief

POOL = PoolName("bench")
SCHEDULERS: dict[str, Callable[[], Policies]] = {
    schedulers.FORESIGHT: schedulers.foresight,
    "cato": schedulers.cato,
    "power-of-two": lambda: schedulers.early("power-of-two"),
}
REPLICAS = (10, 100, 1000)
BATCHES = (1, 16)
QUEUED = 10_000
# Timed events of each kind. Percentiles of a few hundred vary by a few percent.
EVENTS = 300
WARM_UP = 20

OFFERED_FULL = "offered, all full"
ENDED = "ended, a place frees"
OFFERED_ROOM = "offered, half loaded"
PROGRESSED = "progress of a replica"

# Goals at the median, in microseconds; the first is for the default scheduler at 1,000 replicas.
DECISION_GOAL_US = 50.0
LENGTH_GOAL_US = 21.0
# Waiting requests, batch slots, and the goal.
MAPPINGS = ((8, 1, 300.0), (6, 2, 300.0), (6, 4, 300.0), (40, 1, 1000.0), (40, 4, 1000.0))
DAG_GOAL_US = 5.0
# Goal of one prediction by the forest of a recorded trace.
PREDICTION_GOAL_US = 50.0
# Seeds that no constants were chosen on.
TRACE_SEEDS = tuple(range(100, 110))
# Stretches of the timed calls, whose medians give the error of the median.
BLOCKS = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Percentiles of one operation, in microseconds; `goal_us` applies to the median."""

    what: str
    setting: str
    n: int
    p50_us: float
    p99_us: float
    goal_us: float | None = None

    @property
    def is_met(self) -> bool | None:
        return None if self.goal_us is None else self.p50_us <= self.goal_us


@dataclass(frozen=True, slots=True)
class Decision:
    """Time of one kind of event with `queued` calls waiting; `acted`: mean number of commands."""

    scheduler: str
    event: str
    replicas: int
    max_running: int
    queued: int
    timing: Timing
    acted: float


def _timed(what: str, setting: str, ns: Sequence[float], goal_us: float | None = None) -> Timing:
    found = summary([[x / 1000 for x in ns]])
    return Timing(what, setting, found.count, found.p50, found.p99, goal_us)


def _time_target(text: str, goal_us: float, ns: Sequence[float]) -> Target:
    """The median in microseconds, compared with the goal."""
    us = np.array(ns) / 1000
    medians = [float(np.median(block)) for block in np.array_split(us, BLOCKS) if block.size]
    _, stderr = mean_and_stderr(medians)
    return Target(length_bounds.GROUP, text, goal_us, float(np.median(us)), stderr, at_least=False)


# Routing


@dataclass(slots=True)
class _Switched:
    """Round robin until the pool is full, then the router under test.

    Filling an early-binding pool by its own rule would take longer than the measurement.
    """

    routing: RoutingPolicy
    is_on: bool = False

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        return (self.routing if self.is_on else RoundRobin()).route(invocation, pool)


class RouterBench:
    """A pool whose replicas run `held` invocations each, with `queued` waiting."""

    def __init__(
        self,
        policies: Policies,
        replicas: int,
        max_running: int,
        queued: int,
        *,
        held: int | None = None,
        seed: int = 0,
    ) -> None:
        self.now_s = 0.0
        self.leases: list[Dispatch] = []
        self._random = Random(seed)
        self._made = 0
        # The rate at which invocations of 5 s end on this many batch slots.
        self._step_s = 5.0 / (replicas * max_running)
        switched = _Switched(policies.routing)
        filling = Policies(switched, FirstComeFirstServed(), max_queued=schedulers.UNBOUNDED)
        if not policies.late_binding:
            filling = replace(policies, routing=switched)
        self.orchestrator = PoolOrchestrator(POOL, filling)
        profile = replace(SEVEN_B, max_running=max_running)
        self.replicas = [ReplicaId(f"r{i:04d}") for i in range(replicas)]
        for id in self.replicas:
            self.orchestrator.handle(
                ReplicaReported(0.0, id, DeploymentName("d"), profile, max_running, 0, True, ())
            )
        for _ in range(replicas * (max_running if held is None else held) + queued):
            self.follow(self.orchestrator.handle(self.offer()))
        switched.is_on = True
        if policies.late_binding:
            self.follow(self.orchestrator.handle(PoliciesChanged(self.now_s, policies)))

    def offer(self) -> InvocationOffered:
        """A new call: SABER's classes, a third of them with a TTFT objective."""
        random, i = self._random, self._made
        self._made += 1
        prompt, output, _ = random.choice(list(SABER_CLASSES.values()))
        known = belief(output)
        return InvocationOffered(
            self.now_s,
            Invocation(
                InvocationId(f"i{i:07d}"),
                RunId(f"t{i:07d}"),
                TaskName("bench"),
                NodeId("0"),
                max(1, round(prompt * exp(random.gauss(0, 0.5)))),
                round(known.mean),
                self.now_s,
                self.now_s + random.uniform(2.0, 300.0),
                until_first_token=random.random() < 1 / 3,
                draw=random.random(),
                length=known,
            ),
        )

    def end(self) -> InvocationEnded:
        """One of the running invocations, at random, ends."""
        i = self._random.randrange(len(self.leases))
        self.leases[i], self.leases[-1] = self.leases[-1], self.leases[i]
        done = self.leases.pop()
        return InvocationEnded(self.now_s, done.invocation_id, done.attempt, 1, "done")

    def progress(self) -> ReplicaProgressed:
        """A replica's report that each of its invocations generated about 20 tokens."""
        replica = self._random.choice(self.replicas)
        held = [c.invocation_id for c in self.leases if c.replica_id == replica]
        tokens = tuple((id, self._random.randrange(2, 40)) for id in held)
        return ReplicaProgressed(self.now_s, replica, tokens)

    def follow(self, commands: Iterable[Command]) -> None:
        """Act as the driver: dispatched calls get their first token at once."""
        todo = list(commands)
        while todo:
            command = todo.pop()
            if isinstance(command, Dispatch):
                self.leases.append(command)
                started = FirstTokenSent(self.now_s, command.invocation_id)
                todo += self.orchestrator.handle(started)
            elif isinstance(command, Preempt):
                self.leases = [c for c in self.leases if c.invocation_id != command.invocation_id]

    def time(
        self,
        event: Callable[[], InvocationOffered | InvocationEnded | ReplicaProgressed],
        n: int,
        after: Callable[[], InvocationEnded] | None = None,
    ) -> tuple[list[int], float]:
        """Nanoseconds of `handle` for `n` events, and the mean number of commands.

        `after`: an untimed event that restores the load.
        """
        times: list[int] = []
        acted = 0
        for _ in range(n):
            self.now_s += self._step_s
            now = event()
            started = thread_time_ns()
            commands = self.orchestrator.handle(now)
            times.append(thread_time_ns() - started)
            acted += len(commands)
            self.follow(commands)
            if after is not None:
                self.follow(self.orchestrator.handle(after()))
        return times, acted / n


def decisions(
    scheduler: str, replicas: int, max_running: int, *, queued: int = QUEUED, n: int = EVENTS
) -> list[Decision]:
    """Timings of all kinds of events of one pool."""
    policies = SCHEDULERS[scheduler]()
    full = RouterBench(policies, replicas, max_running, queued)
    half = RouterBench(policies, replicas, max_running, 0, held=max_running // 2)
    if max_running == 1:  # load half of the replicas fully, not all of them by half
        for _ in range(replicas // 2):
            half.follow(half.orchestrator.handle(half.offer()))
    half.time(half.offer, WARM_UP, half.end)
    found = {OFFERED_ROOM: (half.time(half.offer, n, half.end), 0)}
    full.time(full.offer, WARM_UP)
    found[OFFERED_FULL] = (full.time(full.offer, n), queued)
    full.time(full.end, WARM_UP)
    found[ENDED] = (full.time(full.end, n), queued)
    if policies.preemption is not None:
        full.time(full.progress, WARM_UP)
        found[PROGRESSED] = (full.time(full.progress, n), queued)
    is_goal = scheduler == schedulers.FORESIGHT and replicas == max(REPLICAS)
    setting = f"{scheduler}, {replicas} replicas, max_running {max_running}"
    return [
        Decision(
            scheduler,
            event,
            replicas,
            max_running,
            waiting,
            _timed(
                event,
                setting,
                times,
                DECISION_GOAL_US if is_goal and event in (OFFERED_FULL, ENDED) else None,
            ),
            acted,
        )
        for event, ((times, acted), waiting) in found.items()
    ]


# Estimators and mapping


def length_bound(n: int = 2000, seed: int = 0) -> Timing:
    """One prediction of the 0.9 quantile by a compiled forest of the default size."""
    random = Random(seed)
    records = []
    for _ in range(2500):
        x, y = random.gauss(6, 1), random.gauss(4, 1)
        output = max(1, round(exp(random.gauss(0.5 * y + 2, 0.7))))
        records.append(LengthRecord(LengthFeatures(TaskName("bench"), (x, y)), output))
    forest = ForestLengths.fit(records, seed).compiled().warmed_up()
    asked = [r.features for r in records[:n]]
    times = list(_each([lambda f=f: forest.quantile(f, 0.9) for f in asked]))  # type: ignore[misc]
    return _timed("length bound", "compiled forest, one prediction", times, LENGTH_GOAL_US)


def trace_bounds(trace: Path) -> tuple[Target, ...]:
    """Length bounds on the later half of a recorded trace: the results of the experiment
    `length-bounds` for CATO's learned bounds, and the prediction time of a compiled forest
    trained on the earlier half. Raise `InputError` for a missing or too short trace.
    """
    options = Options(TRACE_SEEDS, (length_models.LEARNT,), trace)
    found = as_experiment(length_bounds.STUDY).run(options, silent).targets
    train, test = length_models.halves(trace)
    forest = length_models.fitted(length_models.COMPILED, train, TRACE_SEEDS[0])
    asked = [r.features for r in test]
    times = list(_each([lambda f=f: forest.quantile(f, length_models.Q) for f in asked]))  # type: ignore[misc]
    text = "one prediction by the trace's compiled forest, median [µs]"
    return (*found, _time_target(text, PREDICTION_GOAL_US, times))


def mapper(requests: int, max_batch: int, goal_us: float, n: int = 200) -> Timing:
    """One mapping of this many waiting requests by the default mapper."""
    calls = calls_to_time(MAPPERS["moore-smith"], "coding", requests, max_batch, range(n))
    setting = f"moore-smith, {requests} requests, batch {max_batch}"
    return _timed("batch mapping", setting, list(_each(calls)), goal_us)


def dag_match(n: int = 500, history: int = 500, seed: int = 0) -> tuple[Timing, Target]:
    """Time per pair of graphs: a match against `history` runs of four stages, divided by them.

    Returned as a timing and, from the same calls, as a target.
    """
    random = Random(seed)

    def stage(k: int, is_done: bool = True) -> SuperNode:
        inputs = ((k - 1 if k else FROM_USER, random.randrange(50, 2000)),)
        return SuperNode(inputs, random.randrange(20, 800), 1.0) if is_done else SuperNode(inputs)

    past = DagHistory.of([SuperGraph(tuple(map(stage, range(4)))) for _ in range(history)])
    growing = [SuperGraph((stage(0), stage(1), stage(2, False))) for _ in range(n)]
    past.match(growing[0])
    calls: list[Callable[[], object]] = [
        lambda g=g: past.match(g)  # type: ignore[misc]
        for g in growing
    ]
    pairs = [ns / history for ns in _each(calls)]
    timing = _timed("DAG match", f"a pair, out of {history}", pairs, DAG_GOAL_US)
    return timing, _time_target("DAG match of a pair, median [µs]", DAG_GOAL_US, pairs)


def router_over_links() -> Timing:
    """CPU time per call of one router process, messages included; the slowest round as 99 %."""
    from cato.lab.bench import router_alone  # imports Ray, but does not start it

    found = router_alone.measured()
    at_once = f"{router_alone.OUTSTANDING} calls at once, {found.calls_per_s:,.0f} calls/s here"
    return _timed("router process", at_once, found.cpu_ns, router_alone.CPU_GOAL_US)


def _each(calls: Sequence[Callable[[], object]]) -> Iterator[int]:
    for call in calls:
        started = thread_time_ns()
        call()
        yield thread_time_ns() - started


# All of it


@dataclass(frozen=True, slots=True)
class CoreReport:
    """Results of `cato bench core`; `targets` of the estimators are present with a trace."""

    decisions: tuple[Decision, ...]
    timings: tuple[Timing, ...]
    speeds: tuple[Speed, ...]
    targets: tuple[Target, ...] = ()


def measure(
    progress: Callable[[int, int, str], None],
    *,
    replicas: Sequence[int] = REPLICAS,
    batches: Sequence[int] = BATCHES,
    names: Sequence[str] = tuple(SCHEDULERS),
    queued: int = QUEUED,
    events: int = EVENTS,
    trace: Path | None = None,
) -> CoreReport:
    """Run everything in sequence; `progress` gets steps done, steps in total, and the next step.

    With a recorded `trace` also the targets of the estimators. Raise `InputError` for a missing or
    too short trace.
    """
    cells = [(s, r, b) for s in names for b in batches for r in replicas]
    total = len(cells) + 6 + len(names) * len(WORKLOADS) + (trace is not None)
    done = itertools.count()

    def begin(what: str) -> None:
        progress(next(done), total, what)

    targets: tuple[Target, ...] = ()
    if trace is not None:
        begin("length bounds of the trace")
        targets = trace_bounds(trace)
    found: list[Decision] = []
    for scheduler, size, batch in cells:
        begin(f"{scheduler}, {size} replicas, max_running {batch}")
        found += decisions(scheduler, size, batch, queued=queued, n=events)
    begin("length bound")
    timings = [length_bound()]
    begin("batch mapping")
    timings += [mapper(*setting) for setting in MAPPINGS]
    begin("DAG match")
    pair, of_pair = dag_match()
    timings.append(pair)
    begin("prompts of agents")
    for what, ns, goal_us in zip(
        ("first turn", "a later turn"),
        door.turns(),
        (door.FIRST_GOAL_US, door.LATER_GOAL_US),
        strict=True,
    ):
        setting = f"{what} of {door.PROMPT_TOKENS:,} tokens"
        timings.append(_timed("prompt at the ingress", setting, ns, goal_us))
    begin("a router over its links")
    timings.append(router_over_links())
    if trace is not None:
        targets += (of_pair,)
    speeds = []
    for scheduler, workload in itertools.product(names, WORKLOADS):
        begin(f"simulator, {scheduler}, {workload}")
        speeds.append(simulated_tasks(scheduler, SCHEDULERS[scheduler](), workload))
    begin("simulator, conversations")
    speeds.append(simulated_turns(schedulers.FORESIGHT, schedulers.foresight()))
    return CoreReport(tuple(found), tuple(timings), tuple(speeds), targets)


def as_json(report: CoreReport, facts: Mapping[str, object]) -> dict[str, object]:
    """All percentiles in microseconds, with the machine and the command."""
    targets = {"targets": [finite(t.row()) for t in report.targets]} if report.targets else {}
    return {
        **facts,
        "clock": "processor time of the thread",
        "decisions": [asdict(d) | {"met": d.timing.is_met} for d in report.decisions],
        "timings": [asdict(t) | {"met": t.is_met} for t in report.timings],
        "simulator": [asdict(s) | {"met": s.is_met} for s in report.speeds],
        **targets,
    }


def tables(report: CoreReport, queued: int) -> Group:
    """One row per kind of event, one pair of columns per number of replicas."""
    counts = sorted({d.replicas for d in report.decisions})
    table = Table(
        title=f"A routing decision in µs, median / 99 %, by replicas of the pool; {queued:,} calls "
        "waiting where all are full",
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
    )
    table.add_column("", no_wrap=True)
    for count in counts:
        table.add_column(f"{count:,}", justify="right", no_wrap=True)
    blocks: dict[tuple[str, int], dict[str, dict[int, Text]]] = {}
    for d in report.decisions:
        block = blocks.setdefault((d.scheduler, d.max_running), {})
        block.setdefault(d.event, {})[d.replicas] = _cell(d.timing)
    for (scheduler, batch), block in blocks.items():
        table.add_row(Text(f"{scheduler}, max_running {batch}", style="cyan"))
        for event, cells in block.items():
            table.add_row(f"  {event}", *(cells.get(c, Text()) for c in counts))
    others = Table(header_style="bold", box=SIMPLE_HEAD)
    for name in ("what", "how", "µs, median / 99 %", "goal"):
        others.add_column(name)
    for t in report.timings:
        others.add_row(t.what, t.setting, _cell(t), f"<= {t.goal_us:g}" if t.goal_us else "")
    for s in report.speeds:
        style = "green" if s.is_met else "red"
        spread = f"{s.slowest_per_s:,.0f}-{s.fastest_per_s:,.0f}"
        speed = Text(f"{s.per_s:,.0f} ({spread}) {s.unit}/s, {s.events_per_s:,.0f} events/s", style)
        setting = f"{s.scheduler}, {s.workload} ({s.output_tokens:.0f} tokens)"
        others.add_row("simulator", setting, speed, f">= {s.goal_per_s:,.0f} {s.unit}/s")
    return Group(table, others)


def _cell(timing: Timing) -> Text:
    style = {None: "", True: "green", False: "red"}[timing.is_met]
    return Text(f"{_number(timing.p50_us)} / {_number(timing.p99_us)}", style=style)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
