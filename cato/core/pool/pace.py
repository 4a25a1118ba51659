"""Measured speed of replicas relative to their profile.

A profile may come from another machine, or from an idle one. Its error is mostly a constant factor,
which the router sees as the ratio of observed to predicted token times. Small differences are
treated as noise; larger ones are corrected to what was seen (decision 0073).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import log

from cato.core.pool.pressure import Tally
from cato.core.profile import Profile

# The pace changes when what is seen differs by more than this factor, so that predictions change
# rarely. Paces are powers of the step, up to about a factor of five.
LEAST_ERROR, PACE_STEP = 1.11, 1.02
MOST_PACE_STEPS = 84
# Number of token intervals needed for a judgement, and number remembered.
LEAST_INTERVALS, INTERVALS_KEPT = 40, 400
# If other calls' prompts take more than this share of an interval, it says little about the pace.
MOST_PROMPTS = 0.5
# Turns of sessions are counted with this time constant.
TURNS_MEMORY_S = 90.0
_KEPT, _LOG_STEP = 1 - 1 / INTERVALS_KEPT, log(PACE_STEP)
_LEAST_STEPS = log(LEAST_ERROR) / _LOG_STEP


@dataclass(slots=True)
class Pace:
    """How many times longer than `profile` its replicas take, and how many turns of sessions were
    in time there lately (gained), and late (lost)."""

    profile: Profile
    step: int = 0
    turns: Tally = field(default_factory=lambda: Tally(TURNS_MEMORY_S))
    _seen: int = 0
    _took_s: float = 0.0
    _predicted_s: float = 0.0

    @property
    def corrected(self) -> Profile:
        return self.profile if not self.step else _slowed(self.profile, self.step)

    def saw(self, took_s: float, predicted_s: float) -> float:
        """Note an interval and the prediction of `corrected` for it.

        Returns the factor by which `corrected` is slower from now on; 1: unchanged.
        """
        self._took_s = _KEPT * self._took_s + took_s
        self._predicted_s = _KEPT * self._predicted_s + predicted_s
        self._seen += 1
        if self._seen < LEAST_INTERVALS or self._took_s <= 0.0 or self._predicted_s <= 0.0:
            return 1.0
        steps = log(self._took_s / self._predicted_s) / _LOG_STEP
        if abs(steps) < _LEAST_STEPS:
            return 1.0
        before = self.step
        self.step = max(-MOST_PACE_STEPS, min(MOST_PACE_STEPS, before + round(steps)))
        self._seen, self._took_s, self._predicted_s = 0, 0.0, 0.0
        return float(PACE_STEP ** (self.step - before))


@lru_cache(maxsize=256)
def _slowed(profile: Profile, step: int) -> Profile:
    return profile.slowed(PACE_STEP**step)
