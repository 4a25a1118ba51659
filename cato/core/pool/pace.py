"""How fast replicas are, against their profile.

A profile may have been measured on another machine, or on an idle one. It is wrong by a factor more
than by anything else, and a router sees the factor: tokens come at another pace than predicted.
Small differences are left alone, as chance gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log

from cato.core.profile import Profile

# Factors of a pace are powers of this, so that predictions change seldom; one is left when what is
# seen is nearer to another by so much of a power.
PACE_STEP, PACE_HYSTERESIS = 1.15, 0.75
MOST_PACE_STEPS = 12
# Intervals between two reports of a stream: so many say something, and so many are remembered.
LEAST_INTERVALS, INTERVALS_KEPT = 40, 400
# An interval in which others' prompts take more than this share tells of little else.
MOST_PROMPTS = 0.5
_KEPT, _LOG_STEP = 1 - 1 / INTERVALS_KEPT, log(PACE_STEP)


@dataclass(slots=True)
class Pace:
    """How many times longer than `profile` says its replicas take."""

    profile: Profile
    step: int = 0
    _seen: int = 0
    _took_s: float = 0.0
    _predicted_s: float = 0.0

    @property
    def corrected(self) -> Profile:
        return self.profile if not self.step else _slowed(self.profile, self.step)

    def saw(self, took_s: float, predicted_s: float) -> bool:
        """Of an interval: what it took, and what `corrected` predicts; whether that changes."""
        self._took_s = _KEPT * self._took_s + took_s
        self._predicted_s = _KEPT * self._predicted_s + predicted_s
        self._seen += 1
        if self._seen < LEAST_INTERVALS or self._took_s <= 0.0 or self._predicted_s <= 0.0:
            return False
        steps = log(self._took_s / self._predicted_s) / _LOG_STEP
        if abs(steps) < PACE_HYSTERESIS:
            return False
        before = self.step
        self.step = max(-MOST_PACE_STEPS, min(MOST_PACE_STEPS, before + round(steps)))
        self._seen, self._took_s, self._predicted_s = 0, 0.0, 0.0
        return self.step != before


@lru_cache(maxsize=256)
def _slowed(profile: Profile, step: int) -> Profile:
    return profile.slowed(PACE_STEP**step)
