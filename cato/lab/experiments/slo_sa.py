"""SLO-SA: quality of batch mappings, with exact and with guessed lengths.

n requests wait at one engine that runs batches to their end. Mappers know the lengths exactly, as
the mean of the request's class, or as a draw from the class's Gaussian; their mappings are then
evaluated with the true lengths. Latencies are the paper's (Table 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import fsum
from pathlib import Path
from random import Random

from cato.lab.experiments.slo_sa_queues import (
    EXACT,
    LENGTHS,
    SPREAD,
    WORKLOADS,
    Queue,
    a_queue,
)
from cato.lab.study import Measured, Study, Trial
from cato.policies.mapping.annealing import Acceptance, SimulatedAnnealing
from cato.policies.mapping.latency import SLO_SA_TABLE_2
from cato.policies.mapping.objective import Worth, worth
from cato.policies.mapping.problem import Mapper, MappingRequest
from cato.policies.mapping.problem import Mapping as BatchMapping
from cato.policies.mapping.registry import MAPPERS
from cato.sim import plots
from cato.sim.experiment import Options
from cato.sim.report import Mean, Report, Sample, Target, mean_and_stderr, summarize

SIZES = (4, 6, 8, 10, 20, 30, 40)
CAPS = (1, 2, 4)
# Batch cap: the largest n for which every mapping is evaluated.
EXHAUSTIVE_TO = {1: 8, 2: 6, 4: 6}
READINGS_AT = 20
DRAWS = 10  # queues per seed; a seed's metrics are means over them
OURS = "moore-smith"
# Mappers to whose G that of each other one is compared.
REFERENCES = ("fcfs", "annealing", "exhaustive")
OF_MAPPINGS = ("objective_per_s", "slo_attainment", "e2e_s")

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
ARMS = (*MAPPERS, *READINGS)


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


@lru_cache(maxsize=1)
def _queues(workload: str, n: int, seed: int) -> tuple[Queue, ...]:
    """A seed's queues; the same for every mapper."""
    return tuple(
        a_queue(workload, n, Random(f"{workload} {n} {seed} {draw}")) for draw in range(DRAWS)
    )


def _measured(
    workload: str, max_batch: int, n: int, lengths: str, policy: str, seed: int
) -> Measured:
    """Metrics, and the worth of the mapping of each queue."""
    values = [
        _valued(policy, queue, lengths, max_batch, seed * DRAWS + draw)
        for draw, queue in enumerate(_queues(workload, n, seed))
    ]
    means = (
        fsum(v.objective_per_s for v in values) / DRAWS,
        fsum(v.met for v in values) / (DRAWS * n),
        fsum(v.latency_s for v in values) / (DRAWS * n),
    )
    return Measured(dict(zip(OF_MAPPINGS, means, strict=True)), values)


def _takes_part(policy: str, max_batch: int, n: int, lengths: str) -> bool:
    if policy == "exhaustive":
        return lengths == EXACT and n <= EXHAUSTIVE_TO[max_batch]
    if policy in READINGS:
        return lengths == EXACT and n == READINGS_AT
    return True


def _cells(options: Options) -> list[Trial]:
    return [
        Trial(
            {"workload": workload, "max_batch": cap, "requests": n, "lengths": lengths},
            partial(_measured, workload, cap, n, lengths),
            tuple(a for a in ARMS if _takes_part(a, cap, n, lengths)),
        )
        for workload in WORKLOADS
        for cap in CAPS
        for n in SIZES
        for lengths in LENGTHS
    ]


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


def _ratios(samples: Sequence[Sample]) -> list[Sample]:
    """Each mapper's G over that of others for the same queues."""
    runs: dict[tuple[str | float, ...], dict[str, Sequence[Worth]]] = {}
    for s in samples:
        runs.setdefault((*s.setting.values(), s.seed), {})[s.policy] = s.further
    found = []
    for s in samples:
        others = runs[*s.setting.values(), s.seed]
        metrics = {
            f"of_{name}": (_mean_ratio if name == "exhaustive" else _ratio_of_sums)(
                s.further, others[name]
            )
            for name in REFERENCES
            if name in others and name != s.policy
        }
        found.append(replace(s, metrics=metrics))
    return found


def _targets(samples: Sequence[Sample]) -> list[Target]:
    ours = [s for s in _ratios(samples) if s.policy == OURS and s.setting["lengths"] == EXACT]
    found = []
    for cap in CAPS:
        for reference, low, high, goal in (
            ("exhaustive", 1, EXHAUSTIVE_TO[cap], 0.999),
            ("annealing", 20, 40, 0.99),
        ):
            by_seed: dict[int, list[float]] = {}
            for s in ours:
                wanted = (
                    s.setting["max_batch"] == cap and low <= float(s.setting["requests"]) <= high
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
    return found


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
        ax.barh(labels, [m.mean for m in mine], xerr=[plots.margin(m) for m in mine])
        ax.axvline(1.0, color="gray", linewidth=0.8)
        ax.set_xlabel("G over that of the corrected annealing")
        ax.set_title(f"{workload}, n = {READINGS_AT}, by error and batch cap")
    return (plots.save(fig, folder, "slo-sa-readings"),)


STUDY = Study(
    "slo-sa",
    "Batch mapping: G by mapper, batch cap and knowledge of lengths",
    "SLO-Aware Scheduling for Large Language Model Inferences (SC 2025), evaluation",
    ARMS,
    _cells,
    _targets,
    plot,
    compared=OF_MAPPINGS,
    means=lambda samples: summarize((*samples, *_ratios(samples))),
    extra=lambda options, samples: {"queues_per_seed": DRAWS, "spread": SPREAD},
    reference=OURS,
    called="mapper",
    metrics=(*OF_MAPPINGS, *(f"of_{name}" for name in REFERENCES)),
)
