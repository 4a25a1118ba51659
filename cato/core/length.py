"""What is believed of an output length, before and while it is generated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

# An output that outgrew every length believed possible goes on for this share of itself.
_OVERRUN = 0.2


@dataclass(frozen=True, slots=True)
class LengthBelief:
    """Equally likely total output lengths, in tokens, ascending.

    An estimator gives quantiles at (i + 0.5)/n; what was generated already then conditions them:
    the length given that it is above g (survival; algorithms.md, section Tempo, pitfall d).
    """

    points: tuple[float, ...]
    _sum_from: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.points, "a belief needs at least one length"
        assert all(a <= b for a, b in zip(self.points, self.points[1:], strict=False)), "unsorted"
        sums = tuple(accumulate(reversed(self.points), initial=0.0))[::-1]
        object.__setattr__(self, "_sum_from", sums)

    @classmethod
    def of(cls, lengths: Iterable[float], points: int = 32) -> LengthBelief:
        """Of a sample of lengths, reduced to `points` quantiles."""
        ordered = sorted(lengths)
        n = len(ordered)
        if n > points:
            ordered = [ordered[int((i + 0.5) * n / points)] for i in range(points)]
        return cls(tuple(ordered))

    @property
    def mean(self) -> float:
        return self._sum_from[0] / len(self.points)

    def left_mean(self, generated: int) -> float:
        """Expected tokens still to come after `generated` tokens; at least 1."""
        first = bisect_right(self.points, generated)
        n = len(self.points) - first
        if n == 0:
            return max(1.0, _OVERRUN * generated)
        return max(1.0, self._sum_from[first] / n - generated)

    def left_quantile(self, q: float, generated: int) -> float:
        """Tokens still to come with probability `q` at most; at least 1."""
        first = bisect_right(self.points, generated)
        n = len(self.points) - first
        if n == 0:
            return max(1.0, _OVERRUN * generated)
        return max(1.0, self.points[first + min(n - 1, int(q * n))] - generated)

    def chance_within(self, tokens: float, generated: int) -> float:
        """Probability that at most `tokens` more tokens come after `generated`."""
        first = bisect_right(self.points, generated)
        n = len(self.points) - first
        if n == 0:
            return 1.0 if tokens >= max(1.0, _OVERRUN * generated) else 0.0
        return (bisect_right(self.points, generated + tokens) - first) / n
