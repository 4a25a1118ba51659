"""CACE: eviction policies, dispatch orders and host memory on its workload.

16 models share 4 accelerators. A loading accelerator serves nothing, so in-order dispatch can
serve about 0.5 invocations a second on the uniform pattern and 0.7 on the skewed one, whatever the
eviction policy: 0.1/s and 0.2/s are underload, 0.8/s is overload for it. Every run starts with
empty accelerators and continues until the last of `COUNT` invocations has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cato.core.errors import UnknownNameError
from cato.core.eviction import CardPolicies, DispatchOrder, EvictionPolicy
from cato.policies.eviction.belady import Belady
from cato.policies.eviction.cace import Cace
from cato.policies.eviction.foresight import ForesightEviction
from cato.policies.eviction.lfu import LeastFrequentlyUsed
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import BatchedPerModel, InOrder, QueueAware
from cato.policies.eviction.sites import ShapeBlind
from cato.sim import cards, plots
from cato.sim.cards import CardArrival
from cato.sim.experiment import Experiment, Options, Progress, run_all
from cato.sim.report import (
    Mean,
    Report,
    Sample,
    Setting,
    Target,
    compare,
    mean_and_stderr,
    summarize,
)

GROUP = 5
COUNT = 600
SOURCE = "Context-Aware CodeLLM Eviction for AI-assisted Coding (2025)"
UNDERLOAD_PER_S = (0.1, 0.2)
SATURATED_PER_S = 0.5
OVERLOAD_PER_S = 0.8
COMPARED = (
    "hit_rate",
    "evictions",
    "load_s",
    "ttft_s_mean",
    "ttft_s_p99",
    "e2e_s_mean",
    "slo_attainment",
)
HEADLINES = ("hit_rate", "load_s", "slo_attainment")
PATTERNS: Mapping[str, cards.Pattern] = {p.name: p for p in cards.PATTERNS}

LRU, LFU, CACE, FORESIGHT, BELADY = "lru", "lfu", "cace", "foresight", "belady"
IN_ORDER, BATCHED, QUEUE_AWARE = "in-order", "batched", "queue-aware"
ORDERS: Mapping[str, DispatchOrder] = {
    IN_ORDER: InOrder(),
    BATCHED: BatchedPerModel(),
    QUEUE_AWARE: QueueAware(),
}
POLICIES: Mapping[str, EvictionPolicy | None] = {
    LRU: LeastRecentlyUsed(),
    LFU: LeastFrequentlyUsed(),
    CACE: Cace(),
    FORESIGHT: ForesightEviction(),
    BELADY: None,  # created per run: it knows the arrivals
}
ABLATED: Mapping[str, EvictionPolicy | None] = {
    LRU: LeastRecentlyUsed(),
    LFU: LeastFrequentlyUsed(),
    CACE: Cace(),
    "cace without recency": Cace(recency=False),
    "cace without reload cost": Cace(reload_cost=False),
    "cace without demand": Cace(demand=False),
    "cace without output": Cace(output=False),
    "cace, recency as printed": Cace(printed_recency=True),
    "cace, output weight 0.01": Cace(output_weight=0.01),
    FORESIGHT: ForesightEviction(),
    "foresight without prefetch": ForesightEviction(prefetches=False),
}
# Strategies of `cace-rq2`: eviction policy and dispatch order.
STRATEGIES: Mapping[str, tuple[str, str]] = {
    "lru, in-order": (LRU, IN_ORDER),
    "lru, batched": (LRU, BATCHED),
    "lfu, in-order": (LFU, IN_ORDER),
    "lfu, batched": (LFU, BATCHED),
    "foresight, in-order": (FORESIGHT, IN_ORDER),
    "foresight, batched": (FORESIGHT, BATCHED),
    "foresight, queue-aware": (FORESIGHT, QUEUE_AWARE),
}
BASELINE, BEST = "lru, in-order", "foresight, queue-aware"
MEMORY: Mapping[str, int] = {"none": 0, "128 GB": cards.HOST_WEIGHTS_BYTES}


@dataclass(frozen=True, slots=True)
class _Job:
    """One seed of one setting: every policy gets the same arrivals."""

    policies: Mapping[str, tuple[EvictionPolicy | None, DispatchOrder]]
    setting: Setting
    host_weights_bytes: int
    count: int
    seed: int


def _run(job: _Job) -> list[Sample]:
    pattern = PATTERNS[str(job.setting["pattern"])]
    rng = np.random.default_rng(job.seed)
    arrivals = cards.arrivals(pattern, float(job.setting["rate_per_s"]), job.count, rng)
    return [
        Sample(
            job.setting,
            name,
            job.seed,
            cards.run(
                arrivals,
                alike(eviction or _clairvoyant(arrivals), order),
                job.host_weights_bytes,
            ).metrics(),
        )
        for name, (eviction, order) in job.policies.items()
    ]


def alike(eviction: EvictionPolicy, order: DispatchOrder) -> CardPolicies:
    """Policies of accelerators that are all alike."""
    return CardPolicies(eviction, order, ShapeBlind())


def _clairvoyant(arrivals: Sequence[CardArrival]) -> Belady:
    return Belady(cards.arrivals_s(arrivals))


def _chosen(options: Options, known: Sequence[str]) -> tuple[str, ...]:
    for name in options.policies:
        if name not in known:
            raise UnknownNameError("eviction policy", name, tuple(known))
    return options.policies or tuple(known)


def _samples(jobs: Sequence[_Job], options: Options, progress: Progress) -> list[Sample]:
    return [s for part in run_all(_run, jobs, progress, options.jobs) for s in part]


def run_rq1(options: Options, progress: Progress, count: int = COUNT) -> Report:
    """Policies x patterns x rates, in-order dispatch, no host memory.

    Raise `UnknownNameError` for a policy.
    """
    names = _chosen(options, tuple(POLICIES))
    jobs = [
        _Job(
            {n: (POLICIES[n], InOrder()) for n in names},
            {"pattern": pattern, "rate_per_s": rate},
            0,
            count,
            seed,
        )
        for pattern in PATTERNS
        for rate in (*UNDERLOAD_PER_S, OVERLOAD_PER_S)
        for seed in options.seeds
    ]
    samples = _samples(jobs, options, progress)
    return Report(
        "cace-rq1",
        options.seeds,
        summarize(samples),
        compare(samples, FORESIGHT, COMPARED),
        _hit_targets(samples),
    )


def run_rq2(options: Options, progress: Progress, count: int = COUNT) -> Report:
    """Dispatch orders with and without host memory; raise `UnknownNameError` for a strategy."""
    names = _chosen(options, tuple(STRATEGIES))
    jobs = [
        _Job(
            {n: (POLICIES[STRATEGIES[n][0]], ORDERS[STRATEGIES[n][1]]) for n in names},
            {"pattern": pattern, "rate_per_s": rate, "host_memory": memory},
            weights_bytes,
            count,
            seed,
        )
        for pattern in PATTERNS
        for rate in (UNDERLOAD_PER_S[0], OVERLOAD_PER_S)
        for memory, weights_bytes in MEMORY.items()
        for seed in options.seeds
    ]
    samples = _samples(jobs, options, progress)
    return Report(
        "cace-rq2",
        options.seeds,
        summarize(samples),
        compare(samples, BEST, COMPARED),
        (*_memory_targets(samples), *_order_targets(samples)),
    )


def run_ablation(options: Options, progress: Progress, count: int = COUNT) -> Report:
    """CACE without one factor at a time, and as printed; raise `UnknownNameError` for a variant.

    Dispatch is in order, in underload and where queues form. The demand factor changes nothing in
    either: orders that never leave an accelerator idle while the head could use it have a queue
    only while at most one replica may be evicted, and then there is no choice.
    """
    names = _chosen(options, tuple(ABLATED))
    jobs = [
        _Job(
            {n: (ABLATED[n], InOrder()) for n in names},
            {"pattern": pattern, "rate_per_s": rate},
            0,
            count,
            seed,
        )
        for pattern in ("uniform", "skewed")
        for rate in (UNDERLOAD_PER_S[1], SATURATED_PER_S)
        for seed in options.seeds
    ]
    samples = _samples(jobs, options, progress)
    return Report(
        "cace-ablation", options.seeds, summarize(samples), compare(samples, CACE, COMPARED)
    )


# Targets


def paired(
    samples: Sequence[Sample],
    one: tuple[str, Setting],
    other: tuple[str, Setting],
    value: Callable[[Mapping[str, float], Mapping[str, float]], float],
) -> tuple[float, float] | None:
    """Mean and standard error of `value` over the seeds; None when either policy did not run."""

    def of(policy: str, setting: Setting) -> dict[int, Mapping[str, float]]:
        return {
            s.seed: s.metrics
            for s in samples
            if s.policy == policy and dict(s.setting) == dict(setting)
        }

    ours, theirs = of(*one), of(*other)
    if not ours or not theirs:
        return None
    return mean_and_stderr([value(ours[seed], theirs[seed]) for seed in ours])


def _hit_targets(samples: Sequence[Sample]) -> tuple[Target, ...]:
    targets = []
    for rate in UNDERLOAD_PER_S:
        setting: dict[str, str | float] = {"pattern": "skewed", "rate_per_s": rate}
        ours = (FORESIGHT, setting)
        above = paired(
            samples, ours, (LRU, setting), lambda a, b: 100 * (a["hit_rate"] - b["hit_rate"])
        )
        if above is not None:
            text = f"hit rate of foresight minus LRU, skewed, in-order, {rate}/s [points]"
            targets.append(Target(GROUP, text, 6.0, *above))
        part = paired(samples, ours, (BELADY, setting), lambda a, b: a["hit_rate"] / b["hit_rate"])
        if part is not None:
            text = f"hit rate of foresight over Belady, skewed, in-order, {rate}/s"
            targets.append(Target(GROUP, text, 0.8, *part))
    return tuple(targets)


def _memory_targets(samples: Sequence[Sample]) -> tuple[Target, ...]:
    targets = []
    for policy in ("foresight, in-order", BEST):
        for pattern in PATTERNS:
            setting: dict[str, str | float] = {"pattern": pattern, "rate_per_s": UNDERLOAD_PER_S[0]}
            factor = paired(
                samples,
                (policy, setting | {"host_memory": "128 GB"}),
                (policy, setting | {"host_memory": "none"}),
                lambda a, b: b["load_s"] / a["load_s"],
            )
            if factor is not None:
                text = f"load time without over with host memory, {pattern}, {policy}"
                targets.append(Target(GROUP, text, 2.5, *factor))
    return tuple(targets)


def _order_targets(samples: Sequence[Sample]) -> tuple[Target, ...]:
    targets = []
    for baseline in ("foresight, in-order", BASELINE):
        for pattern in PATTERNS:
            setting: Setting = {
                "pattern": pattern,
                "rate_per_s": OVERLOAD_PER_S,
                "host_memory": "none",
            }
            factor = paired(
                samples,
                (BEST, setting),
                (baseline, setting),
                lambda a, b: b["ttft_s_mean"] / a["ttft_s_mean"],
            )
            if factor is not None:
                text = f"mean TTFT of {baseline} over {BEST}, overload, {pattern}"
                targets.append(Target(GROUP, text, 2.5, *factor))
    return tuple(targets)


# Plots


def selected(report: Report, metric: str, **setting: str | float) -> list[Mean]:
    return [
        m
        for m in report.means
        if m.metric == metric and all(m.setting.get(k) == v for k, v in setting.items())
    ]


def plot_rq1(report: Report, folder: Path) -> tuple[Path, ...]:
    """Hit rate, and TTFT, by policy and pattern."""
    paths = []
    rates = (*UNDERLOAD_PER_S, OVERLOAD_PER_S)
    for metric, label in (("hit_rate", "hit rate"), ("ttft_s_mean", "mean TTFT [s]")):
        fig, axes = plots.figure(len(rates))
        for ax, rate in zip(axes, rates, strict=True):
            plots.bars(
                ax, selected(report, metric, rate_per_s=rate), list(PATTERNS), "pattern", label
            )
            ax.set_title(f"{rate}/s, in order", fontsize=10)
        plots.legend(fig)
        paths.append(plots.save(fig, folder, f"cace-rq1-{metric.replace('_', '-')}"))
    return tuple(paths)


def plot_rq2(report: Report, folder: Path) -> tuple[Path, ...]:
    """TTFT and total load time by strategy, with and without host memory."""
    paths = []
    for metric, label in (("ttft_s_mean", "mean TTFT [s]"), ("load_s", "total load time [s]")):
        fig, axes = plots.figure(2, 2)
        cells = [(r, m) for r in (UNDERLOAD_PER_S[0], OVERLOAD_PER_S) for m in MEMORY]
        for ax, (rate, memory) in zip(axes, cells, strict=True):
            means = selected(report, metric, rate_per_s=rate, host_memory=memory)
            plots.bars(ax, means, list(PATTERNS), "pattern", label)
            ax.set_title(f"{rate}/s, host memory: {memory}", fontsize=10)
            if max(m.mean for m in means) > 10 * min(m.mean for m in means):
                ax.set_yscale("log")  # in-order dispatch in overload dwarfs the others
        plots.legend(fig)
        paths.append(plots.save(fig, folder, f"cace-rq2-{metric.replace('_', '-')}"))
    return tuple(paths)


def plot_ablation(report: Report, folder: Path) -> tuple[Path, ...]:
    """Hit rate of every variant, one panel per setting."""
    settings = list(dict.fromkeys(tuple(m.setting.items()) for m in report.means))
    fig, axes = plots.figure(2, 2)
    for ax, items in zip(axes, settings, strict=True):
        setting = dict(items)
        means = selected(report, "hit_rate", **setting)
        names = [m.policy for m in means]
        ax.barh(names, [m.mean for m in means], xerr=[1.96 * m.stderr for m in means], capsize=2)
        ax.invert_yaxis()
        ax.set_xlabel("hit rate")
        ax.set_title(f"{setting['pattern']}, {setting['rate_per_s']}/s, in order", fontsize=10)
        ax.tick_params(axis="y", labelsize=8)
        ax.grid(axis="x", alpha=0.3)
    return (plots.save(fig, folder, "cace-ablation"),)


RQ1 = Experiment(
    name="cace-rq1",
    title="Hit rate and latency by eviction policy, pattern and load",
    source=f"{SOURCE}, workload patterns",
    run=run_rq1,
    plot=plot_rq1,
    headlines=HEADLINES,
)
RQ2 = Experiment(
    name="cace-rq2",
    title="Effect of dispatch order and of weights in host memory",
    source=f"{SOURCE}, workload patterns; extended by orders and tiers",
    run=run_rq2,
    plot=plot_rq2,
    headlines=HEADLINES,
)
ABLATION = Experiment(
    name="cace-ablation",
    title="CACE's factors one at a time, and its printed forms",
    source=f"{SOURCE}, ablation",
    run=run_ablation,
    plot=plot_ablation,
    headlines=HEADLINES,
)
EXPERIMENTS = (RQ1, RQ2, ABLATION)
