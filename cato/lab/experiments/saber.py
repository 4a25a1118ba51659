"""SABER's workloads W1-W3 on one engine: static caps, SABER, SLO-SA, and the default.

`saber-rq1`: attainment over the rate, 100 requests per run, as in the paper; an upper bound for any
scheduler; and the result of a search with hindsight for W2. `saber-rq2`: sustained load, 600
requests per run, with SABER's parts switched: its window, its low queue, recomputed speeds, and
nearly exact lengths, which reproduce the published result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from cato.core.ids import PoolName
from cato.core.policies import Policies
from cato.estimators.usl import SpeedSample, UslFit, fit_usl
from cato.lab.experiments import printed
from cato.lab.experiments.bounds import UPPER_BOUND, Capacity, attainable
from cato.lab.experiments.common import (
    Gap,
    attainment_gap,
    chosen_policies,
    measured,
)
from cato.lab.experiments.hindsight import CLAIRVOYANT, clairvoyant
from cato.lab.experiments.saber_estimators import speed_samples
from cato.policies import schedulers
from cato.policies.admission.saber import SaberAdmission, SaberOrdering
from cato.policies.mapping.queue import MappedQueue
from cato.sim.experiment import Experiment, Options, Progress, run_all
from cato.sim.fleet import PoolSetup
from cato.sim.plots import figure, legend, lines, save
from cato.sim.report import Report, Sample, Target, compare, summarize
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
# The offline phase uses other requests than the experiment: its own seed.
OFFLINE_SEED = 77_002


@lru_cache(maxsize=1)
def offline_fit() -> UslFit:
    """SABER's offline phase: the speed law of this engine, with the cap lifted."""
    samples: list[SpeedSample] = []
    for workload in SABER_SHARES:
        for rate_per_s in SABER_RATES_PER_S:
            samples += speed_samples(workload, rate_per_s, OFFLINE_SEED)
    return fit_usl(samples)


def _saber(
    window: int = 10,
    low_slots: int = 2,
    quantile: float | None = None,
    counts_hopeless: bool = False,
    refreshes: bool = False,
) -> Policies:
    model = offline_fit()
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


@dataclass(frozen=True, slots=True)
class _Job:
    workload: str
    rate_per_s: float
    requests: int
    exact: bool
    policy: str
    seed: int


def _run(job: _Job) -> Sample:
    spread = NEARLY_EXACT_SPREAD if job.exact else SPREAD
    tasks = saber_tasks(job.workload, job.rate_per_s, job.requests, job.seed, POOL, spread=spread)
    if job.policy == UPPER_BOUND:
        metrics: Mapping[str, float] = {
            "slo_attainment": attainable(tasks, {POOL: Capacity(SABER_ENGINE, 1)})
        }
    elif job.policy == CLAIRVOYANT:
        metrics = clairvoyant(tasks, _setup, job.seed, SEARCH_ROUNDS).metrics
    else:
        known = RQ2_POLICIES if job.policy in RQ2_POLICIES else RQ1_POLICIES
        metrics = measured([_setup(known[job.policy]())], tasks)
    setting: dict[str, str | float] = {"workload": job.workload, "rate_per_s": job.rate_per_s}
    if job.requests != REQUESTS:
        setting["lengths"] = "nearly exact" if job.exact else "spread"
    return Sample(setting, job.policy, job.seed, metrics)


def _setup(policies: Policies) -> PoolSetup:
    return PoolSetup(POOL, (SABER_ENGINE,), policies)


