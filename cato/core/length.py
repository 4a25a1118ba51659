"""Beliefs about output lengths, before and during generation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import exp
from operator import le
from statistics import NormalDist

# An output longer than every believed length is expected to continue for this share of itself; one
# of which nothing is known for as long again.
_OVERRUN, _OVERRUN_OF_UNKNOWN = 0.2, 1.0
# Minimum deviation of the logarithm of a length, since no estimator is better. Lengths known this
# well gain 6 to 8 points over class means; exact ones lost 30 (ALGORITHMS.md, section 4).
LEAST_SPREAD = 0.15
# A belief counts as a point if this share of it lies within `LEAST_SPREAD` either way.
_POINT_SHARE = 0.5


def _lognormal(spread: float, points: int) -> tuple[float, ...]:
    """Quantiles of a lognormal distribution with mean 1; of few, the mean is a little less."""
    log_length = NormalDist(-(spread**2) / 2, spread)
    return tuple(exp(log_length.inv_cdf((i + 0.5) / points)) for i in range(points))


_SMEARED = _lognormal(LEAST_SPREAD, 16)


@dataclass(frozen=True, slots=True)
class LengthBelief:
    """Equally likely total output lengths, in tokens, ascending.

    An estimator gives quantiles at (i + 0.5)/n. They are conditioned on the tokens already
    generated: the length given that it exceeds g (survival; ALGORITHMS.md, section 6, pitfall d).
    Beyond all of them it is expected to continue for the share `overrun` of itself.
    """

    points: tuple[float, ...]
    overrun: float = _OVERRUN
    _sum_from: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.points, "a belief needs at least one length"
        assert all(map(le, self.points, self.points[1:])), "unsorted"
        sums = tuple(accumulate(reversed(self.points), initial=0.0))[::-1]
        object.__setattr__(self, "_sum_from", sums)

    @classmethod
    def of(cls, lengths: Iterable[float], points: int = 32) -> LengthBelief:
        """From a sample of lengths, reduced to `points` quantiles."""
        ordered = sorted(lengths)
        n = len(ordered)
        if n > points:
            ordered = [ordered[int((i + 0.5) * n / points)] for i in range(points)]
        return cls(tuple(ordered))

    @property
    def mean(self) -> float:
        return self._sum_from[0] / len(self.points)

    @property
    def wide(self) -> LengthBelief:
        """This belief, at least `LEAST_SPREAD` wide if it is a point (known exactly, or cut off).

        With a point, every probability is 0 or 1: a call whose progress report is a few tokens old
        would count as lost, and a batch of such calls as having nothing to lose.
        """
        return _widened(self)

    def _has_a_point(self) -> bool:
        points, n = self.points, len(self.points)
        most = max(
            bisect_right(points, p * (1 + 2 * LEAST_SPREAD)) - i for i, p in enumerate(points)
        )
        return most > _POINT_SHARE * n

    def _smeared(self) -> LengthBelief:
        smeared = LengthBelief.of(p * factor for p in self.points for factor in _SMEARED)
        return replace(smeared, overrun=self.overrun)

    def left_mean(self, generated: int) -> float:
        """Expected tokens still to come after `generated` tokens; at least 1."""
        first = bisect_right(self.points, generated)
        n = len(self.points) - first
        if n == 0:
            return self._left_beyond(generated)
        return max(1.0, self._sum_from[first] / n - generated)

    def left_quantile(self, q: float, generated: int) -> float:
        """Tokens still to come with probability `q` at most; at least 1."""
        first = bisect_right(self.points, generated)
        n = len(self.points) - first
        if n == 0:
            return self._left_beyond(generated)
        return max(1.0, self.points[first + min(n - 1, int(q * n))] - generated)

    def chance_within(self, tokens: float, generated: int) -> float:
        """Probability that at most `tokens` more tokens come after `generated`."""
        first = bisect_right(self.points, generated)
        n = len(self.points) - first
        if n == 0:
            return 1.0 - exp(-tokens / self._left_beyond(generated)) if tokens > 0 else 0.0
        return (bisect_right(self.points, generated + tokens, first) - first) / n

    def _left_beyond(self, generated: int) -> float:
        """Expected tokens still to come of an output that exceeds all believed lengths."""
        return max(1.0, self.overrun * generated)


@lru_cache(maxsize=4096)
def _widened(belief: LengthBelief) -> LengthBelief:
    """`LengthBelief.wide`, cached outside the beliefs, because event logs contain the beliefs."""
    return belief._smeared() if belief._has_a_point() else belief


@lru_cache(maxsize=512)
def received(points: tuple[float, ...], overrun: float) -> LengthBelief:
    """A belief that arrives in a message: those of most calls of a class are equal."""
    return LengthBelief(points, overrun)


@lru_cache(maxsize=4096)
def around(tokens: int) -> LengthBelief:
    """The belief where nothing is known but what is usual: `tokens`."""
    return LengthBelief((float(max(1, tokens)),), _OVERRUN_OF_UNKNOWN).wide
