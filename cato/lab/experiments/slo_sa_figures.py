"""SLO-SA's figures besides its table of mappers: heat, errors of lengths and fits, instances.

Queues, classes and latencies are those of the experiment `slo-sa`; every mapping is evaluated with
the true lengths and the paper's latencies. `of_fcfs`: G over that of full batches by arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import fsum
from pathlib import Path
from random import Random

from cato.lab.experiments.slo_sa import OF_MAPPINGS
from cato.lab.experiments.slo_sa_queues import CLASS_MEAN, EXACT, GAUSSIAN, Queue, a_queue
from cato.lab.study import Study, Trial, no_targets
from cato.policies.mapping.annealing import SimulatedAnnealing
from cato.policies.mapping.latency import SLO_SA_TABLE_2, Bilinear, LatencyModel
from cato.policies.mapping.objective import Worth, worth
from cato.policies.mapping.problem import Mapper, MappingRequest
from cato.policies.mapping.registry import MAPPERS
from cato.sim import plots
from cato.sim.experiment import Options
from cato.sim.report import Mean, Report

WORKLOAD = "chat-code"
ANNEALING, MOORE_SMITH, FCFS = "annealing", "moore-smith", "fcfs"
ARMS = (ANNEALING, MOORE_SMITH, FCFS)
DRAWS, QUICK_SEEDS = 10, 10  # queues per seed, as in `slo-sa`
# Requests and maximum batch of the paper's panels A, B and C.
PANELS = ((10, 1), (20, 2), (40, 4))
STARTS = (50.0, 100.0, 200.0, 500.0, 1000.0)
ITERATIONS = (25, 50, 100, 200, 400)
# Relative errors of the predicted length: uniform up to this value.
LENGTH_ERRORS = (0.0, 0.025, 0.05, 0.1, 0.3)
FIT_ERRORS = (-0.5, -0.2, 0.0, 0.2, 0.5)
TERMS = ("alpha", "beta", "gamma", "delta")
METRICS = ("of_fcfs", *OF_MAPPINGS)


@dataclass(frozen=True, slots=True)
class Told:
    """A mapper's beliefs in a trial: the latencies, and the error of the lengths.

    `lengths`: one of the options of `slo-sa`, unless there is an `error` of the true ones.
    """

    n: int
    max_batch: int
    mapper: Mapper | None = None
    lengths: str = EXACT
    error: float = 0.0
    latency: LatencyModel = SLO_SA_TABLE_2


def _valued(told: Told, arm: str, seed: int) -> dict[str, float]:
    mapper = told.mapper if told.mapper is not None and arm == ANNEALING else MAPPERS[arm]
    ours: list[Worth] = []
    fcfs: list[Worth] = []
    for draw in range(DRAWS):
        queue = a_queue(WORKLOAD, told.n, Random(f"{told.n} {told.max_batch} {seed} {draw}"))
        requests = _believed(queue, told, Random(f"{seed} {draw}"))
        for chosen, found in ((mapper, ours), (MAPPERS[FCFS], fcfs)):
            mapping = chosen.map(requests, told.latency, told.max_batch, seed * DRAWS + draw)
            found.append(worth(mapping.batches, queue.true, SLO_SA_TABLE_2))
    return metrics_of(ours, fcfs, told.n)


def _believed(queue: Queue, told: Told, random: Random) -> Sequence[MappingRequest]:
    if told.error == 0:
        return queue.told[told.lengths]
    return [
        replace(
            r,
            expected_tokens=max(
                1.0, r.expected_tokens * random.uniform(1 - told.error, 1 + told.error)
            ),
        )
        for r in queue.true
    ]


def metrics_of(ours: Sequence[Worth], fcfs: Sequence[Worth], n: int) -> dict[str, float]:
    objective, base = (fsum(v.objective_per_s for v in found) for found in (ours, fcfs))
    values = (
        objective / base if base else 1.0,
        objective / len(ours),
        fsum(v.met for v in ours) / (len(ours) * n),
        fsum(v.latency_s for v in ours) / (len(ours) * n),
    )
    return dict(zip(METRICS, values, strict=True))


def _panel(n: int, max_batch: int) -> dict[str, str | float]:
    return {"requests": n, "max_batch": max_batch}


def _heats(options: Options) -> list[Trial]:
    """One knob at a time around the paper's 500 and 100; quick: the outer values."""
    starts = (50.0, 500.0, 1000.0) if options.quick else STARTS
    iterations = (25, 100, 400) if options.quick else ITERATIONS
    return [
        Trial(
            _panel(n, cap) | {"start": start, "iterations": float(each)},
            partial(_valued, Told(n, cap, SimulatedAnnealing(start=start, iterations=each))),
            (ANNEALING,),
        )
        for (n, cap), start, each in product(PANELS, starts, iterations)
    ]


