"""SABER's workloads W1-W3 on one engine: static caps, SABER, SLO-SA, and the default.

`saber-rq1`: attainment over the rate, 100 requests per run, as in the paper; an upper bound for any
scheduler; and the result of a search with hindsight for W2. `saber-rq2`: sustained load, 600
requests per run, with SABER's parts switched: its window, its low queue, recomputed speeds, and
nearly exact lengths, which reproduce the published result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cato.core.ids import PoolName
from cato.core.policies import Policies
from cato.lab.experiments import printed
from cato.lab.experiments.bounds import UPPER_BOUND, Capacity, attainable
from cato.lab.experiments.common import attainment_gap, measured
from cato.lab.experiments.hindsight import CLAIRVOYANT, clairvoyant
from cato.lab.experiments.saber_estimators import USL, offline_fit
from cato.lab.study import Study, Trial
from cato.policies import schedulers
from cato.policies.admission.saber import SaberAdmission, SaberOrdering
from cato.policies.mapping.queue import MappedQueue
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.plots import figure, legend, lines, save
from cato.sim.report import Report, Sample, Setting, Target
from cato.sim.workloads import SABER_ENGINE, SABER_RATES_PER_S, SABER_SHARES, SPREAD, saber_tasks

POOL = PoolName("engine")
REQUESTS, SUSTAINED = 100, 600
CAPS = tuple(range(10, 101, 10))
# Where little is left to gain, a search with hindsight shows how much.
SEARCHED, SEARCH_ROUNDS = ("W2",), 60
# SLO-SA's maximum batch: the best of 10, 20, 30 and 50 on seeds 0-2.
ANNEALING, MAPPED_CAP = "annealing", 50
NEARLY_EXACT_SPREAD = 0.05
SUSTAINED_RATES_PER_S = (5.0, 10.0)
SOURCE = 'SABER, "Adaptive Request Scheduling for CodeLLM Serving with SLA Guarantees" (2025)'


def _saber(
    window: int = 10,
    low_slots: int = 2,
    quantile: float | None = None,
    counts_hopeless: bool = False,
    refreshes: bool = False,
) -> Policies:
    model = offline_fit(USL)
    return replace(
        schedulers.saber(model, window),
        ordering=SaberOrdering(model, quantile),
        admission=SaberAdmission(model, low_slots, quantile, counts_hopeless, refreshes),
    )


def _to_the_end(cap: int) -> Policies:
    """SLO-SA as its engine model assumes: batches run to their end."""
    policies = schedulers.mapped(ANNEALING, cap)
    assert isinstance(policies.mapping, MappedQueue), "mapped by `schedulers.mapped`"
    return replace(policies, mapping=replace(policies.mapping, runs_to_end=True))


def cap_name(cap: int) -> str:
    return f"static-cap-{cap}"


# A weaker reading: required speeds of running requests are recomputed.
REFRESHED = "saber, refreshed speeds"

_CAPS: Mapping[str, Callable[[], Policies]] = {
    cap_name(cap): partial(schedulers.static_cap, cap) for cap in CAPS
}
_OPPONENTS: Mapping[str, Callable[[], Policies]] = {
    name: partial(schedulers.OF_PROFILE[name], SABER_ENGINE, 0) for name in printed.OPPONENTS
}
RQ1_POLICIES: Mapping[str, Callable[[], Policies]] = {
    **_CAPS,
    "saber": _saber,
    REFRESHED: partial(_saber, refreshes=True),
    **_OPPONENTS,
    ANNEALING: partial(schedulers.mapped, ANNEALING, MAPPED_CAP),
    schedulers.FORESIGHT: schedulers.foresight,
}
RQ1_ARMS = (*RQ1_POLICIES, CLAIRVOYANT, UPPER_BOUND)
RQ2_POLICIES: Mapping[str, Callable[[], Policies]] = {
    **{cap_name(cap): _CAPS[cap_name(cap)] for cap in (20, 30, 50, 80)},
    **_OPPONENTS,
    "saber": _saber,
    "saber, whole queue": partial(_saber, 0),
    "saber, unlimited low queue": partial(_saber, 10, 1000),
    "saber, p90 lengths": partial(_saber, quantile=0.9),
    "saber, largest lengths": partial(_saber, quantile=1.0),
    REFRESHED: partial(_saber, refreshes=True),
    "saber, the hopeless count": partial(_saber, counts_hopeless=True, refreshes=True),
    ANNEALING: partial(schedulers.mapped, ANNEALING, MAPPED_CAP),
    f"{ANNEALING}, batches run to their end": partial(_to_the_end, MAPPED_CAP),
    "moore-smith": partial(schedulers.mapped, "moore-smith", MAPPED_CAP),
    schedulers.FORESIGHT: schedulers.foresight,
}


def _setup(policies: Policies) -> PoolSetup:
    return PoolSetup(POOL, (SABER_ENGINE,), policies)


def _measured(
    workload: str, rate_per_s: float, requests: int, spread: float, policy: str, seed: int
) -> Mapping[str, float]:
    tasks = saber_tasks(workload, rate_per_s, requests, seed, POOL, spread=spread)
    if policy == UPPER_BOUND:
        return {"slo_attainment": attainable(tasks, {POOL: Capacity(SABER_ENGINE, 1)})}
    if policy == CLAIRVOYANT:
        return clairvoyant(tasks, _setup, seed, SEARCH_ROUNDS).metrics
    known = RQ2_POLICIES if policy in RQ2_POLICIES else RQ1_POLICIES
    return measured([_setup(known[policy]())], tasks)


def _rq1_cells(options: Options) -> list[Trial]:
    without_search = tuple(a for a in RQ1_ARMS if a != CLAIRVOYANT)
    return [
        Trial(
            {"workload": workload, "rate_per_s": rate},
            partial(_measured, workload, rate, REQUESTS, SPREAD),
            () if workload in SEARCHED else without_search,
        )
        for workload in SABER_SHARES
        for rate in SABER_RATES_PER_S
    ]


def _rq2_cells(options: Options) -> list[Trial]:
    return [
        Trial(
            {"workload": workload, "rate_per_s": rate, "lengths": lengths},
            partial(_measured, workload, rate, SUSTAINED, spread),
        )
        for lengths, spread in (("spread", SPREAD), ("nearly exact", NEARLY_EXACT_SPREAD))
        for workload in SABER_SHARES
        for rate in SUSTAINED_RATES_PER_S
    ]


_Gap = tuple[float, float] | None


def _over_saber(samples: Sequence[Sample], policy: str, **wanted: str | float) -> _Gap:
    return attainment_gap(samples, policy, "saber", lambda s: wanted.items() <= s.items())


def _over_default_saber(samples: Sequence[Sample], workload: str, rate_per_s: float) -> _Gap:
    return _over_saber(samples, schedulers.FORESIGHT, workload=workload, rate_per_s=rate_per_s)


def _over_best_cap(samples: Sequence[Sample], workload: str, rate_per_s: float) -> _Gap:
    """Versus the best cap in this very setting, chosen with hindsight."""
    wanted: Setting = {"workload": workload, "rate_per_s": rate_per_s}
    gaps = [attainment_gap(samples, schedulers.FORESIGHT, cap, wanted.__eq__) for cap in _CAPS]
    return min((g for g in gaps if g is not None), key=lambda g: g[0], default=None)


def _rq1_targets(samples: Sequence[Sample]) -> list[Target]:
    targets: list[Target] = []

    def hold(text: str, goal: float, gap: _Gap) -> None:
        if gap is not None:
            targets.append(Target(3, text, goal, *gap))

    at = [("W1", 5.0), ("W1", 10.0), ("W1", 20.0), ("W3", 20.0), ("W3", 10.0)]
    for (workload, rate), goal in zip(at, (4.0, 15.0, 11.0, 11.0, 1.0), strict=True):
        text = f"points over the best static cap, {workload} at {rate:g} requests/s"
        hold(text, goal, _over_best_cap(samples, workload, rate))
    for workload, rate in sorted(at):
        text = f"points over saber, {workload} at {rate:g} requests/s"
        hold(text, 8.0, _over_default_saber(samples, workload, rate))
    for baseline, goal, over in (
        ("the best static cap", -1.5, _over_best_cap),
        ("saber", -0.5, _over_default_saber),
    ):
        worst = [
            (*gap, f"{workload} at {rate:g} requests/s")
            for workload in SABER_SHARES
            for rate in SABER_RATES_PER_S
            if (gap := over(samples, workload, rate)) is not None
        ]
        if worst:
            points, stderr, where = min(worst)
            hold(f"points over {baseline}, at least ({where})", goal, (points, stderr))
    for workload in SEARCHED:
        text = f"points of the {CLAIRVOYANT} over saber, {workload}, mean of all rates"
        hold(text, -0.5, _over_saber(samples, CLAIRVOYANT, workload=workload))
    return targets


def _rq2_targets(samples: Sequence[Sample]) -> list[Target]:
    gaps = {
        w: _over_saber(samples, schedulers.FORESIGHT, workload=w, lengths="spread")
        for w in SABER_SHARES
    }
    return [
        Target(3, f"points over saber, {SUSTAINED} requests, {w}, mean of the rates", 12.0, *gap)
        for w, gap in gaps.items()
        if gap is not None
    ]


def plot(report: Report, folder: Path) -> list[Path]:
    """Attainment and goodput over the rate, one column per workload; of the caps the outer ones."""
    shown = {cap_name(c) for c in (10, 30, 50, 100)}
    workloads = list(dict.fromkeys(str(m.setting["workload"]) for m in report.means))
    variants = list(dict.fromkeys(str(m.setting.get("lengths", "")) for m in report.means))
    fig, axes = figure(len(workloads), len(variants) if variants != [""] else 2)
    rows: list[tuple[str, str, str]] = (
        [("slo_attainment", "attainment", ""), ("goodput_per_s", "goodput (tasks/s)", "")]
        if variants == [""]
        else [("slo_attainment", f"attainment, lengths {v}", v) for v in variants]
    )
    for row, (metric, label, variant) in enumerate(rows):
        for column, workload in enumerate(workloads):
            axis = axes[row * len(workloads) + column]
            means = [
                m
                for m in report.means
                if m.metric == metric
                and m.setting["workload"] == workload
                and str(m.setting.get("lengths", "")) == variant
                and (m.policy in shown or not m.policy.startswith("static-cap"))
            ]
            lines(axis, means, "rate_per_s", label)
            axis.set_xlabel("requests per second")
            axis.set_title(workload)
    legend(fig)
    return [save(fig, folder, report.experiment)]


COMPARED = ("slo_attainment", "goodput_per_s", "cv_completion_over_sla")
STUDIES = (
    Study(
        "saber-rq1",
        "attainment over the rate: static caps, SABER, the default; 100 requests a run",
        f"{SOURCE}, RQ1",
        RQ1_ARMS,
        _rq1_cells,
        _rq1_targets,
        plot,
        compared=COMPARED,
    ),
    Study(
        "saber-rq2",
        "sustained load, 600 requests a run; SABER's parts switched",
        f"{SOURCE}, RQ2",
        tuple(RQ2_POLICIES),
        _rq2_cells,
        _rq2_targets,
        plot,
        compared=COMPARED,
    ),
)
