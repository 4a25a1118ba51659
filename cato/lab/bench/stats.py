"""Percentiles, and confidence intervals of differences between arms measured in turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2_000
# Resamples per batch: bounds memory.
BATCH = 200
LEVEL = 0.95

Rounds = Sequence[Sequence[float]]
"""Samples of one arm: one sequence per round."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Percentiles of one arm over all its rounds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A percentile of one arm minus that of another, with its 95 % interval."""

    value: float
    low: float
    high: float


def summary(rounds: Rounds) -> Summary:
    """Raise ValueError when there is no sample."""
    values = np.array([x for r in rounds for x in r], dtype=np.float64)
    if not len(values):
        raise ValueError("no samples")
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return Summary(len(values), float(values.mean()), float(p50), float(p90), float(p99))


def paired_difference(
    arm: Rounds, baseline: Rounds, *, percentile: float = 50.0, seed: int = 0
) -> Difference:
    """Difference of a percentile, `arm` minus `baseline`.

    A two-stage bootstrap: rounds are drawn with replacement, the same for both arms, because
    a disturbance affects both arms of a round; then requests within each drawn round. A single
    round gives the spread of its requests only. Raise ValueError unless the arms have the same
    rounds, all of one size.
    """
    ours, theirs = _table(arm), _table(baseline)
    if len(ours) != len(theirs):
        raise ValueError(f"arms of {len(ours)} and {len(theirs)} rounds cannot be paired")
    draw = np.random.default_rng(seed)
    differences = np.empty(RESAMPLES)
    for i in range(0, RESAMPLES, BATCH):
        chosen = draw.integers(len(ours), size=(BATCH, len(ours)))
        differences[i : i + BATCH] = np.percentile(
            _redrawn(ours, chosen, draw), percentile, axis=1
        ) - np.percentile(_redrawn(theirs, chosen, draw), percentile, axis=1)
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(differences, (tail, 100 - tail))
    value = np.percentile(ours, percentile) - np.percentile(theirs, percentile)
    return Difference(float(value), float(low), float(high))


_Array = NDArray[np.float64]


def _table(rounds: Rounds) -> _Array:
    """Samples as rounds x requests."""
    sizes = {len(r) for r in rounds}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError("every round needs the same number of samples, at least one")
    return np.array(rounds, dtype=np.float64)


def _redrawn(rounds: _Array, chosen: NDArray[np.int64], draw: np.random.Generator) -> _Array:
    """One row per row of `chosen`: the requests of these rounds, drawn with replacement."""
    requests = draw.integers(rounds.shape[1], size=(*chosen.shape, rounds.shape[1]))
    return rounds[chosen[:, :, None], requests].reshape(len(chosen), -1)
