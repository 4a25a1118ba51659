"""CACE: eviction policies, dispatch orders and host memory on its workload.

16 models share 4 accelerators. A loading accelerator serves nothing, so in-order dispatch can
serve about 0.5 invocations a second on the uniform pattern and 0.7 on the skewed one, whatever the
eviction policy: 0.1/s and 0.2/s are underload, 0.8/s is overload for it. Every run starts with
empty accelerators and continues until the last of `COUNT` invocations has finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from cato.core.eviction import CardPolicies, DispatchOrder, EvictionPolicy
from cato.lab.experiments.cace_plots import by_pattern, by_variant
from cato.lab.experiments.common import paired_target
from cato.lab.study import Study, Trial, no_targets
from cato.policies.eviction.belady import Belady
from cato.policies.eviction.cace import Cace
from cato.policies.eviction.foresight import ForesightEviction
from cato.policies.eviction.lfu import LeastFrequentlyUsed
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import BatchedPerModel, InOrder, QueueAware
from cato.policies.eviction.sites import ShapeBlind
from cato.sim import card_workload, cards
from cato.sim.experiment import Options
from cato.sim.report import Sample, Setting, Target

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
    "ttft_s_mean.completion",
    "e2e_s_mean",
    "e2e_s_mean.reasoning",
    "slo_attainment",
)
HEADLINES = ("hit_rate", "load_s", "slo_attainment")
# The paper's latencies.
PRINTED = ("ttft_s_mean.completion", "e2e_s_mean.reasoning")
METRICS = (*cards.NAMES, *PRINTED)
CALLED = "eviction policy"
PATTERNS: Mapping[str, card_workload.Pattern] = {p.name: p for p in card_workload.PATTERNS}

LRU, LFU, CACE, FORESIGHT, BELADY = "lru", "lfu", "cace", "foresight", "belady"
WITHOUT_OUTPUT = "cace without output"
"""The paper's CACE^-P4 (task criticality disabled), which its RQ1 compares with LRU."""
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
    WITHOUT_OUTPUT: Cace(output=False),
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
    WITHOUT_OUTPUT: Cace(output=False),
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
    "cace, in-order": (CACE, IN_ORDER),
    "cace without output, in-order": (WITHOUT_OUTPUT, IN_ORDER),
    "foresight, in-order": (FORESIGHT, IN_ORDER),
    "foresight, batched": (FORESIGHT, BATCHED),
    "foresight, queue-aware": (FORESIGHT, QUEUE_AWARE),
}
BASELINE, BEST = "lru, in-order", "foresight, queue-aware"
MEMORY: Mapping[str, int] = {"none": 0, "128 GB": cards.HOST_WEIGHTS_BYTES}


Arms = Mapping[str, tuple[EvictionPolicy | None, DispatchOrder]]
RQ1_ARMS: Arms = {name: (policy, InOrder()) for name, policy in POLICIES.items()}
RQ2_ARMS: Arms = {name: (POLICIES[e], ORDERS[o]) for name, (e, o) in STRATEGIES.items()}
ABLATION_ARMS: Arms = {name: (policy, InOrder()) for name, policy in ABLATED.items()}


def alike(eviction: EvictionPolicy, order: DispatchOrder) -> CardPolicies:
    """Policies of accelerators that are all alike."""
    return CardPolicies(eviction, order, ShapeBlind())


def _measured(
    arms: Arms, pattern: str, rate_per_s: float, host_weights_bytes: int, arm: str, seed: int
) -> dict[str, float]:
    """With the paper's latencies: TTFT of completions and E2E of reasoning."""
    rng = np.random.default_rng(seed)
    arrivals = card_workload.arrivals(PATTERNS[pattern], rate_per_s, COUNT, rng)
    eviction, order = arms[arm]
    policies = alike(eviction or Belady(card_workload.arrivals_s(arrivals)), order)
    run = cards.run(arrivals, policies, host_weights_bytes)
    ttft_s = [s.ttft_s for s in run.served if s.arrival.kind == card_workload.COMPLETION]
    e2e_s = [s.e2e_s for s in run.served if s.arrival.kind == card_workload.REASONING]
    return run.metrics() | dict(zip(PRINTED, (_mean(ttft_s), _mean(e2e_s)), strict=True))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _in_order(
    arms: Arms, patterns: Iterable[str], rates_per_s: Sequence[float], options: Options
) -> list[Trial]:
    """In-order dispatch, no host memory."""
    return [
        Trial({"pattern": pattern, "rate_per_s": rate}, partial(_measured, arms, pattern, rate, 0))
        for pattern in patterns
        for rate in rates_per_s
    ]