def _length_errors(options: Options) -> list[Trial]:
    """Errors of the true length, and the published predictor's lengths."""
    drawn = [
        Trial(
            _panel(n, cap) | {"lengths": kind}, partial(_valued, Told(n, cap, lengths=kind)), ARMS
        )
        for (n, cap), kind in product(PANELS, (GAUSSIAN, CLASS_MEAN))
    ]
    return drawn + [
        Trial(
            _panel(n, cap) | {"lengths": f"+-{100 * error:g} %" if error else EXACT},
            partial(_valued, Told(n, cap, error=error)),
            ARMS,
        )
        for (n, cap), error in product(PANELS, LENGTH_ERRORS)
    ]


def _fit_errors(options: Options) -> list[Trial]:
    """One wrong coefficient of Table 2 at a time, for prefill and decode alike."""
    return [
        Trial(
            _panel(10, 4) | {"term": term, "error": error},
            partial(_valued, Told(10, 4, latency=_wrong(place, error))),
            (ANNEALING, MOORE_SMITH),
        )
        for (place, term), error in product(enumerate(TERMS), FIT_ERRORS)
    ]


def _wrong(place: int, error: float) -> LatencyModel:
    def wrong(terms: Bilinear) -> Bilinear:
        each = list(terms.coefficients)
        each[place] *= 1 + error
        return Bilinear(*each)

    return LatencyModel(wrong(SLO_SA_TABLE_2.prefill), wrong(SLO_SA_TABLE_2.decode))


# Plots


def _plot_panels(x: str, report: Report, folder: Path) -> list[Path]:
    """`of_fcfs` by panel: lines over `x` where it is a number, bars where it is a word."""
    panels = list(
        dict.fromkeys((m.setting["requests"], m.setting["max_batch"]) for m in report.means)
    )
    fig, axes = plots.figure(len(panels))
    for ax, (n, cap) in zip(axes, panels, strict=True):
        means = [
            _labelled(m, x)
            for m in report.means
            if m.metric == "of_fcfs"
            and (m.setting["requests"], m.setting["max_batch"]) == (n, cap)
            and m.policy != FCFS
        ]
        if isinstance(means[0].setting[x], str):
            groups = list(dict.fromkeys(str(m.setting[x]) for m in means))
            plots.bars(ax, means, groups, x, "G over that of fcfs")
        else:
            plots.lines(ax, means, x, "G over that of fcfs")
        ax.set_title(f"{n} requests, batches of at most {cap}")
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


def _labelled(mean: Mean, x: str) -> Mean:
    """One line per other varied setting: iterations, or the wrong term."""
    rest = [f"{mean.setting[k]:g} iterations" for k in ("iterations",) if k in mean.setting]
    rest += [f"{mean.policy}, {mean.setting[k]}" for k in ("term",) if k in mean.setting]
    return replace(mean, policy=rest[0]) if rest else mean


def figure_study(
    number: int,
    title: str,
    arms: tuple[str, ...],
    cells: Callable[[Options], Sequence[Trial]],
    plot: Callable[[Report, Path], Sequence[Path]],
) -> Study:
    return Study(
        f"slo-sa-fig{number}",
        title,
        f"SLO-Aware Scheduling for Large Language Model Inferences (SC 2025), Fig. {number}",
        arms,
        cells,
        no_targets,
        plot,
        ("of_fcfs", "slo_attainment", "e2e_s"),
        ("objective_per_s", "slo_attainment"),
        quick_seeds=QUICK_SEEDS,
        reference=ANNEALING,
        metrics=METRICS,
    )


STUDIES = (
    figure_study(
        8,
        "annealing: first temperature x iterations at each",
        (ANNEALING,),
        _heats,
        partial(_plot_panels, "start"),
    ),
    figure_study(
        9,
        "how good must a predicted length be?",
        ARMS,
        _length_errors,
        partial(_plot_panels, "lengths"),
    ),
    figure_study(
        10,
        "one coefficient of the latency model wrong at a time",
        (ANNEALING, MOORE_SMITH),
        _fit_errors,
        partial(_plot_panels, "error"),
    ),
)
