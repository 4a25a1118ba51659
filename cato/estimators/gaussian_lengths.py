"""Output lengths as SLO-SA takes them: a normal distribution per task.

In a module of its own: scipy would make the start of every process that opens the store slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtri_exp

from cato.core.ids import TaskName
from cato.estimators.length_bound import (
    GRID_POINTS,
    ByLevels,
    LengthFeatures,
    LengthRecord,
    row_of,
    tallied,
)
from cato.estimators.survival import Floats


@dataclass(frozen=True, slots=True, eq=False)
class GaussianLengths(ByLevels):
    """A normal distribution per task, as SLO-SA assumes; the last row covers all tasks.

    Kept for comparison: lengths of code are skewed, so its upper quantiles are wrong.
    """

    tasks: tuple[TaskName, ...]
    mean_tokens: Floats
    deviation_tokens: Floats
    points: int = GRID_POINTS

    @classmethod
    def fit(cls, records: Sequence[LengthRecord], points: int = GRID_POINTS) -> GaussianLengths:
        """Raise `InputError` without records or with lengths below 1."""
        tasks, support, counts = tallied(records)
        total = counts.sum(axis=1)
        mean = counts @ support / total
        variance = np.maximum(0.0, counts @ support**2 / total - mean**2)
        return cls(tasks, mean, np.sqrt(variance), points)

    def _quantiles(self, features: LengthFeatures, levels: Floats, generated_tokens: int) -> Floats:
        row = row_of(self.tasks, features.task)
        mean, deviation = self.mean_tokens[row], self.deviation_tokens[row]
        least = generated_tokens + 1.0
        if deviation == 0.0:
            return np.full(len(levels), max(mean, least))
        # In logarithms: far out in the tail the probabilities underflow to 0.
        survived = log_ndtr((mean - generated_tokens) / deviation)
        out: Floats = mean - deviation * ndtri_exp(np.log1p(-levels) + survived)
        return np.maximum(out, least)
