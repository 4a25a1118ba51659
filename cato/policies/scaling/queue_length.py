"""Ray Serve's default autoscaling policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cato.core.scaling import PoolLoad, Scale

# Keeps a sum of floats from prolonging a delay; Ray Serve has the same.
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class QueueLengthState:
    """`samples`: (instant, ongoing calls) of the look-back period.

    `ongoing`: their mean, last reported at `told_at_s`. `since_s`: since when each look has wanted
    more (`is_up`) or fewer.
    """

    samples: tuple[tuple[float, float], ...] = ()
    ongoing: float = 0.0
    told_at_s: float = -math.inf
    since_s: float | None = None
    is_up: bool = False


@dataclass(frozen=True, slots=True)
class QueueLength:
    """As many replicas as hold `target_ongoing_requests` each: desired = ongoing / target.

    Ray Serve 2.60 (`ray/serve/autoscaling_policy.py`): ongoing (queued plus running calls) is the
    mean over `look_back_period_s`, reported every `metrics_interval_s`; a factor scales the
    difference to the running replicas; the result must stay above the present target for
    `upscale_delay_s`, or below it for `downscale_delay_s`, before it becomes the target. The
    defaults are Ray Serve's. Ignores lengths, deadlines and the start time of replicas.

    Not included: bounds come from `PoolLoad`, and scaling to and from zero from `IdleToZero`.
    """

    target_ongoing_requests: float = 2.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0
    metrics_interval_s: float = 10.0

    def initial(self) -> QueueLengthState:
        return QueueLengthState()

    def decide(self, load: PoolLoad, state: QueueLengthState) -> tuple[Scale, QueueLengthState]:
        now_s = load.now_s
        samples = (
            *(s for s in state.samples if s[0] > now_s - self.look_back_period_s),
            (now_s, float(load.queued + load.running)),
        )
        ongoing, told_at_s = state.ongoing, state.told_at_s
        if now_s - told_at_s + _ROUNDING_S >= self.metrics_interval_s:
            ongoing, told_at_s = math.fsum(n for _, n in samples) / len(samples), now_s
        target, ready = load.provisioned, len(load.ready)
        desired = self._desired(ongoing, ready) if ready else target
        since_s, replicas = None, target
        is_up = desired > target
        if desired != target:
            since_s = state.since_s
            if since_s is None or state.is_up != is_up:
                since_s = now_s
            delay_s = self.upscale_delay_s if is_up else self.downscale_delay_s
            if now_s - since_s + _ROUNDING_S >= delay_s:
                since_s, replicas = None, desired
        reason = f"{ongoing:.1f} ongoing calls want {desired} replicas"
        return (
            Scale(load.bounded(replicas), reason),
            QueueLengthState(samples, ongoing, told_at_s, since_s, is_up),
        )

    def _desired(self, ongoing: float, ready: int) -> int:
        """With at least one ready replica."""
        raw = ongoing / self.target_ongoing_requests
        factor = self.upscaling_factor if raw > ready else self.downscaling_factor
        desired = math.ceil(ready + factor * (raw - ready))
        if math.ceil(raw) < ready and desired == ready:
            desired -= 1  # a small factor would never reach the lower target
        return max(0, desired)
