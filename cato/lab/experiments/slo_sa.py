"""SLO-SA: quality of batch mappings, with exact and with guessed lengths.

n requests wait at one engine that runs batches to their end. Mappers know the lengths exactly, as
the mean of the request's class, or as a draw from the class's Gaussian; their mappings are then
evaluated with the true lengths. Latencies are the paper's (Table 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, fsum, inf, log, sqrt
from pathlib import Path
from random import Random

from cato.core.errors import UnknownNameError
from cato.core.ids import InvocationId, PoolName, TaskName
from cato.core.slo import Slo, SloMetric
from cato.policies.mapping.annealing import Acceptance, SimulatedAnnealing
from cato.policies.mapping.latency import SLO_SA_TABLE_2
from cato.policies.mapping.objective import Worth, worth
from cato.policies.mapping.problem import Mapper, MappingRequest
from cato.policies.mapping.problem import Mapping as BatchMapping
from cato.policies.mapping.registry import MAPPERS
from cato.sim import plots
from cato.sim.experiment import Experiment, Options, Progress, run_all
from cato.sim.report import (
    Mean,
    Report,
    Sample,
    Target,
    compare,
    mean_and_stderr,
    summarize,
)
from cato.sim.tasks import SimNode, SimTask
from cato.sim.workloads import belief

SIZES = (4, 6, 8, 10, 20, 30, 40)
CAPS = (1, 2, 4)
# Batch cap: the largest n for which every mapping is evaluated.
EXHAUSTIVE_TO = {1: 8, 2: 6, 4: 6}
READINGS_AT = 20
DRAWS = 10  # queues per seed; a seed's metrics are means over them

EXACT, CLASS_MEAN, GAUSSIAN = "exact", "class-mean", "gaussian"
LENGTHS = (EXACT, CLASS_MEAN, GAUSSIAN)

READINGS: Mapping[str, Mapper] = {
    "annealing-hill-climb": SimulatedAnnealing(acceptance=Acceptance.NEVER),
    "annealing-unscaled": SimulatedAnnealing(acceptance=Acceptance.UNSCALED, keep_best=False),
    "annealing-one-round": SimulatedAnnealing(reset_counter=False),
    "annealing-no-waits": SimulatedAnnealing(count_waits=False),
    "annealing-printed": SimulatedAnnealing(
        acceptance=Acceptance.NEVER, reset_counter=False, count_waits=False
    ),
}
"""The printed algorithm with one of its errors kept, and with all of them."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """A kind of request: mean lengths and targets. Lengths are log-normal around the means."""

    name: str
    prompt_tokens: float
    output_tokens: float
    slos: tuple[Slo, ...]


# Coefficient of variation of both lengths within a class; real classes have 0.5 to 1.
SPREAD = 0.7

WORKLOADS: Mapping[str, tuple[RequestClass, ...]] = {
    # Half chat, half code, as in the paper: pace targets for chat, E2E for code.
    "chat-code": (
        RequestClass("chat", 160, 340, (Slo(SloMetric.TTFT, 10.0), Slo(SloMetric.TPOT, 0.05))),
        RequestClass("code", 60, 300, (Slo(SloMetric.E2E, 30.0),)),
    ),
    # The four tasks of SABER (its Table I) in equal shares: class means differ tenfold.
    "coding": (
        RequestClass("qna", 186, 43, (Slo(SloMetric.E2E, 1.0),)),
        RequestClass("generation", 463, 387, (Slo(SloMetric.E2E, 8.0),)),
        RequestClass("summary", 31, 30, (Slo(SloMetric.E2E, 1.0),)),
        RequestClass("translation", 670, 617, (Slo(SloMetric.E2E, 12.0),)),
    ),
}


@dataclass(frozen=True, slots=True)
class Queue:
    """The same waiting requests with their true lengths and with those given to a mapper."""

    true: tuple[MappingRequest, ...]
    told: Mapping[str, tuple[MappingRequest, ...]]


def a_queue(workload: str, n: int, random: Random) -> Queue:
    """`n` requests that all arrived just now, of uniformly drawn classes."""
    true: list[MappingRequest] = []
    by_mean: list[MappingRequest] = []
    by_draw: list[MappingRequest] = []
    for i in range(n):
        kind = random.choice(WORKLOADS[workload])
        request = MappingRequest(
            InvocationId(f"{i:03d}-{kind.name}"),
            _length(kind.prompt_tokens, random),
            _length(kind.output_tokens, random),
            kind.slos,
        )
        drawn = max(1.0, random.gauss(kind.output_tokens, SPREAD * kind.output_tokens))
        true.append(request)
        by_mean.append(replace(request, expected_tokens=kind.output_tokens))
        by_draw.append(replace(request, expected_tokens=drawn))
    return Queue(
        tuple(true), {EXACT: tuple(true), CLASS_MEAN: tuple(by_mean), GAUSSIAN: tuple(by_draw)}
    )


def arriving(workload: str, times: Sequence[float], seed: int, pool: PoolName) -> list[SimTask]:
    """Calls of a workload that arrive at `times`; policies know the class's lengths."""
    random = Random(f"{workload} {seed}")
    tasks: list[SimTask] = []
    for i, arrived_at_s in enumerate(times):
        kind = random.choice(WORKLOADS[workload])
        paces_s = [s.target_s for s in kind.slos if s.metric is SloMetric.TPOT]
        (slo,) = (s for s in kind.slos if s.metric is not SloMetric.TPOT)
        known = belief(kind.output_tokens, SPREAD)
        node = SimNode(
            pool,
            _length(kind.prompt_tokens, random),
            _length(kind.output_tokens, random),
            round(known.mean),
            known,
        )
        tasks.append(
            SimTask(
                f"t{i:05d}",
                TaskName(kind.name),
                arrived_at_s,
                slo.metric,
                slo.target_s,
                (node,),
                (random.random(),),
                min(paces_s, default=inf),
            )
        )
    return tasks


