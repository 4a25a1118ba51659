"""Router shards: the loss when several routers own disjoint replicas of a pool.

A thousand replicas and up to ten thousand calls a second, more than one router can handle. The
strongest baseline is one router that sees all replicas; a shard drawn at random shows the value of
the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from zlib import crc32

import numpy as np

from cato.core.ids import PoolName, TaskName
from cato.core.slo import SloMetric
from cato.core.snapshot import Invocation
from cato.lab.studies.completions import CHUNK_TOKENS, ENGINE, rate_per_s
from cato.lab.study import Study, Trial
from cato.policies.schedulers import FORESIGHT, OF_PROFILE
from cato.sim import plots
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.metrics import metrics_of
from cato.sim.report import Report, Sample, Target, mean_and_stderr
from cato.sim.shards import ShardedFleet
from cato.sim.tasks import SimNode, SimTask
from cato.sim.workloads import belief, lengths, poisson

POOL = PoolName("engine")
# Mean tokens of prompt and output, and a TTFT target that a few percent miss. Load 1 of a thousand
# replicas is 10,500 calls a second.
PROMPT, OUTPUT, TTFT_S = 1200, 120, 0.12
REPLICAS, QUICK_REPLICAS = 1000, 100
LOADS, QUICK_LOADS = (0.8, 0.95, 1.1), (0.95, 1.1)
SECONDS = 4.0
INGRESSES = 20
# Message delays of links.
DISPATCH_S, NEWS_S = 1e-3, 1e-3
# A third of the calls belong to tenants, the largest of which has a fifth of those; a third belong
# to editors' buffers, where a newer call supersedes an older one.
TENANTS, BUFFERS = 20, 40_000
ONE, RANDOM = "one-router", "4-shards-at-random"
SHARDS = {ONE: 1, "2-shards": 2, "4-shards": 4, "16-shards": 16, RANDOM: 4}
# Points of attainment that shards may lose.
GOAL_POINTS = 0.5


def tasks(load: float, replicas: int, seed: int) -> list[SimTask]:
    """Poisson arrivals of single calls."""
    rng = np.random.default_rng([seed, 22, replicas, round(100 * load)])
    rate = load * replicas * rate_per_s(PROMPT, OUTPUT)
    n = round(rate * SECONDS)
    times = poisson(rng, rate, n)
    prompts, outputs = lengths(rng, PROMPT, n), lengths(rng, OUTPUT, n)
    draws, kinds = rng.random(n), rng.integers(3, size=n)
    weights = 1 / np.arange(1, TENANTS + 1)
    tenants = rng.choice(TENANTS, n, p=weights / weights.sum())
    buffers = rng.integers(BUFFERS * replicas // REPLICAS, size=n)
    known = belief(OUTPUT)
    return [
        SimTask(
            f"c{i}",
            TaskName("completion"),
            times[i],
            SloMetric.TTFT,
            TTFT_S,
            (SimNode(POOL, int(prompts[i]), int(outputs[i]), OUTPUT, known),),
            (float(draws[i]),),
            tenant=f"t{tenants[i]}" if kinds[i] == 0 else "",
            buffer=f"b{buffers[i]}" if kinds[i] == 1 else "",
        )
        for i in range(n)
    ]


def _at_random(invocation: Invocation, shards: int) -> int:
    return crc32(invocation.id.encode()) % shards


def _measured(load: float, replicas: int, arm: str, seed: int) -> Mapping[str, float]:
    setup = PoolSetup(
        POOL,
        (ENGINE,) * replicas,
        OF_PROFILE[FORESIGHT](ENGINE, ENGINE.max_running),
        chunk_tokens=CHUNK_TOKENS,
        dispatch_s=DISPATCH_S,
        news_s=NEWS_S,
    )
    choose = _at_random if arm == RANDOM else None
    fleet = ShardedFleet(setup, SHARDS[arm], INGRESSES, choose)
    outcomes = fleet.run(tasks(load, replicas, seed))
    # Superseded calls are neither in time nor late.
    judged = [o for o in outcomes if not o.refused]
    return metrics_of(fleet, outcomes) | {
        "slo_attainment": fmean(o.is_met for o in judged),
        "superseded": 1 - len(judged) / len(outcomes),
        "largest_share": max(fleet.sent) / fmean(fleet.sent),
    }


def _cells(options: Options) -> list[Trial]:
    sizes = (QUICK_REPLICAS,) if options.quick else (QUICK_REPLICAS, REPLICAS)
    return [
        Trial({"replicas": replicas, "load": load}, partial(_measured, load, replicas))
        for replicas in sizes
        for load in (QUICK_LOADS if options.quick else LOADS)
    ]


def _targets(samples: Sequence[Sample]) -> list[Target]:
    """The shards' largest loss of attainment versus one router."""
    losses: list[tuple[float, float, str]] = []
    by_arm: dict[tuple[str, str], dict[int, float]] = {}
    for s in samples:
        where = ", ".join(f"{k} {v}" for k, v in s.setting.items())
        by_arm.setdefault((where, s.policy), {})[s.seed] = 100 * s.metrics["slo_attainment"]
    for (where, arm), points in by_arm.items():
        one = by_arm.get((where, ONE))
        if arm not in (ONE, RANDOM) and one is not None:
            lost = [one[seed] - points[seed] for seed in points if seed in one]
            losses.append((*mean_and_stderr(lost), f"{arm}, {where}"))
    if not losses:
        return []
    points_lost, stderr, where = max(losses)
    text = f"points of attainment that shards lose to one router, at most ({where})"
    return [Target(0, text, GOAL_POINTS, points_lost, stderr, at_least=False)]


def _plot(report: Report, folder: Path) -> list[Path]:
    fig, (axis,) = plots.figure(1)
    means = [m for m in report.means if m.metric == "slo_attainment"]
    plots.lines(axis, means, "load", "attainment")
    axis.set_xlabel("load")
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


STUDY = Study(
    "router-shards",
    "one router of a thousand replicas beside shards that own disjoint parts of them",
    "CATO project; decision record 29",
    tuple(SHARDS),
    _cells,
    _targets,
    _plot,
    ("slo_attainment", "ttft_s_p95", "superseded", "largest_share"),
    reference="4-shards",
    quick_arms=(ONE, "4-shards", RANDOM),
    quick_seeds=3,
)
