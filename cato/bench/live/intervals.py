"""Means with their 95 % intervals, from rounds of tasks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cato.bench.stats import BATCH, LEVEL, RESAMPLES, Difference


def mean_interval(rounds: Sequence[Sequence[float]], seed: int = 0) -> Difference:
    """The mean of all values, and the interval that holds it at 95 %.

    A two-stage bootstrap: rounds are drawn with replacement, then values within each, because the
    tasks of a round share its arrivals. Of one round alone only the spread of its tasks is known,
    which is too narrow an interval: tasks that queue behind one another fare alike. For two arms
    give the differences by task. Raise ValueError unless all rounds have one size, at least 1.
    """
    if len({len(r) for r in rounds}) != 1 or not len(rounds[0]):
        raise ValueError("every round needs the same number of values, at least one")
    values = np.array(rounds, dtype=np.float64)
    draw = np.random.default_rng(seed)
    n, size = values.shape
    means = np.empty(RESAMPLES)
    for i in range(0, RESAMPLES, BATCH):
        chosen = draw.integers(n, size=(BATCH, n))
        places = draw.integers(size, size=(BATCH, n, size))
        means[i : i + BATCH] = values[chosen[:, :, None], places].mean(axis=(1, 2))
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(means, (tail, 100 - tail))
    return Difference(float(values.mean()), float(low), float(high))
