"""Scaling to and from zero for a pool whose minimum is 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cato.core.scaling import PoolLoad, Scale, ScalingPolicy


@dataclass(frozen=True, slots=True)
class IdleState:
    """`busy_at_s`: when the pool last had or awaited work (None: before the first look)."""

    inner: Any
    busy_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class IdleToZero:
    """Another policy decides while there is work; after `idle_timeout_s` without it all stop.

    Work: queued or running calls, arrivals, and calls that runs in flight will still make. A pool
    without replicas gets one when the policy wants it or when the first call waits. Policies alone
    do neither: a pool without replicas has no ends and no ratios to judge by.
    """

    policy: ScalingPolicy[Any]
    idle_timeout_s: float

    def initial(self) -> IdleState:
        return IdleState(self.policy.initial())

    def decide(self, load: PoolLoad, state: IdleState) -> tuple[Scale, IdleState]:
        scale, inner = self.policy.decide(load, state.inner)
        is_busy = load.queued + load.running > 0 or load.coming_s > 0
        is_busy = is_busy or load.begun.count + load.arrived.count > 0
        busy_at_s = state.busy_at_s
        if is_busy or busy_at_s is None:
            busy_at_s = load.now_s
        after = IdleState(inner, busy_at_s)
        idle_s = load.now_s - busy_at_s
        if load.min_replicas > 0:
            return scale, after
        if idle_s >= self.idle_timeout_s:
            return Scale(0, f"no work for {idle_s:.0f} s"), after
        if scale.replicas == 0 and load.queued > 0:
            return Scale(load.bounded(1), f"{load.queued} calls wait; {scale.reason}"), after
        if scale.replicas == 0 and load.provisioned > 0:
            reason = f"without work for {idle_s:.0f} of {self.idle_timeout_s:g} s; {scale.reason}"
            return Scale(load.bounded(1), reason), after
        return scale, after