def _length(mean: float, random: Random) -> int:
    sigma = sqrt(log(1 + SPREAD**2))
    return max(1, round(mean * exp(random.gauss(-(sigma**2) / 2, sigma))))


def calls_to_time(
    mapper: Mapper, workload: str, n: int, max_batch: int, seeds: Sequence[int]
) -> list[Callable[[], BatchMapping]]:
    """One call per seed for a benchmark to time; compiled and warm on return."""
    queues = [a_queue(workload, n, Random(seed)).true for seed in seeds]

    def call(requests: tuple[MappingRequest, ...], seed: int) -> Callable[[], BatchMapping]:
        return lambda: mapper.map(requests, SLO_SA_TABLE_2, max_batch, seed)

    calls = [call(queue, seed) for queue, seed in zip(queues, seeds, strict=True)]
    if calls:
        calls[0]()
    return calls


@dataclass(frozen=True, slots=True)
class _Job:
    workload: str
    max_batch: int
    n: int
    seed: int
    policies: tuple[str, ...]


def _run(job: _Job) -> list[Sample]:
    queues = [
        a_queue(job.workload, job.n, Random(f"{job.workload} {job.n} {job.seed} {draw}"))
        for draw in range(DRAWS)
    ]
    samples = []
    for lengths in LENGTHS:
        results = {
            policy: [
                _valued(policy, queue, lengths, job.max_batch, job.seed * DRAWS + draw)
                for draw, queue in enumerate(queues)
            ]
            for policy in job.policies
            if _takes_part(policy, job, lengths)
        }
        setting: dict[str, str | float] = {
            "workload": job.workload,
            "max_batch": job.max_batch,
            "requests": job.n,
            "lengths": lengths,
        }
        for policy, values in results.items():
            metrics = {
                "objective_per_s": fsum(v.objective_per_s for v in values) / DRAWS,
                "slo_attainment": fsum(v.met for v in values) / (DRAWS * job.n),
                "e2e_s": fsum(v.latency_s for v in values) / (DRAWS * job.n),
            }
            for reference in ("fcfs", "annealing"):
                if reference in results and reference != policy:
                    metrics[f"of_{reference}"] = _ratio_of_sums(values, results[reference])
            if "exhaustive" in results and policy != "exhaustive":
                metrics["of_exhaustive"] = _mean_ratio(values, results["exhaustive"])
            samples.append(Sample(setting, policy, job.seed, metrics))
    return samples


def _takes_part(policy: str, job: _Job, lengths: str) -> bool:
    if policy == "exhaustive":
        return lengths == EXACT and job.n <= EXHAUSTIVE_TO[job.max_batch]
    if policy in READINGS:
        return lengths == EXACT and job.n == READINGS_AT
    return True


def _valued(policy: str, queue: Queue, lengths: str, max_batch: int, seed: int) -> Worth:
    mapper = READINGS[policy] if policy in READINGS else MAPPERS[policy]
    mapping = mapper.map(queue.told[lengths], SLO_SA_TABLE_2, max_batch, seed)
    return worth(mapping.batches, queue.true, SLO_SA_TABLE_2)


def _ratio_of_sums(values: Sequence[Worth], references: Sequence[Worth]) -> float:
    """Single ratios have no mean: a reference may be 0 where `values` are not."""
    above = fsum(v.objective_per_s for v in values)
    below = fsum(v.objective_per_s for v in references)
    if below == 0:
        return 1.0 if above == 0 else float("inf")
    return above / below


def _mean_ratio(values: Sequence[Worth], best: Sequence[Worth]) -> float:
    """Mean of single ratios to the optimum; where that is 0, all are equally good."""
    ratios = [
        v.objective_per_s / b.objective_per_s if b.met else 1.0
        for v, b in zip(values, best, strict=True)
    ]
    return fsum(ratios) / len(ratios)


def run(options: Options, progress: Progress) -> Report:
    """All sizes, caps, workloads and levels of knowledge; raise `UnknownNameError` for a policy."""
    return run_sizes(options, progress, SIZES)


