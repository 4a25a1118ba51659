"""CACE's workload on accelerators of two speeds, which the paper leaves to future work.

Two fast accelerators and two slow ones: calls take three times as long there, loads twice. Weights
stay in the host's memory, so that a cold start of a completion meets its SLO (1 s) on a fast
accelerator (0.7 s) and misses it on a slow one (1.4 s); answers that reason (10 s) meet theirs on
both (3.5 and 7 s). All arms serve in the order `queue-aware`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from cato.core.eviction import CardPolicies, EvictionPolicy, SitePolicy
from cato.core.ids import DeploymentName
from cato.lab.experiments.cace import COUNT, GROUP, PATTERNS, SOURCE
from cato.lab.experiments.cace_plots import by_pattern
from cato.lab.experiments.common import paired_target
from cato.lab.study import Study, Trial
from cato.policies.eviction.cace import Cace
from cato.policies.eviction.foresight import ForesightEviction
from cato.policies.eviction.lfu import LeastFrequentlyUsed
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import QueueAware
from cato.policies.eviction.sites import ShapeBlind, UrgentOnFast
from cato.sim import card_workload, cards
from cato.sim.cards import CardShape
from cato.sim.experiment import Options
from cato.sim.report import Sample, Target

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


def _measured(pattern: str, rate_per_s: float, arm: str, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    arrivals = card_workload.arrivals(PATTERNS[pattern], rate_per_s, COUNT, rng)
    eviction, sites = ARMS[arm]
    policies = CardPolicies(eviction, QueueAware(), sites)
    return cards.run(arrivals, policies, cards.HOST_WEIGHTS_BYTES, SHAPES).metrics()


def _cells(options: Options) -> list[Trial]:
    return [
        Trial({"pattern": pattern, "rate_per_s": rate}, partial(_measured, pattern, rate))
        for pattern in ("uniform", "skewed")
        for rate in (RATES_PER_S[:1] if options.quick else RATES_PER_S)
    ]


def _targets(samples: Sequence[Sample]) -> list[Target]:
    """That the rule is no loss, with each eviction policy."""
    targets = []
    for setting in {tuple(s.setting.items()): s.setting for s in samples}.values():
        for arm in ("cace", DEFAULT):
            where = f"{setting['pattern']}, {setting['rate_per_s']}/s"
            targets += paired_target(
                GROUP,
                f"attainment by urgent-on-fast, {arm}, {where} [points]",
                0.0,
                samples,
                (arm, setting),
                (arm + BLIND, setting),
                lambda a, b: 100 * (a["slo_attainment"] - b["slo_attainment"]),
            )
    return targets


STUDY = Study(
    "cace-mixed",
    "Two speeds of accelerators: which model is loaded where",
    f"{SOURCE}, future work",
    tuple(ARMS),
    _cells,
    _targets,
    partial(by_pattern, "{rate_per_s}/s, two speeds", {"slo_attainment": "SLO attainment"}),
    ("slo_attainment", "hit_rate", "load_s"),
    COMPARED,
    reference=DEFAULT,
    called="arm",
    metrics=cards.NAMES,
)
