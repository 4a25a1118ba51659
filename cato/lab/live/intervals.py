"""Means with 95 % confidence intervals, from rounds of tasks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cato.lab.bench.stats import BATCH, LEVEL, RESAMPLES, Difference


def mean_interval(rounds: Sequence[Sequence[float]], seed: int = 0) -> Difference:
    """The mean of all values, with its 95 % interval.

    A two-stage bootstrap: rounds are drawn with replacement, then values within each, because the
    tasks of a round share its arrivals. A single round gives only the spread of its tasks, which is
    too narrow, because queueing tasks are correlated. For two arms pass the differences by task.
    Raise ValueError for a round without values, or no rounds.
    """
    if not rounds or not all(len(r) for r in rounds):
        raise ValueError("every round needs at least one value")
    draw = np.random.default_rng(seed)
    if len({len(r) for r in rounds}) > 1:
        return _of_unequal([np.array(r, dtype=np.float64) for r in rounds], draw)
    values = np.array(rounds, dtype=np.float64)
    n, size = values.shape
    means = np.empty(RESAMPLES)
    for i in range(0, RESAMPLES, BATCH):
        chosen = draw.integers(n, size=(BATCH, n))
        places = draw.integers(size, size=(BATCH, n, size))
        means[i : i + BATCH] = values[chosen[:, :, None], places].mean(axis=(1, 2))
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(means, (tail, 100 - tail))
    return Difference(float(values.mean()), float(low), float(high))


def _of_unequal(rounds: Sequence[NDArray[np.float64]], draw: np.random.Generator) -> Difference:
    """The same for rounds of different sizes."""
    means = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        chosen = [rounds[k] for k in draw.integers(len(rounds), size=len(rounds))]
        again = [r[draw.integers(len(r), size=len(r))] for r in chosen]
        means[i] = np.concatenate(again).mean()
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(means, (tail, 100 - tail))
    return Difference(float(np.concatenate(rounds).mean()), float(low), float(high))