def _rq1(options: Options, progress: Progress) -> Report:
    hindsight = dict.fromkeys((CLAIRVOYANT, UPPER_BOUND), schedulers.foresight)
    policies = chosen_policies(options, {**RQ1_POLICIES, **hindsight})
    jobs = [
        _Job(workload, rate_per_s, REQUESTS, False, policy, seed)
        for workload in SABER_SHARES
        for rate_per_s in SABER_RATES_PER_S
        for seed in options.seeds
        for policy in policies
        if policy != CLAIRVOYANT or workload in SEARCHED
    ]
    samples = run_all(_run, jobs, progress, options.jobs)
    targets: list[Target] = []
    for workload, rate_per_s, goal in (
        ("W1", 5.0, 4.0),
        ("W1", 10.0, 15.0),
        ("W1", 20.0, 11.0),
        ("W3", 20.0, 11.0),
        ("W3", 10.0, 1.0),
    ):
        gap = _over_best_cap(samples, workload, rate_per_s)
        if gap is not None:
            text = f"points over the best static cap, {workload} at {rate_per_s:g} requests/s"
            targets.append(Target(3, text, goal, gap.points, gap.stderr))
    for workload, rate_per_s in (
        ("W1", 5.0),
        ("W1", 10.0),
        ("W1", 20.0),
        ("W3", 10.0),
        ("W3", 20.0),
    ):
        gap = _over_saber(samples, workload, rate_per_s=rate_per_s)
        if gap is not None:
            text = f"points over saber, {workload} at {rate_per_s:g} requests/s"
            targets.append(Target(3, text, 8.0, gap.points, gap.stderr))
    for baseline, goal, over in (
        ("the best static cap", -1.5, _over_best_cap),
        ("saber", -0.5, lambda s, w, r: _over_saber(s, w, rate_per_s=r)),
    ):
        worst = [
            (gap.points, gap.stderr, f"{w} at {r:g} requests/s")
            for w in SABER_SHARES
            for r in SABER_RATES_PER_S
            if (gap := over(samples, w, r)) is not None
        ]
        if worst:
            points, stderr, where = min(worst)
            text = f"points over {baseline}, at least ({where})"
            targets.append(Target(3, text, goal, points, stderr))
    for workload in SEARCHED:
        gap = _over_saber(samples, workload, policy=CLAIRVOYANT)
        if gap is not None:
            text = f"points of the {CLAIRVOYANT} over saber, {workload}, mean of all rates"
            targets.append(Target(3, text, -0.5, gap.points, gap.stderr))
    return _report("saber-rq1", options, samples, targets)


def _over_best_cap(samples: Sequence[Sample], workload: str, rate_per_s: float) -> Gap | None:
    """Versus the best cap in this very setting, chosen with hindsight."""
    gaps = [
        attainment_gap(
            samples,
            schedulers.FORESIGHT,
            cap,
            lambda s: s["workload"] == workload and s["rate_per_s"] == rate_per_s,
        )
        for cap in _CAPS
    ]
    known = [g for g in gaps if g.points == g.points]
    return min(known, key=lambda g: g.points) if known else None


def _over_saber(
    samples: Sequence[Sample],
    workload: str,
    lengths: str | None = None,
    policy: str = schedulers.FORESIGHT,
    rate_per_s: float | None = None,
) -> Gap | None:
    gap = attainment_gap(
        samples,
        policy,
        "saber",
        lambda s: (
            s["workload"] == workload
            and s.get("lengths") == lengths
            and rate_per_s in (None, s["rate_per_s"])
        ),
    )
    return gap if gap.points == gap.points else None


def _rq2(options: Options, progress: Progress) -> Report:
    policies = chosen_policies(options, RQ2_POLICIES)
    jobs = [
        _Job(workload, rate_per_s, SUSTAINED, exact, policy, seed)
        for exact in (False, True)
        for workload in SABER_SHARES
        for rate_per_s in SUSTAINED_RATES_PER_S
        for seed in options.seeds
        for policy in policies
    ]
    samples = run_all(_run, jobs, progress, options.jobs)
    targets = []
    for workload in SABER_SHARES:
        gap = _over_saber(samples, workload, "spread")
        if gap is not None:
            text = f"points over saber, {SUSTAINED} requests, {workload}, mean of the rates"
            targets.append(Target(3, text, 12.0, gap.points, gap.stderr))
    return _report("saber-rq2", options, samples, targets)


def _report(
    name: str, options: Options, samples: Sequence[Sample], targets: Sequence[Target]
) -> Report:
    return Report(
        name,
        options.seeds,
        summarize(samples),
        compare(
            samples,
            schedulers.FORESIGHT,
            ("slo_attainment", "goodput_per_s", "cv_completion_over_sla"),
        ),
        tuple(targets),
    )


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


EXPERIMENTS = (
    Experiment(
        "saber-rq1",
        "attainment over the rate: static caps, SABER, the default; 100 requests a run",
        f"{SOURCE}, RQ1",
        _rq1,
        plot,
    ),
    Experiment(
        "saber-rq2",
        "sustained load, 600 requests a run; SABER's parts switched",
        f"{SOURCE}, RQ2",
        _rq2,
        plot,
    ),
)