def _orders(options: Options) -> list[Trial]:
    """Dispatch orders with and without host memory."""
    return [
        Trial(
            {"pattern": pattern, "rate_per_s": rate, "host_memory": memory},
            partial(_measured, RQ2_ARMS, pattern, rate, weights_bytes),
        )
        for pattern in PATTERNS
        for rate in (UNDERLOAD_PER_S[0], OVERLOAD_PER_S)
        for memory, weights_bytes in MEMORY.items()
    ]


# Targets


def _hit_targets(samples: Sequence[Sample]) -> list[Target]:
    targets = []
    for rate in UNDERLOAD_PER_S:
        setting: Setting = {"pattern": "skewed", "rate_per_s": rate}
        targets += paired_target(
            GROUP,
            f"hit rate of foresight minus LRU, skewed, in-order, {rate}/s [points]",
            6.0,
            samples,
            (FORESIGHT, setting),
            (LRU, setting),
            lambda a, b: 100 * (a["hit_rate"] - b["hit_rate"]),
        )
        targets += paired_target(
            GROUP,
            f"hit rate of foresight over Belady, skewed, in-order, {rate}/s",
            0.8,
            samples,
            (FORESIGHT, setting),
            (BELADY, setting),
            lambda a, b: a["hit_rate"] / b["hit_rate"],
        )
    return targets


def _order_targets(samples: Sequence[Sample]) -> list[Target]:
    """The effect of host memory in underload, of the order in overload."""
    targets = []
    for policy in ("foresight, in-order", BEST):
        for pattern in PATTERNS:
            setting: dict[str, str | float] = {"pattern": pattern, "rate_per_s": UNDERLOAD_PER_S[0]}
            targets += paired_target(
                GROUP,
                f"load time without over with host memory, {pattern}, {policy}",
                2.5,
                samples,
                (policy, setting | {"host_memory": "128 GB"}),
                (policy, setting | {"host_memory": "none"}),
                lambda a, b: b["load_s"] / a["load_s"],
            )
    for baseline in ("foresight, in-order", BASELINE):
        for pattern in PATTERNS:
            setting = {"pattern": pattern, "rate_per_s": OVERLOAD_PER_S, "host_memory": "none"}
            targets += paired_target(
                GROUP,
                f"mean TTFT of {baseline} over {BEST}, overload, {pattern}",
                2.5,
                samples,
                (BEST, setting),
                (baseline, setting),
                lambda a, b: b["ttft_s_mean"] / a["ttft_s_mean"],
            )
    return targets


STUDIES = (
    Study(
        "cace-rq1",
        "Hit rate and latency by eviction policy, pattern and load",
        f"{SOURCE}, workload patterns",
        tuple(RQ1_ARMS),
        partial(_in_order, RQ1_ARMS, PATTERNS, (*UNDERLOAD_PER_S, OVERLOAD_PER_S)),
        _hit_targets,
        partial(
            by_pattern,
            "{rate_per_s}/s, in order",
            {"hit_rate": "hit rate", "ttft_s_mean": "mean TTFT [s]"},
        ),
        HEADLINES,
        COMPARED,
        called=CALLED,
        metrics=METRICS,
    ),
    Study(
        "cace-rq2",
        "Effect of dispatch order and of weights in host memory",
        f"{SOURCE}, workload patterns; extended by orders and tiers",
        tuple(RQ2_ARMS),
        _orders,
        _order_targets,
        partial(
            by_pattern,
            "{rate_per_s}/s, host memory: {host_memory}",
            {"ttft_s_mean": "mean TTFT [s]", "load_s": "total load time [s]"},
            dwarfs=True,  # in-order dispatch, in overload
        ),
        HEADLINES,
        COMPARED,
        reference=BEST,
        called=CALLED,
        metrics=METRICS,
    ),
    # In underload and where queues form. The demand factor changes nothing in either: orders that
    # never leave an accelerator idle while the head could use it have a queue only while at most
    # one replica may be evicted, and then there is no choice.
    Study(
        "cace-ablation",
        "CACE's factors one at a time, and its printed forms",
        f"{SOURCE}, ablation",
        tuple(ABLATION_ARMS),
        partial(
            _in_order, ABLATION_ARMS, ("uniform", "skewed"), (UNDERLOAD_PER_S[1], SATURATED_PER_S)
        ),
        no_targets,
        by_variant,
        HEADLINES,
        COMPARED,
        reference=CACE,
        called=CALLED,
        metrics=METRICS,
    ),
)
