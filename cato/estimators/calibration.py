"""Calibration of length bounds: coverage, pinball loss and reliability plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cato.core.errors import InputError

Values = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reliability:
    """The bounds at level `q` held for the fraction `coverage`; `stderr` is binomial."""

    q: float
    coverage: float
    stderr: float


def covered(lengths: Values, bounds: Values) -> NDArray[np.float64]:
    """Per pair: 1 where the length is within its bound, else 0."""
    observed, limit = _paired(lengths, bounds)
    return (observed <= limit).astype(np.float64)


def coverage(lengths: Values, bounds: Values) -> float:
    """Fraction of lengths within their bounds; an honest bound at level q covers q."""
    return float(covered(lengths, bounds).mean())


def pinball_losses(lengths: Values, bounds: Values, q: float) -> NDArray[np.float64]:
    """Loss of each pair, in tokens: q times the shortfall, or 1 - q times the excess.

    The true quantile minimises its mean (Koenker and Bassett 1978), so it also punishes a bound
    that gets its coverage only by being too wide.
    """
    observed, limit = _paired(lengths, bounds)
    short = observed - limit
    return np.maximum(q * short, (q - 1.0) * short)


def pinball_loss(lengths: Values, bounds: Values, q: float) -> float:
    """Mean of `pinball_losses`, in tokens."""
    return float(pinball_losses(lengths, bounds, q).mean())


def reliability(lengths: Values, bounds_at: Mapping[float, Values]) -> tuple[Reliability, ...]:
    """One point per level q of `bounds_at`, ascending; calibrated bounds lie on the diagonal."""
    points = []
    for q in sorted(bounds_at):
        share = coverage(lengths, bounds_at[q])
        points.append(Reliability(q, share, float(np.sqrt(share * (1 - share) / len(lengths)))))
    return tuple(points)


def _paired(lengths: Values, bounds: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if len(lengths) != len(bounds) or len(lengths) == 0:
        raise InputError(
            f"calibration needs a bound for every length: {len(lengths)} lengths, "
            f"{len(bounds)} bounds"
        )
    return np.asarray(lengths, dtype=np.float64), np.asarray(bounds, dtype=np.float64)