def run_sizes(options: Options, progress: Progress, sizes: Sequence[int]) -> Report:
    """As `run`, for these numbers of requests."""
    known = (*MAPPERS, *READINGS)
    for name in options.policies:
        if name not in known:
            raise UnknownNameError("mapper", name, known)
    policies = options.policies or known
    jobs = [
        _Job(workload, cap, n, seed, policies)
        for workload in WORKLOADS
        for cap in CAPS
        for n in sizes
        for seed in options.seeds
    ]
    samples = [s for part in run_all(_run, jobs, progress, options.jobs) for s in part]
    return Report(
        "slo-sa",
        options.seeds,
        summarize(samples),
        compare(samples, "moore-smith", ("objective_per_s", "slo_attainment", "e2e_s")),
        _targets(samples),
        {"queues_per_seed": DRAWS, "spread": SPREAD},
    )


def _targets(samples: Sequence[Sample]) -> tuple[Target, ...]:
    found = []
    for cap in CAPS:
        for reference, low, high, goal in (
            ("exhaustive", 1, EXHAUSTIVE_TO[cap], 0.999),
            ("annealing", 20, 40, 0.99),
        ):
            by_seed: dict[int, list[float]] = {}
            for s in samples:
                wanted = (
                    s.policy == "moore-smith"
                    and s.setting["lengths"] == EXACT
                    and s.setting["max_batch"] == cap
                    and low <= float(s.setting["requests"]) <= high
                )
                if wanted and f"of_{reference}" in s.metrics:
                    by_seed.setdefault(s.seed, []).append(s.metrics[f"of_{reference}"])
            if by_seed:
                means = [fsum(ratios) / len(ratios) for ratios in by_seed.values()]
                text = (
                    f"moore-smith: G over that of {reference}, batches of {cap}, "
                    f"{f'n <= {high}' if low == 1 else f'n = {low}-{high}'}"
                )
                found.append(Target(4, text, goal, *mean_and_stderr(means)))
    return tuple(found)


def plot(report: Report, folder: Path) -> Sequence[Path]:
    """G by method, its ratio to annealing, the gain by knowledge, and the cost of the errors."""

    def known_exactly(mean: Mean) -> Mean | None:
        return mean if mean.setting["lengths"] == EXACT and mean.policy not in READINGS else None

    def searched(mean: Mean) -> Mean | None:
        return known_exactly(mean) if mean.policy != "fcfs" else None

    def by_lengths(mean: Mean) -> Mean | None:
        if mean.policy not in ("annealing", "moore-smith"):
            return None
        return replace(mean, policy=f"{mean.policy}, {mean.setting['lengths']}")

    return (
        _grid(report, folder, "objective", "objective_per_s", "G (1/s)", known_exactly),
        _grid(report, folder, "ratio", "of_annealing", "G over that of annealing", searched),
        _grid(report, folder, "lengths", "of_fcfs", "G over that of fcfs", by_lengths),
        *_readings(report, folder),
    )


def _grid(
    report: Report,
    folder: Path,
    name: str,
    metric: str,
    label: str,
    chosen: Callable[[Mean], Mean | None],
) -> Path:
    """`metric` over n, one row per workload and one column per batch cap."""
    fig, axes = plots.figure(len(CAPS), len(WORKLOADS))
    cells = [(workload, cap) for workload in WORKLOADS for cap in CAPS]
    for ax, cell in zip(axes, cells, strict=True):
        here = (
            chosen(m)
            for m in report.means
            if m.metric == metric and (m.setting["workload"], m.setting["max_batch"]) == cell
        )
        plots.lines(ax, [m for m in here if m is not None], "requests", label)
        if metric == "objective_per_s":
            ax.set_yscale("log")
        else:
            ax.axhline(1.0, color="gray", linewidth=0.8)
        ax.set_title(f"{cell[0]}, batches of at most {cell[1]}")
    plots.legend(fig)
    return plots.save(fig, folder, f"slo-sa-{name}")


def _readings(report: Report, folder: Path) -> tuple[Path, ...]:
    rows = [m for m in report.means if m.metric == "of_annealing" and m.policy in READINGS]
    if not rows:
        return ()
    fig, axes = plots.figure(len(WORKLOADS))
    for ax, workload in zip(axes, WORKLOADS, strict=True):
        mine = [m for m in rows if m.setting["workload"] == workload]
        labels = [f"{m.policy.removeprefix('annealing-')}, {m.setting['max_batch']}" for m in mine]
        ax.barh(labels, [m.mean for m in mine], xerr=[1.96 * m.stderr for m in mine])
        ax.axvline(1.0, color="gray", linewidth=0.8)
        ax.set_xlabel("G over that of the corrected annealing")
        ax.set_title(f"{workload}, n = {READINGS_AT}, by error and batch cap")
    return (plots.save(fig, folder, "slo-sa-readings"),)


EXPERIMENT = Experiment(
    name="slo-sa",
    title="Batch mapping: G by mapper, batch cap and knowledge of lengths",
    source="SLO-Aware Scheduling for Large Language Model Inferences (SC 2025), evaluation",
    run=run,
    plot=plot,
)
