"""Counterfactual replay: a recorded pool under other policies.

Arrivals, lengths and the replicas' lifetimes are as recorded. Times on the replicas are simulated
from their profiles. The recorded policy is simulated too: its difference from the record is the
simulator's error, plus the effect of any change of policy or profile during the recording (the
simulation uses one throughout). A call that followed another call's end keeps its recorded arrival:
a faster answer does not bring the next question sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np

from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of
from cato.sim import looks, plots
from cato.sim.fleet import Fleet, PoolSetup, SimPool
from cato.sim.recorded import History, RecordedTask, ReplicaSpan, history_of
from cato.sim.report import Mean, Report
from cato.sim.tasks import Outcome, task_metrics
from cato.telemetry.event_log import Recording

RECORDED = "recorded"
EVERY_TASK = "all"


def simulated(history: History, names: PoolPolicies) -> tuple[Outcome, ...]:
    """The calls of `history` under the policies of `names`; raise `UnknownNameError`."""
    fleet = Fleet([PoolSetup(history.pool, (), policies_of(names, history.profile))])
    pool = fleet.pools[history.pool]
    for span in history.replicas:
        fleet.kernel.at(span.from_s, lambda span=span: _lend(fleet, pool, span))  # type: ignore[misc]
    for task in history.tasks:
        if task.cancelled_at_s < inf:
            fleet.kernel.at(task.cancelled_at_s, lambda id=task.id: fleet.leave(id))  # type: ignore[misc]
    outcomes = fleet.run(history.tasks)
    return tuple(
        o for o in outcomes if isinstance(o.task, RecordedTask) and o.task.cancelled_at_s == inf
    )


def _lend(fleet: Fleet, pool: SimPool, span: ReplicaSpan) -> None:
    before = set(pool.replicas)
    pool.add_replica(span.profile)
    (id,) = set(pool.replicas) - before

    def lose() -> None:
        if id in pool.replicas:
            pool.lose_replica(id)

    if span.until_s < inf:
        fleet.kernel.at(span.until_s, lose)


def compare(recording: Recording, schedulers: Sequence[str]) -> tuple[History, Report]:
    """The record, its own scheduler simulated, and each of `schedulers`.

    Raise `InputError` for an empty log, `UnknownNameError` for an unknown scheduler.
    """
    history = history_of(recording)
    own = history.names.scheduler
    runs = {RECORDED: history.outcomes}
    for name in dict.fromkeys((own, *schedulers)):
        names = history.names if name == own else replace(PoolPolicies(), scheduler=name)
        names = replace(names, max_queued=history.names.max_queued)
        runs[f"{name}, simulated"] = simulated(history, names)
    means = [
        Mean({"task": task}, policy, metric, value, 0.0, len(mine))
        for policy, outcomes in runs.items()
        for task, mine in _by_task(outcomes).items()
        for metric, value in task_metrics(mine).items()
    ]
    curves = {
        policy: _quantiles([o.ttft_s for o in outcomes if o.is_finished])
        for policy, outcomes in runs.items()
    }
    extra = {"pool": history.pool, "ttft_s_quantiles": curves}
    return history, Report(f"replay {history.pool}", (), tuple(means), extra=extra)


def _by_task(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {EVERY_TASK: list(outcomes)}
    for outcome in sorted(outcomes, key=lambda o: o.task.name):
        found.setdefault(outcome.task.name, []).append(outcome)
    return found


def _quantiles(values: Sequence[float]) -> list[float]:
    """The 0th to the 100th percentile; empty for no values."""
    return [float(q) for q in np.quantile(values, np.linspace(0, 1, 101))] if values else []


def plot(report: Report, folder: Path) -> tuple[Path, ...]:
    """Attainment by task, and the distribution of TTFT, one colour per policy."""
    fig, (bars, curves) = plots.figure(columns=2)
    attained = [m for m in report.means if m.metric == "slo_attainment"]
    policies = list(dict.fromkeys(m.policy for m in attained))
    tasks = list(dict.fromkeys(str(m.setting["task"]) for m in attained))
    width = 0.8 / len(policies)
    quantiles = report.extra["ttft_s_quantiles"]
    assert isinstance(quantiles, dict)
    for i, policy in enumerate(policies):
        color = looks.COLORS[i % len(looks.COLORS)]
        mine = {str(m.setting["task"]): m.mean for m in attained if m.policy == policy}
        at = [k + (i - (len(policies) - 1) / 2) * width for k in range(len(tasks))]
        heights = [100 * mine.get(t, 0.0) for t in tasks]
        bars.bar(at, heights, 0.92 * width, label=policy, color=color)
        values = [max(1e-4, v) for v in quantiles[policy]]
        if values:
            curves.plot(values, range(101), label=policy, color=color)
    bars.set_xticks(range(len(tasks)), tasks, rotation=20, ha="right")
    bars.set_ylabel("SLO attainment [%]")
    bars.set_ylim(0, 105)
    bars.grid(alpha=0.3, axis="y")
    curves.set_xscale("log")
    curves.set_xlabel("time to first token of a call [s]")
    curves.set_ylabel("calls that had it by then [%]")
    curves.grid(alpha=0.3)
    curves.legend(fontsize=8)
    return (plots.save(fig, folder, report.experiment.replace(" ", "-")),)
