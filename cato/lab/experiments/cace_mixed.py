"""CACE's workload on accelerators of two speeds, which the paper leaves to future work.

Two fast accelerators and two slow ones: calls take three times as long there, loads twice. Weights
stay in the host's memory, so that a cold start of a completion meets its SLO (1 s) on a fast
accelerator (0.7 s) and misses it on a slow one (1.4 s); answers that reason (10 s) meet theirs on
both (3.5 and 7 s). All arms serve in the order `queue-aware`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cato.core.errors import UnknownNameError
from cato.core.eviction import CardPolicies, EvictionPolicy, SitePolicy
from cato.core.ids import DeploymentName
from cato.lab.experiments.cace import COUNT, GROUP, PATTERNS, SOURCE, paired, selected
from cato.policies.eviction.cace import Cace
from cato.policies.eviction.foresight import ForesightEviction
from cato.policies.eviction.lfu import LeastFrequentlyUsed
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import QueueAware
from cato.policies.eviction.sites import ShapeBlind, UrgentOnFast
from cato.sim import cards, plots
from cato.sim.cards import CardShape
from cato.sim.experiment import Experiment, Options, Progress, run_all
from cato.sim.report import Report, Sample, Setting, Target, compare, summarize

SHAPES = (
    CardShape(DeploymentName("fast"), 2),
    CardShape(DeploymentName("slow"), 2, slowdown=3.0, load_slowdown=2.0),
)
RATES_PER_S = (0.2, 0.4)
BLIND = ", shape-blind"
DEFAULT = "foresight"
ARMS: Mapping[str, tuple[EvictionPolicy, SitePolicy]] = {
    "lru" + BLIND: (LeastRecentlyUsed(), ShapeBlind()),
    "lfu" + BLIND: (LeastFrequentlyUsed(), ShapeBlind()),
    "cace" + BLIND: (Cace(), ShapeBlind()),
    "cace": (Cace(), UrgentOnFast()),
    DEFAULT + BLIND: (ForesightEviction(), ShapeBlind()),
    DEFAULT: (ForesightEviction(), UrgentOnFast()),
}
COMPARED = ("slo_attainment", "hit_rate", "load_s", "ttft_s_mean", "e2e_s_mean")


@dataclass(frozen=True, slots=True)
class _Job:
    arms: tuple[str, ...]
    setting: Setting
    count: int
    seed: int


def _run(job: _Job) -> list[Sample]:
    pattern = PATTERNS[str(job.setting["pattern"])]
    rate_per_s = float(job.setting["rate_per_s"])
    arrivals = cards.arrivals(pattern, rate_per_s, job.count, np.random.default_rng(job.seed))
    samples = []
    for name in job.arms:
        eviction, sites = ARMS[name]
        policies = CardPolicies(eviction, QueueAware(), sites)
        run = cards.run(arrivals, policies, cards.HOST_WEIGHTS_BYTES, SHAPES)
        samples.append(Sample(job.setting, name, job.seed, run.metrics()))
    return samples


def run(options: Options, progress: Progress, count: int = COUNT) -> Report:
    """Arms x patterns x rates; quick: the lower rate. Raise `UnknownNameError` for an arm."""
    for name in options.policies:
        if name not in ARMS:
            raise UnknownNameError("arm", name, tuple(ARMS))
    rates = RATES_PER_S[:1] if options.quick else RATES_PER_S
    jobs = [
        _Job(
            options.policies or tuple(ARMS),
            {"pattern": pattern, "rate_per_s": rate},
            count,
            seed,
        )
        for pattern in ("uniform", "skewed")
        for rate in rates
        for seed in options.seeds
    ]
    samples = [s for part in run_all(_run, jobs, progress, options.jobs) for s in part]
    means, targets = summarize(samples), _targets(samples)
    compared = compare(samples, DEFAULT, COMPARED)
    return Report("cace-mixed", options.seeds, means, compared, targets)


def _targets(samples: list[Sample]) -> tuple[Target, ...]:
    """That the rule is no loss, with each eviction policy."""
    targets = []
    for setting in {tuple(s.setting.items()): s.setting for s in samples}.values():
        for arm in ("cace", DEFAULT):
            gain = paired(
                samples,
                (arm, setting),
                (arm + BLIND, setting),
                lambda a, b: 100 * (a["slo_attainment"] - b["slo_attainment"]),
            )
            if gain is not None:
                where = f"{setting['pattern']}, {setting['rate_per_s']}/s"
                text = f"attainment by urgent-on-fast, {arm}, {where} [points]"
                targets.append(Target(GROUP, text, 0.0, *gain))
    return tuple(targets)


def plot(report: Report, folder: Path) -> tuple[Path, ...]:
    """SLO attainment by arm."""
    rates = sorted({float(m.setting["rate_per_s"]) for m in report.means})
    fig, axes = plots.figure(len(rates))
    for ax, rate in zip(axes, rates, strict=True):
        means = selected(report, "slo_attainment", rate_per_s=rate)
        plots.bars(ax, means, ["uniform", "skewed"], "pattern", "SLO attainment")
        ax.set_title(f"{rate}/s, two speeds", fontsize=10)
    plots.legend(fig)
    return (plots.save(fig, folder, "cace-mixed"),)


EXPERIMENT = Experiment(
    name="cace-mixed",
    title="Two speeds of accelerators: which model is loaded where",
    source=f"{SOURCE}, future work",
    run=run,
    plot=plot,
    headlines=("slo_attainment", "hit_rate", "load_s"),
)
