"""Router shards: the loss when several routers own disjoint replicas of a pool.

A thousand replicas and up to ten thousand calls a second, more than one router can handle. The
strongest baseline is one router that sees all replicas. A shard at random, the shortest queue and
the better of two shards show the value of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np

from cato.core.ids import PoolName, TaskName
from cato.core.profile import Profile
from cato.core.shards import NO_LOAD, ShardChoice, ShardLoad, draw_of
from cato.core.slo import SloMetric
from cato.core.snapshot import Invocation
from cato.lab.studies.completions import CHUNK_TOKENS, ENGINE, rate_per_s
from cato.lab.study import Study, Trial
from cato.policies.schedulers import FORESIGHT, OF_PROFILE
from cato.sim import plots
from cato.sim.experiment import Options
from cato.sim.fleet import PoolSetup
from cato.sim.metrics import NAMES, metrics_of
from cato.sim.report import Report, Sample, Target, mean_and_stderr
from cato.sim.shards import Choice, ShardedFleet
from cato.sim.tasks import Outcome, SimNode, SimTask
from cato.sim.workloads import belief, lengths, poisson

POOL = PoolName("engine")
# Mean tokens of prompt and output. Load 1 of a thousand replicas is 10,500 calls a second.
PROMPT, OUTPUT = 1200, 120
# The rule of the studies of agents: twice the mean TTFT of a call alone.
TTFT_S = 2.0 * ENGINE.first_token_s(PROMPT)
REPLICAS, QUICK_REPLICAS = 1000, 100
LOADS, QUICK_LOADS = (0.8, 0.95, 1.1), (0.95, 1.1)
SECONDS = 4.0
INGRESSES = 20
# Message delays of links.
DISPATCH_S, NEWS_S = 1e-3, 1e-3
# A third of the calls belong to tenants, the largest of which has a fifth of those; a third belong
# to editors' buffers, where a newer call supersedes an older one.
TENANTS, BUFFERS = 20, 40_000
ONE = "one-router"
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


class AtRandom:
    """Any shard: arrivals differ by chance alone."""

    def __init__(self, shards: int) -> None:
        pass

    def tell(self, shard: int, load: ShardLoad) -> None:
        pass

    def choose(self, invocation: Invocation, shards: Sequence[int], profile: Profile) -> int:
        return shards[int(draw_of(invocation) * len(shards))]


class ShortestQueue:
    """The shard with the fewest calls per replica, by the same reports and own calls since then.

    `looks_at`: how many shards drawn at random it compares (None: all).
    """

    def __init__(self, shards: int, looks_at: int | None = None) -> None:
        self._loads = [NO_LOAD] * shards
        self._sent = [0] * shards
        self._looks_at = looks_at or shards

    def tell(self, shard: int, load: ShardLoad) -> None:
        self._loads[shard], self._sent[shard] = load, 0

    def choose(self, invocation: Invocation, shards: Sequence[int], profile: Profile) -> int:
        some = Random(draw_of(invocation)).sample(list(shards), self._looks_at)
        shard = min(some, key=self._calls)
        self._sent[shard] += 1
        return shard

    def _calls(self, shard: int) -> float:
        """Calls per replica."""
        load = self._loads[shard]
        queued = load.wait_s / load.call_s if load.call_s else 0.0
        return (load.held + queued + self._sent[shard]) / max(1, load.replicas)


# The number of shards, and how an ingress chooses among them.
ARMS: dict[str, tuple[int, Callable[[int], Choice]]] = {
    ONE: (1, ShardChoice),
    "2-shards": (2, ShardChoice),
    "4-shards": (4, ShardChoice),
    "16-shards": (16, ShardChoice),
    "4-shards-at-random": (4, AtRandom),
    "4-shards-shortest-queue": (4, ShortestQueue),
    "4-shards-two-choices": (4, partial(ShortestQueue, looks_at=2)),
}
OURS = ("2-shards", "4-shards", "16-shards")
OF_SHARDS = ("worst_tenant", "superseded", "largest_share")


def measured(load: float, replicas: int, arm: str, seed: int) -> Mapping[str, float]:
    setup = PoolSetup(
        POOL,
        (ENGINE,) * replicas,
        OF_PROFILE[FORESIGHT](ENGINE, ENGINE.max_running),
        chunk_tokens=CHUNK_TOKENS,
        dispatch_s=DISPATCH_S,
        news_s=NEWS_S,
    )
    shards, choice = ARMS[arm]
    fleet = ShardedFleet(setup, shards, INGRESSES, choice)
    outcomes = fleet.run(tasks(load, replicas, seed))
    wanted = still_wanted([o.task for o in outcomes])
    judged = [o for o, is_wanted in zip(outcomes, wanted, strict=True) if is_wanted]
    by_tenant: dict[str, list[bool]] = {}
    for o in judged:
        by_tenant.setdefault(o.task.tenant, []).append(_is_in_time(o))
    return metrics_of(fleet, outcomes) | {
        "slo_attainment": fmean(map(_is_in_time, judged)),
        "worst_tenant": min(map(fmean, by_tenant.values())),
        "superseded": fmean(o.refused for o in outcomes),
        "largest_share": max(fleet.sent) / fmean(fleet.sent),
    }


def _is_in_time(outcome: Outcome) -> bool:
    """By its first token alone: a newer call may supersede it after that."""
    return outcome.ttft_s <= outcome.task.target_s * (1 + 1e-9)


def still_wanted(tasks: Sequence[SimTask]) -> list[bool]:
    """For each task, whether no newer one of its buffer arrives before its target: the same in
    every arm, however many calls an arm supersedes."""
    wanted, newer_at_s = [], dict[str, float]()
    for task in reversed(tasks):
        wanted.append(not task.buffer or newer_at_s.get(task.buffer, inf) > task.deadline_s)
        newer_at_s[task.buffer] = task.arrived_at_s
    return wanted[::-1]


def _cells(options: Options) -> list[Trial]:
    sizes = (QUICK_REPLICAS,) if options.quick else (QUICK_REPLICAS, REPLICAS)
    return [
        Trial({"replicas": replicas, "load": load}, partial(measured, load, replicas))
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
        if arm in OURS and one is not None:
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
    tuple(ARMS),
    _cells,
    _targets,
    _plot,
    ("slo_attainment", "worst_tenant", "ttft_s_p95", "superseded", "largest_share"),
    reference="4-shards",
    metrics=(*NAMES, *OF_SHARDS),
    quick_arms=(ONE, "4-shards", "4-shards-at-random", "4-shards-shortest-queue"),
    quick_seeds=3,
)
