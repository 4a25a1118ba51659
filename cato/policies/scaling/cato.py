"""CATO, "SLA-Awareness for AI-assisted coding" (2025), Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.scaling import Finished, PoolLoad, Scale


@dataclass(frozen=True, slots=True)
class CatoScalingState:
    """Violations since replicas were last added."""

    violations: int = 0


@dataclass(frozen=True, slots=True)
class CatoScaling:
    """Counts calls that were too slow for what their run has left; adds as many as are not idle.

    A call violates when its latency exceeds its target by more than `max_exceeded_proportion` and
    slack cannot cover what remains. Once the violations pass `max_exceeded_times` and the idle
    replicas, `violations - idle` replicas are added, within the maximum, and the count restarts.
    A replica that was idle for `idle_timeout_s` goes.

    Deviations from the printed text (`is_literal`), whose target includes the time to load the
    model and whose remaining time leaves out the queueing delay, so that a run is short of slack
    only when it never had enough: it orders nothing in the first minute of `coding-scaling` and
    later only where calls have queued for longer than a start takes. Here the target is the
    execution alone; slack is what is left when the call has ended, which is the same as to add its
    wait to what remained at its arrival; and replicas that are starting count as idle, or each
    violation during a cold start would order more. One counter a model, which is a pool here.
    Violations count even where slack is negative and a replica is idle, where line 17 returns
    without counting.

    The paper's experiment has "1 SLA violation before scaling": 1 in `cato-rq4`, where by line 29
    (count > 1) the second violation scales. The defaults were chosen on seeds 0-9 of
    `coding-scaling`: 3 violations and 60 s of idleness served this policy best over all settings,
    and the proportion (0, 0.2, 0.5) hardly matters.
    """

    max_exceeded_proportion: float = 0.2
    max_exceeded_times: int = 3
    idle_timeout_s: float = 60.0
    is_literal: bool = False

    def initial(self) -> CatoScalingState:
        return CatoScalingState()

    def decide(self, load: PoolLoad, state: CatoScalingState) -> tuple[Scale, CatoScalingState]:
        violations = state.violations + sum(self._violates(f, load) for f in load.finished)
        idle = sum(r.held == 0 for r in load.ready)
        if not self.is_literal:
            idle += load.starting
        if violations > self.max_exceeded_times and violations > idle:
            goal = load.bounded(load.provisioned + violations - idle)
            reason = f"{violations} violations, {idle} replicas idle or starting"
            return Scale(goal, reason), CatoScalingState()
        unused = sum(r.held == 0 and r.idle_s >= self.idle_timeout_s for r in load.ready)
        goal = load.bounded(load.provisioned - unused)
        reason = f"{unused} replicas idle for {self.idle_timeout_s:g} s, {violations} violations"
        return Scale(goal, reason), CatoScalingState(violations)

    def _violates(self, call: Finished, load: PoolLoad) -> bool:
        target_s, slack_s, remaining_s = call.expected_s, call.slack_s, call.downstream_s
        if self.is_literal:
            target_s += load.start_s
            slack_s += call.latency_s  # as it was at the arrival
            remaining_s += call.expected_s
        is_slow = call.latency_s > (1 + self.max_exceeded_proportion) * target_s
        return is_slow and remaining_s > slack_s
