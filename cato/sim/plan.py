"""Capacity planning: the fewest replicas with which a scenario's tasks meet their SLOs.

Attainment is assumed to rise with the replicas of every pool. Each pool's need while all others
have plenty is then a lower bound. Totals are tried upwards from the sum of these bounds; the first
total with a passing division is the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

from scipy.special import stdtrit

from cato.core.errors import InputError
from cato.core.ids import PoolName
from cato.sim.report import Mean, Report, Sample, mean_and_stderr, summarize
from cato.sim.scenario import Scenario
from cato.sim.scenario_runs import run_once
from cato.sim.scenario_tasks import tasks_of
from cato.sim.tasks import SimTask

CONFIDENCE = 0.95
"""One-sided confidence that a passing attainment is at least the goal."""

PLENTY = 4
"""Multiple of its bound given to a pool when testing whether it is the bottleneck."""


CURVE_MARGIN = 2
"""Replicas beyond the answer that a curve shows."""

# Smallest growth of the attainment that counts as growth.
NOTICEABLE = 0.01

Counts = tuple[int, ...]
Evaluate = Callable[[Counts], "Trial"]


@dataclass(frozen=True, slots=True)
class Trial:
    """Simulation results for one number of replicas of each pool.

    `lower`: lower bound of the attainment at `CONFIDENCE`. `seeds` may be fewer than requested:
    when the goal is out of reach even if all other seeds were perfect, they are skipped (`is_cut`).
    `means`: all metrics over those seeds.
    """

    scheduler: str
    counts: Counts
    attainment: float
    stderr: float
    lower: float
    seeds: int
    is_cut: bool
    is_enough: bool
    by_class: tuple[tuple[str, float], ...] = ()
    means: tuple[Mean, ...] = ()

    @property
    def replicas(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Plan:
    """The smallest sufficient trial, or None and `why_not`; all trials, in order."""

    scheduler: str
    found: Trial | None
    trials: tuple[Trial, ...]
    why_not: str = ""


def lower_bound(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Lower confidence bound of the mean of `values`: mean - t · standard error, Student's t with
    n - 1 degrees of freedom. A single value has none: -inf.
    """
    if len(values) < 2:
        return -math.inf
    mean, stderr = mean_and_stderr(values)
    return mean - float(stdtrit(len(values) - 1, confidence)) * stderr


def smallest(bounds: Counts, evaluate: Evaluate) -> Trial | None:
    """The smallest sufficient trial within 1..`bounds`; None when `bounds` itself is not enough."""
    if not evaluate(bounds).is_enough:
        return None
    lowest = tuple(_lowest(i, bounds, evaluate) for i in range(len(bounds)))
    failed: list[Counts] = []
    for counts in _ascending(lowest, bounds):
        if any(all(a <= b for a, b in zip(counts, f, strict=True)) for f in failed):
            continue
        trial = evaluate(counts)
        if trial.is_enough:
            return trial
        failed.append(counts)
    raise AssertionError("the full bounds passed before")


def _lowest(pool: int, bounds: Counts, evaluate: Evaluate) -> int:
    """The replicas that `pool` needs while the others have their full bounds."""
    low, high = 1, bounds[pool]
    while low < high:
        middle = (low + high) // 2
        if evaluate((*bounds[:pool], middle, *bounds[pool + 1 :])).is_enough:
            high = middle
        else:
            low = middle + 1
    return low


def _ascending(lowest: Counts, bounds: Counts) -> Iterator[Counts]:
    """All counts between the two, by their sum; among equal sums, even additions first."""
    pools = range(len(lowest))
    for extra in range(sum(bounds) - sum(lowest) + 1):
        added = (
            tuple(chosen.count(i) for i in pools)
            for chosen in combinations_with_replacement(pools, extra)
        )
        for more in sorted(added, key=lambda m: (max(m), m)):
            counts = tuple(low + n for low, n in zip(lowest, more, strict=True))
            if all(n <= bound for n, bound in zip(counts, bounds, strict=True)):
                yield counts


