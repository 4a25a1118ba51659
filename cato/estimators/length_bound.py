"""Distributions of output lengths, learnt from records.

A bound that holds nine times in ten lets a scheduler keep promises that a mean breaks. Every model
predicts before the first token and, conditioned on the tokens so far, while the answer grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cato.core.errors import InputError
from cato.core.ids import TaskName
from cato.core.record import record
from cato.estimators.calibration import pinball_losses
from cato.estimators.survival import Floats, quantiles_after

GRID_POINTS = 32
"""Points of a grid: as many as `LengthBelief.of` keeps."""


@record
class LengthFeatures:
    """Features of an invocation before it runs; `values` in the order used in training."""

    task: TaskName
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LengthRecord:
    """One finished invocation."""

    features: LengthFeatures
    output_tokens: int


class LengthModel(Protocol):
    """A distribution of output tokens for given features. Must be pure.

    Results are in tokens, conditioned on the length exceeding `generated_tokens`. Both methods
    raise `InputError` for features that the model was not trained on.
    """

    def quantile(self, features: LengthFeatures, q: float, generated_tokens: int = 0) -> float:
        """The length not exceeded with probability `q`, in (0, 1)."""
        ...

    def grid(self, features: LengthFeatures, generated_tokens: int = 0) -> tuple[float, ...]:
        """Ascending quantiles at (i + 0.5)/n: equally likely lengths, for a `LengthBelief`."""
        ...


class ByLevels:
    """A `LengthModel` by its quantiles at any levels."""

    __slots__ = ()
    points: int

    def quantile(self, features: LengthFeatures, q: float, generated_tokens: int = 0) -> float:
        return float(self._quantiles(features, one_level(q), generated_tokens)[0])

    def grid(self, features: LengthFeatures, generated_tokens: int = 0) -> tuple[float, ...]:
        levels = grid_levels(self.points)
        return tuple(self._quantiles(features, levels, generated_tokens).tolist())

    def _quantiles(self, features: LengthFeatures, levels: Floats, generated_tokens: int) -> Floats:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class MarginalLengths(ByLevels):
    """Past lengths of each task, regardless of the prompt; those of all tasks for an unknown one.

    The baseline that any prompt-based model must beat. `counts[i]` belongs to `tasks[i]`, the last
    row to all tasks; columns are the distinct lengths in `support`.
    """

    tasks: tuple[TaskName, ...]
    support: Floats
    counts: Floats
    points: int = GRID_POINTS

    @classmethod
    def fit(cls, records: Sequence[LengthRecord], points: int = GRID_POINTS) -> MarginalLengths:
        """Raise `InputError` without records or with lengths below 1."""
        tasks, support, counts = tallied(records)
        return cls(tasks, support, counts, points)

    def _quantiles(self, features: LengthFeatures, levels: Floats, generated_tokens: int) -> Floats:
        counts = self.counts[row_of(self.tasks, features.task)]
        out: Floats = quantiles_after(
            self.support, counts, self.counts[-1], levels, float(generated_tokens)
        )
        return out


def beats(model: LengthModel, plain: LengthModel, unseen: Sequence[LengthRecord], q: float) -> bool:
    """Whether `model` bounds the lengths of `unseen` better than `plain` does, at level `q`.

    By more than two standard errors of the difference in pinball loss: a model that found nothing
    is better by chance half of the time.
    """
    lengths = [record.output_tokens for record in unseen]
    loss, plain_loss = (
        pinball_losses(lengths, [m.quantile(r.features, q) for r in unseen], q)
        for m in (model, plain)
    )
    gain = plain_loss - loss
    return bool(gain.mean() > 2.0 * gain.std() / np.sqrt(len(gain)))


def grid_levels(points: int) -> Floats:
    """The probabilities of a grid's points: the midpoints of `points` equal parts."""
    levels: Floats = (np.arange(points) + 0.5) / points
    return levels


def one_level(q: float) -> Floats:
    if not 0.0 < q < 1.0:
        raise InputError(f"a quantile level must lie between 0 and 1, got {q}")
    return np.array([q])


def row_of(tasks: tuple[TaskName, ...], task: TaskName) -> int:
    return tasks.index(task) if task in tasks else len(tasks)


def tallied(records: Sequence[LengthRecord]) -> tuple[tuple[TaskName, ...], Floats, Floats]:
    """Tasks sorted by name, distinct lengths ascending, and counts [task or all, length]."""
    if not records:
        raise InputError("a length model needs records: run some invocations first")
    if min(r.output_tokens for r in records) < 1:
        raise InputError("a length record has less than 1 output token: leave it out")
    tasks = tuple(sorted({r.features.task for r in records}))
    lengths = np.array([r.output_tokens for r in records], dtype=np.float64)
    support, at = np.unique(lengths, return_inverse=True)
    row = np.array([tasks.index(r.features.task) for r in records])
    counts = np.zeros((len(tasks) + 1, len(support)))
    np.add.at(counts, (row, at), 1.0)
    counts[-1] = counts[:-1].sum(axis=0)
    return tasks, support, counts
