"""Fits of generation speed over concurrency: USL, linear and logistic.

SABER fits the Universal Scalability Law (Gunther 1993) offline, to pairs of concurrency and tokens
per second measured with the engine's batch limit lifted, and bases admission on it. It compares the
fit with a line and a logistic curve by R².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from cato.core.errors import InputError

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SpeedSample:
    """A request that generated `tokens_per_s` at `concurrency`, itself included."""

    concurrency: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class UslFit:
    """v(L) = lambda / (1 + sigma (L - 1) + kappa L (L - 1)): contention sigma, coherence kappa."""

    lambda_tokens_per_s: float
    sigma: float
    kappa: float
    r2: float

    def speed(self, concurrency: float) -> float:
        """Tokens/s of one request among `concurrency` >= 1."""
        others = concurrency - 1.0
        cost = 1.0 + self.sigma * others + self.kappa * concurrency * others
        return self.lambda_tokens_per_s / cost


@dataclass(frozen=True, slots=True)
class LinearFit:
    """v(L) = base + slope L, not below 0."""

    base_tokens_per_s: float
    slope_tokens_per_s: float
    r2: float

    def speed(self, concurrency: float) -> float:
        """Tokens/s of one request among `concurrency` >= 1."""
        return max(0.0, self.base_tokens_per_s + self.slope_tokens_per_s * concurrency)


@dataclass(frozen=True, slots=True)
class LogisticFit:
    """v(L) = ceiling / (1 + exp(steepness (L - midpoint)))."""

    ceiling_tokens_per_s: float
    steepness: float
    midpoint: float
    r2: float

    def speed(self, concurrency: float) -> float:
        """Tokens/s of one request among `concurrency` >= 1."""
        exponent = min(700.0, self.steepness * (concurrency - self.midpoint))
        return self.ceiling_tokens_per_s / (1.0 + math.exp(exponent))


def fit_usl(samples: Sequence[SpeedSample]) -> UslFit:
    """Least squares in the speed with non-negative lambda, sigma and kappa.

    Starts at the linear fit of 1/v: the law is linear in 1, L - 1 and L (L - 1). Raise
    `InputError` for samples of fewer than three concurrencies.
    """
    load, speed = _columns(samples)
    others, pairs = load - 1.0, load * (load - 1.0)
    # Weighting by v² makes an error of 1/v count as the error of v that it causes.
    columns = np.column_stack([np.ones_like(load), others, pairs]) * speed[:, None]
    (rest, slope, curve), _ = nnls(columns, np.ones_like(load))
    top = float(speed.max())
    start = [top, 0.0, 0.0] if rest == 0.0 else [1.0 / rest, slope / rest, curve / rest]

    def law(p: _Floats) -> _Floats:
        out: _Floats = p[0] / (1.0 + p[1] * others + p[2] * pairs)
        return out

    lambda_, sigma, kappa = _least_squares(law, speed, start, [0.0, 0.0, 0.0])
    return UslFit(lambda_, sigma, kappa, _r2(law(np.array([lambda_, sigma, kappa])), speed))


def fit_linear(samples: Sequence[SpeedSample]) -> LinearFit:
    """Ordinary least squares. Raise `InputError` for fewer than three concurrencies."""
    load, speed = _columns(samples)
    slope, base = np.polyfit(load, speed, 1)
    line = LinearFit(float(base), float(slope), 0.0)
    return LinearFit(float(base), float(slope), _r2(_speeds(line.speed, load), speed))


def fit_logistic(samples: Sequence[SpeedSample]) -> LogisticFit:
    """Least squares with a falling curve. Raise `InputError` for fewer than three concurrencies."""
    load, speed = _columns(samples)
    reach = float(load.max())

    def curve(p: _Floats) -> _Floats:
        out: _Floats = p[0] / (1.0 + np.exp(np.minimum(700.0, p[1] * (load - p[2]))))
        return out

    start = [2.0 * float(speed.max()), 1.0 / reach, float(load.min())]
    # A midpoint far below 0 is an exponential decay with an unbounded ceiling: bound it.
    least = [0.0, 0.0, -10.0 * reach]
    ceiling, steepness, midpoint = _least_squares(curve, speed, start, least)
    r2 = _r2(curve(np.array([ceiling, steepness, midpoint])), speed)
    return LogisticFit(ceiling, steepness, midpoint, r2)


def _columns(samples: Sequence[SpeedSample]) -> tuple[_Floats, _Floats]:
    load = np.array([s.concurrency for s in samples], dtype=np.float64)
    speed = np.array([s.tokens_per_s for s in samples], dtype=np.float64)
    if len(set(load.tolist())) < 3:
        raise InputError(
            "a fit of speed needs samples of at least three concurrencies: measure at more loads"
        )
    if not (np.isfinite(load) & (load >= 1.0) & np.isfinite(speed) & (speed > 0.0)).all():
        raise InputError("a speed sample needs a concurrency of at least 1 and a positive speed")
    return load, speed


def _least_squares(
    model: Callable[[_Floats], _Floats], speed: _Floats, start: list[float], least: list[float]
) -> tuple[float, float, float]:
    def residuals(p: _Floats) -> _Floats:
        return model(p) - speed

    found = least_squares(
        residuals, start, bounds=(least, np.inf), x_scale="jac", ftol=1e-12, xtol=1e-12, gtol=1e-12
    )
    a, b, c = (float(x) for x in found.x)
    return a, b, c


def _speeds(speed: Callable[[float], float], load: _Floats) -> _Floats:
    return np.array([speed(x) for x in load.tolist()])


def _r2(predicted: _Floats, speed: _Floats) -> float:
    """1 - residual / total sum of squares; 0 when all speeds are equal and not met exactly."""
    error = float(np.sum((predicted - speed) ** 2))
    total = float(np.sum((speed - speed.mean()) ** 2))
    if total == 0.0:
        return 1.0 if error < 1e-18 else 0.0
    return 1.0 - error / total
