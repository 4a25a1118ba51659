"""Percentiles and means of arms measured in turns, with 95 % confidence intervals. Pure."""

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
class Interval:
    """A measured value, usually of one arm minus another, with its 95 % interval."""

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
) -> Interval:
    """Interval of a percentile, `arm` minus `baseline`.

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
    value = np.percentile(ours, percentile) - np.percentile(theirs, percentile)
    return _interval(float(value), differences)


def mean_interval(
    rounds: Sequence[Sequence[float]],
    seed: int = 0,
    groups: Sequence[Sequence[str]] | None = None,
) -> Interval:
    """The mean of all values, with its 95 % interval.

    A two-stage bootstrap: rounds are drawn with replacement, then values within each, because the
    tasks of a round share its arrivals. `groups` names the group of each value, such as the session
    of a turn: then whole groups are drawn, because their values are correlated. A single round
    gives only the spread of its tasks, which is too narrow, because queueing tasks are correlated;
    so are the intervals of few rounds: of two rounds of 150 tasks whose means scatter by ten points
    they contain the true mean in 72 % of cases, of three in 82 %. For two arms pass the differences
    by task. Raise ValueError for a round without values, or no rounds.
    """
    if not rounds or not all(len(r) for r in rounds):
        raise ValueError("every round needs at least one value")
    draw = np.random.default_rng(seed)
    if groups is not None:
        return _of_groups(rounds, groups, draw)
    if len({len(r) for r in rounds}) > 1:
        return _of_unequal([np.array(r, dtype=np.float64) for r in rounds], draw)
    values = np.array(rounds, dtype=np.float64)
    n, size = values.shape
    means = np.empty(RESAMPLES)
    for i in range(0, RESAMPLES, BATCH):
        chosen = draw.integers(n, size=(BATCH, n))
        places = draw.integers(size, size=(BATCH, n, size))
        means[i : i + BATCH] = values[chosen[:, :, None], places].mean(axis=(1, 2))
    return _interval(float(values.mean()), means)


def _of_unequal(rounds: Sequence[NDArray[np.float64]], draw: np.random.Generator) -> Interval:
    """The same for rounds of different sizes."""
    means = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        chosen = [rounds[k] for k in draw.integers(len(rounds), size=len(rounds))]
        again = [r[draw.integers(len(r), size=len(r))] for r in chosen]
        means[i] = np.concatenate(again).mean()
    return _interval(float(np.concatenate(rounds).mean()), means)


def _of_groups(
    rounds: Sequence[Sequence[float]], groups: Sequence[Sequence[str]], draw: np.random.Generator
) -> Interval:
    """The same for rounds whose groups are drawn as a whole."""
    tables = []
    for values, names in zip(rounds, groups, strict=True):
        _, which = np.unique(list(names), return_inverse=True)
        sums = np.bincount(which, np.array(values, dtype=np.float64))
        tables.append(np.stack((sums, np.bincount(which)), axis=1))
    means = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        chosen = [tables[k] for k in draw.integers(len(tables), size=len(tables))]
        total, count = sum([t[draw.integers(len(t), size=len(t))].sum(axis=0) for t in chosen])
        means[i] = total / count
    total, count = np.concatenate(tables).sum(axis=0)
    return _interval(float(total / count), means)


def _interval(value: float, resampled: NDArray[np.float64]) -> Interval:
    """`value` with the interval of its bootstrap."""
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(resampled, (tail, 100 - tail))
    return Interval(value, float(low), float(high))


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
