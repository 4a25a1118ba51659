"""Robustness: regret of the default versus simple rules, over traffic, fleets and errors.

Regret of a cell: the best baseline's attainment minus the default's, in points. The best baseline
is chosen on one half of a cell's seeds and compared on the other, so that it is not the luckiest of
twenty. The cells with the largest regret run again on fresh seeds, and those results count. Without
`--cells` each axis is varied alone around three bases; with it cells are drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from cato.core.errors import InputError
from cato.lab.studies import agent_fleet, matrix, matrix_cells
from cato.lab.study import Cell, Study, chosen_arms
from cato.policies.schedulers import FORESIGHT
from cato.sim.experiment import Options, Progress
from cato.sim.kept import Kept
from cato.sim.plots import heat_map, save
from cato.sim.report import Mean, Report, Sample, Setting, Target, mean_and_stderr

ARMS = (FORESIGHT, *dict.fromkeys((*matrix.OPEN_ARMS, *matrix.SESSION_ARMS)))
QUICK_ARMS = (
    FORESIGHT,
    "power-of-two",
    "ray-serve",
    "least-wait",
    "edf-bounded",
    "sjf-bounded",
    "block-cost",
    "sticky",
    "prefix-score",
)
MOST_REGRET = 1.0
# Number of baselines still considered after a first seed.
KEPT = 6
# Larger regret looks the same in the heat map.
COLOURED_POINTS = 10.0
METRIC, REGRET = "slo_attainment", "regret"
# Calls of a run. In a closed loop the share in time alone rewards idle accelerators.
IN_TIME, ANSWERS = "answers_in_time", "answers"
# The longest wait is that of calls that were not refused.
REFUSED = "refused"
METRICS = (REGRET, METRIC, "wait_s_max", REFUSED, IN_TIME, ANSWERS)


@dataclass(frozen=True, slots=True)
class Effort:
    """Seeds to choose the baseline, as many to compare it, and worst cells to run again."""

    half: int
    worst: int
    fresh: int


USUAL, QUICK = Effort(4, 10, 30), Effort(2, 3, 6)
# Seeds per draw; no two draws share any.
SEEDS_A_DRAW = 1000


@dataclass(frozen=True, slots=True)
class Duel:
    """The default versus one baseline in one cell.

    `regret` in points, attainment and the share refused in [0, 1]; answers, and those in time, are
    means of a run.
    """

    setting: Setting
    rival: str
    regret: float
    stderr: float
    ours: float
    theirs: float
    our_wait_s: float
    their_wait_s: float
    seeds: int
    our_in_time: float
    their_in_time: float
    our_answers: float
    their_answers: float
    our_refused: float
    their_refused: float


@dataclass(frozen=True, slots=True)
class _Job:
    options: Options
    cell: int
    seeds: tuple[int, ...]
    rival: str = ""  # empty: it is chosen on the first half of the seeds


def cells(options: Options) -> list[Cell]:
    """The requested cells; those of sessions when there is a trace."""
    has_sessions = options.trace is not None
    trace = options.needed("trace") if has_sessions else None
    if options.cells:
        scenes = matrix.random_scenes(options.cells, options.draw, has_sessions)
    else:
        scenes = matrix.axis_scenes(has_sessions)
        if options.quick:
            scenes = [s for s in scenes if _is_quick(s)]
    return [matrix_cells.cell_of(s, trace) for s in scenes]


def _check(options: Options) -> None:
    """Read the sessions, if any; raise `InputError` when that fails."""
    if options.trace is not None:
        agent_fleet.check_trace(options)


def _is_quick(scene: matrix.Scene) -> bool:
    """Only the load around every base, and beliefs around the first. A run of sessions takes as
    long as twenty others, so only loads without overload are run."""
    for base in matrix.BASES:
        differing = {k for k, v in asdict(base).items() if getattr(scene, k) != v}
        if differing <= {"load"}:
            return base.traffic != matrix.SESSIONS or scene.load < 1.2
        if differing == {"beliefs"}:
            return base is matrix.BASES[0]
    return False


def duel(arms: Sequence[str], job: _Job) -> Duel:
    """Choose the baseline unless it is given, and compare it on the remaining seeds."""
    cell, seeds, rival = cells(job.options)[job.cell], job.seeds, job.rival
    if not rival:
        half = len(seeds) // 2
        first, *others = seeds[:half]
        seeds = seeds[half:]
        samples = [cell.sample(arm, first) for arm in arms if arm in cell.arms]
        kept = ranked(samples)[:KEPT]
        samples += [cell.sample(arm, seed) for seed in others for arm in kept]
        rival = ranked([s for s in samples if s.policy in kept])[0]
    pairs = [(cell.sample(FORESIGHT, seed), cell.sample(rival, seed)) for seed in seeds]
    return duel_of(pairs)


def ranked(samples: Sequence[Sample]) -> list[str]:
    """The arms by attainment, highest first; ties keep the order of the runs."""
    by_arm: dict[str, list[float]] = {}
    for s in samples:
        by_arm.setdefault(s.policy, []).append(s.metrics[METRIC])
    if not by_arm:
        raise InputError("none of the requested baselines runs in every cell")
    return sorted(by_arm, key=lambda arm: -fmean(by_arm[arm]))


def duel_of(pairs: Sequence[tuple[Sample, Sample]]) -> Duel:
    """From runs of the default and of one baseline, paired by seed."""
    ours, theirs = sides = tuple(zip(*pairs, strict=True))
    points = [100 * (t.metrics[METRIC] - o.metrics[METRIC]) for o, t in pairs]
    return Duel(
        ours[0].setting,
        theirs[0].policy,
        *mean_and_stderr(points),
        fmean(o.metrics[METRIC] for o in ours),
        fmean(t.metrics[METRIC] for t in theirs),
        max(o.metrics["wait_s_max"] for o in ours),
        max(t.metrics["wait_s_max"] for t in theirs),
        len(pairs),
        *(
            fmean(s.metrics[name] for s in side)
            for name in (IN_TIME, ANSWERS, REFUSED)
            for side in sides
        ),
    )


def run(study: Study, options: Options, progress: Progress) -> Report:
    """Every cell once, then the worst again on fresh seeds. All seeds follow from the draw."""
    effort = QUICK if options.quick else USUAL
    arms = chosen_arms(study, options)
    count = len(study.cells(options))
    again = min(effort.worst, count)
    first = options.draw * SEEDS_A_DRAW
    seeds = tuple(range(first, first + 2 * effort.half))
    kept = Kept(options.kept, replace(options, jobs=1, kept=None), Duel)

    def duels(jobs: Sequence[_Job], before: int, of: int) -> list[Duel]:
        return kept.run_all(
            partial(duel, arms), jobs, lambda done, _: progress(before + done, of), options.jobs
        )

    once = duels([_Job(options, i, seeds) for i in range(count)], 0, count + again)
    worst = sorted(range(count), key=lambda i: (-once[i].regret, i))[:again]
    fresh = tuple(range(seeds[-1] + 1, seeds[-1] + 1 + effort.fresh))
    jobs = [_Job(options, i, fresh, once[i].rival) for i in worst]
    decided = duels(jobs, count, count + again)
    return report_of(study.name, (*seeds, *fresh), once, decided)


def report_of(
    name: str, seeds: tuple[int, ...], once: Sequence[Duel], decided: Sequence[Duel]
) -> Report:
    """One row per duel, the largest regret first; those on fresh seeds before all others."""
    ordered = sorted(once, key=lambda d: -d.regret)
    rows = [*_means(sorted(decided, key=lambda d: -d.regret), "fresh"), *_means(ordered, "half")]
    worst = max(decided, key=lambda d: d.regret)
    where = matrix.words(worst.setting)
    text = f"points of regret in the worst cell, on fresh seeds ({worst.rival}: {where})"
    target = Target(9, text, MOST_REGRET, worst.regret, worst.stderr, at_least=False)
    extra = {"cells": [asdict(d) for d in ordered], "again": [asdict(d) for d in decided]}
    return Report(name, seeds, tuple(rows), targets=(target,), extra=extra)


def _means(duels: Sequence[Duel], seeds: str) -> list[Mean]:
    found = []
    for d in duels:
        setting = {"seeds": seeds, "cell": matrix.words(d.setting)}
        found += [
            Mean(setting, FORESIGHT, REGRET, d.regret, d.stderr, d.seeds),
            Mean(setting, FORESIGHT, METRIC, d.ours, 0.0, d.seeds),
            Mean(setting, FORESIGHT, "wait_s_max", d.our_wait_s, 0.0, d.seeds),
            Mean(setting, FORESIGHT, REFUSED, d.our_refused, 0.0, d.seeds),
            Mean(setting, FORESIGHT, IN_TIME, d.our_in_time, 0.0, d.seeds),
            Mean(setting, FORESIGHT, ANSWERS, d.our_answers, 0.0, d.seeds),
            Mean(setting, d.rival, METRIC, d.theirs, 0.0, d.seeds),
            Mean(setting, d.rival, "wait_s_max", d.their_wait_s, 0.0, d.seeds),
            Mean(setting, d.rival, REFUSED, d.their_refused, 0.0, d.seeds),
            Mean(setting, d.rival, IN_TIME, d.their_in_time, 0.0, d.seeds),
            Mean(setting, d.rival, ANSWERS, d.their_answers, 0.0, d.seeds),
        ]
    return found


def targets(samples: Sequence[Sample]) -> Sequence[Target]:
    """Empty: the targets come with the duels."""
    return ()


def plot(report: Report, folder: Path) -> list[Path]:
    """A heat map: mean regret of the cells with an axis value, one column per kind of traffic."""
    regrets: dict[tuple[str, str | float, str], list[float]] = {}
    duels: Any = report.extra["cells"]
    for d in duels:
        for axis in matrix.AXES:
            key = (axis, d["setting"][axis], d["setting"]["traffic"])
            regrets.setdefault(key, []).append(d["regret"])
    kinds = [t for t in (*matrix_cells.TRAFFIC, matrix.SESSIONS) if ("traffic", t, t) in regrets]
    # Bases add values of their own on some axes.
    rows = [
        (axis, value)
        for axis in matrix.AXES
        if axis != "traffic"
        for value in sorted({v for a, v, _ in regrets if a == axis}, key=_place_of(axis))
    ]
    found = [[fmean(regrets.get((*row, kind), [nan])) for kind in kinds] for row in rows]
    names = [f"{axis} {value}" for axis, value in rows]
    breaks = [y for y in range(1, len(rows)) if rows[y][0] != rows[y - 1][0]]
    label = "regret [points]; red: a baseline is better"
    fig = heat_map(found, names, kinds, label, COLOURED_POINTS, breaks)
    return [save(fig, folder, report.experiment)]


def _place_of(axis: str) -> Callable[[str | float], tuple[float, str]]:
    """Numbers by size, words as the axis lists them."""
    values = matrix.AXES[axis]

    def place(value: str | float) -> tuple[float, str]:
        if isinstance(value, str):
            return (values.index(value) if value in values else len(values)), value
        return value, ""

    return place


STUDY = Study(
    "robustness",
    "where a simple rule beats the default: regret over traffic, fleets and errors (--cells N)",
    "CATO project",
    ARMS,
    cells,
    targets,
    plot,
    METRICS,
    quick_arms=QUICK_ARMS,
    run=run,
    takes=("cells", "draw", "kept"),
    metrics=METRICS,
    check=_check,
)
