"""Shared by the scheduling experiments: one run of one fleet, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan

import numpy as np

from cato.core.slo import SloMetric
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.metrics import metrics_of
from cato.sim.report import Sample, Setting, Target, mean_and_stderr
from cato.sim.tasks import Outcome, SimTask


def measured(setups: Sequence[PoolSetup], tasks: Sequence[SimTask]) -> dict[str, float]:
    """Run `tasks` on a fresh fleet to the end."""
    fleet = Fleet(setups)
    return metrics_of(fleet, fleet.run(tasks))


def judged_s(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Latencies by which the finished tasks of each name are judged: TTFT or E2E."""
    found: dict[str, list[float]] = {}
    for o in outcomes:
        times = found.setdefault(o.task.name, [])
        if o.is_finished:
            times.append(o.ttft_s if o.task.metric is SloMetric.TTFT else o.e2e_s)
    return dict(sorted(found.items()))


_BY_TASK = ("slo_attainment", "judged_s_mean", "judged_s_p95", "judged_s_p99")


def names_by_task(tasks: Iterable[str]) -> tuple[str, ...]:
    """The names of `metrics_by_task`."""
    return tuple(f"{metric}.{task}" for task in tasks for metric in _BY_TASK)


def metrics_by_task(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Attainment and judged latency of each task; the task's name is the metric's suffix."""
    metrics: dict[str, float] = {}
    for name, times in judged_s(outcomes).items():
        met = [o.is_met for o in outcomes if o.task.name == name]
        mean, p95, p99 = (
            (float(np.mean(times)), *map(float, np.quantile(times, (0.95, 0.99))))
            if times
            else (nan, nan, nan)
        )
        values = (sum(met) / len(met), mean, p95, p99)
        metrics |= zip(names_by_task((name,)), values, strict=True)
    return metrics


def attainment_gap(
    samples: Sequence[Sample],
    policy: str,
    baseline: str,
    wanted: Callable[[Setting], bool],
) -> tuple[float, float] | None:
    """Attainment of `policy` minus `baseline` in percentage points, paired by seed: mean over the
    wanted settings, and its error; None when they share no setting.

    The error is that of the mean over seeds of the mean over settings, because settings that share
    a seed are not independent.
    """
    by_seed: dict[int, dict[tuple[object, str], float]] = {}
    for s in samples:
        if s.policy in (policy, baseline) and wanted(s.setting):
            key = (tuple(s.setting.items()), s.policy)
            by_seed.setdefault(s.seed, {})[key] = s.metrics["slo_attainment"]
    gaps = []
    for runs in by_seed.values():
        settings = dict.fromkeys(key for key, _ in runs)
        both = [k for k in settings if (k, policy) in runs and (k, baseline) in runs]
        if both:
            each = [runs[k, policy] - runs[k, baseline] for k in both]
            gaps.append(100 * sum(each) / len(each))
    return mean_and_stderr(gaps) if gaps else None


def paired_target(
    group: int,
    text: str,
    goal: float,
    samples: Sequence[Sample],
    one: tuple[str, Setting],
    other: tuple[str, Setting],
    value: Callable[[Mapping[str, float], Mapping[str, float]], float],
    at_least: bool = True,
) -> list[Target]:
    """A target for the mean of `value` over the seeds; none when either policy did not run there.

    `one` and `other`: a policy in a setting.
    """

    def of(policy: str, setting: Setting) -> dict[int, Mapping[str, float]]:
        return {s.seed: s.metrics for s in samples if s.policy == policy and s.setting == setting}

    ours, theirs = of(*one), of(*other)
    values = [value(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    return [Target(group, text, goal, *mean_and_stderr(values), at_least)] if values else []