@dataclass(slots=True)
class Planner:
    """Simulates trials of one scenario and caches them; `watch` is called before each seed with
    scheduler, counts, index of the seed, number of seeds.
    """

    scenario: Scenario
    goal: float
    watch: Callable[[str, Counts, int, int], None]
    _tasks: dict[int, list[SimTask]]

    @classmethod
    def of(
        cls, scenario: Scenario, goal: float, watch: Callable[[str, Counts, int, int], None]
    ) -> Planner:
        """Raise `InputError` for an impossible goal or number of seeds."""
        if not 0 < goal < 1:
            raise InputError(f"an attainment of {goal:g} cannot be planned for: give e.g. 0.95")
        if len(scenario.seeds) < 2:
            raise InputError("a plan needs at least 2 seeds to know how sure it is; 5 are better")
        return cls(scenario, goal, watch, {})

    def plan(self, scheduler: str) -> Plan:
        """The fewest replicas with `scheduler`, or the pool that is the bottleneck."""
        trials: dict[Counts, Trial] = {}

        def evaluate(counts: Counts) -> Trial:
            if counts not in trials:
                trials[counts] = self.trial(scheduler, counts)
            return trials[counts]

        bounds = tuple(p.max_replicas for p in self.scenario.pools)
        found = smallest(bounds, evaluate)
        why_not = "" if found is not None else self._why_not(trials[bounds], evaluate)
        return Plan(scheduler, found, tuple(trials.values()), why_not)

    def around(self, plan: Plan, margin: int) -> Plan:
        """`plan` of one pool with every count tried, up to `margin` beyond the answer."""
        if plan.found is None or len(self.scenario.pools) != 1:
            return plan
        tried = {t.counts for t in plan.trials}
        most = min(plan.found.replicas + margin, self.scenario.pools[0].max_replicas)
        more = [self.trial(plan.scheduler, (n,)) for n in range(1, most + 1) if (n,) not in tried]
        return replace(plan, trials=(*plan.trials, *more))

    def trial(self, scheduler: str, counts: Counts) -> Trial:
        """Run seeds one by one until the goal is out of reach or all have run."""
        names = [p.name for p in self.scenario.pools]
        scenario = self.scenario.with_replicas(dict(zip(names, counts, strict=True)))
        seeds = scenario.seeds
        setting: dict[str, str | float] = dict(zip(names, map(float, counts), strict=True))
        setting["all replicas"] = float(sum(counts))
        samples: list[Sample] = []
        values: list[float] = []
        by_class: dict[str, list[float]] = {}
        for i, seed in enumerate(seeds):
            self.watch(scheduler, counts, i + 1, len(seeds))
            if seed not in self._tasks:
                self._tasks[seed] = tasks_of(scenario, seed)
            run = run_once(scenario, scheduler, self._tasks[seed])
            samples.append(Sample(setting, scheduler, seed, run.metrics))
            values.append(run.metrics["slo_attainment"])
            for name, metrics in run.by_class.items():
                by_class.setdefault(name, []).append(metrics["slo_attainment"])
            if sum(values) + len(seeds) - len(values) < self.goal * len(seeds):
                break
        mean, stderr = mean_and_stderr(values)
        is_cut = len(values) < len(seeds)
        lower = lower_bound(values)
        classes = tuple((name, mean_and_stderr(v)[0]) for name, v in by_class.items())
        is_enough = not is_cut and lower >= self.goal
        return Trial(
            scheduler,
            counts,
            mean,
            stderr,
            lower,
            len(values),
            is_cut,
            is_enough,
            classes,
            summarize(samples),
        )

    def _why_not(self, top: Trial, evaluate: Evaluate) -> str:
        """Give each pool plenty in turn to find the bottleneck."""
        pools = self.scenario.pools
        gains = []
        for i, pool in enumerate(pools):
            counts = (*top.counts[:i], PLENTY * top.counts[i], *top.counts[i + 1 :])
            gains.append((evaluate(counts).attainment - top.attainment, pool.name, counts[i]))
        reached = f"{_percent(top.attainment)} with {words(pools_of(self.scenario), top.counts)}"
        gain, name, count = max(gains)
        if gain >= NOTICEABLE:
            return (
                f"{reached}; pool {name!r} is short: {count} of it would give "
                f"{_percent(top.attainment + gain)}. Raise its max_replicas"
            )
        worst, attainment = min(top.by_class, key=lambda c: c[1])
        return (
            f"{reached}; more replicas of no pool help. The SLA of {worst!r} holds for "
            f"{_percent(attainment)} of its tasks: give it more time, or faster replicas"
        )


def pools_of(scenario: Scenario) -> tuple[PoolName, ...]:
    return tuple(p.name for p in scenario.pools)


def words(pools: Sequence[PoolName], counts: Counts) -> str:
    """`2 small + 3 large`."""
    return " + ".join(f"{n} {name}" for n, name in zip(counts, pools, strict=True))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def report_of(scenario: Scenario, goal: float, plans: Sequence[Plan]) -> Report:
    """All trials as means; the plans themselves under `extra`."""
    pools = pools_of(scenario)
    means = tuple(m for plan in plans for t in plan.trials for m in t.means)
    found = {
        p.scheduler: {
            "replicas": None if p.found is None else dict(zip(pools, p.found.counts, strict=True)),
            "lower_bound": None if p.found is None else p.found.lower,
            "why_not": p.why_not,
        }
        for p in plans
    }
    return Report(
        f"plan {scenario.name}", scenario.seeds, means, extra={"goal": goal, "plans": found}
    )
