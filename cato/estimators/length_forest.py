"""A quantile forest that predicts output lengths, and its compiled form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cato.core.errors import InputError
from cato.core.ids import TaskName
from cato.estimators.length_bound import (
    GRID_POINTS,
    ByLevels,
    LengthFeatures,
    LengthRecord,
    grid_levels,
    one_level,
    row_of,
    tallied,
)
from cato.estimators.survival import Floats, Ints, mixture, quantiles_after

if TYPE_CHECKING:
    from quantile_forest import RandomForestQuantileRegressor

_FINE_LEVELS = 400
"""Levels between which the package's quantiles are interpolated: the tail to 1 in 800."""


@dataclass(frozen=True, slots=True)
class ForestSettings:
    """How a forest is grown.

    Prompts say little about the length of a completion: leaves must be large, or the forest learns
    noise and covers too little. `marginal_weight` is the share of the task's own distribution in
    the mixture; it takes over where few of the forest's answers survive. Chosen on rows 1-2,500 of
    the Azure 2023 coding trace, training on earlier and testing on later rows: leaves of a
    twentieth of the records, against a tenth and a fifth; weights of 0.1 and 0.3 are alike there,
    but where features do predict the length, 0.3 covers 0.95 instead of 0.9.
    """

    trees: int = 100
    min_leaf: int = 125
    marginal_weight: float = 0.1
    points: int = GRID_POINTS


@dataclass(frozen=True, slots=True, eq=False)
class ForestLengths:
    """A quantile regression forest (Meinshausen 2006), from the package quantile-forest.

    Milliseconds per prediction: for comparison, and to be `compiled`.
    """

    tasks: tuple[TaskName, ...]
    n_features: int
    forest: RandomForestQuantileRegressor
    support: Floats
    counts: Floats
    settings: ForestSettings

    @classmethod
    def fit(
        cls, records: Sequence[LengthRecord], seed: int, settings: ForestSettings | None = None
    ) -> ForestLengths:
        """Raise `InputError` for no records, lengths below 1, or features that differ in number."""
        # Imported here: a process that only predicts saves 1.5 s and 80 MB of scikit-learn.
        from quantile_forest import RandomForestQuantileRegressor

        settings = settings or ForestSettings()
        tasks, support, counts = tallied(records)
        n_features = len(records[0].features.values)
        x = np.array([_vector(r.features, tasks, n_features) for r in records])
        if x.shape[1] == 0:
            raise InputError("a forest needs at least one feature; use MarginalLengths without")
        if not np.isfinite(x).all():
            raise InputError("a feature of a length record is not a finite number")
        forest = RandomForestQuantileRegressor(
            n_estimators=settings.trees,
            min_samples_leaf=settings.min_leaf,
            max_samples_leaf=None,
            max_features=1.0,
            random_state=seed,
            n_jobs=1,
        )
        forest.fit(x, np.array([r.output_tokens for r in records], dtype=np.float64))
        return cls(tasks, n_features, forest, support, counts, settings)

    def quantile(self, features: LengthFeatures, q: float, generated_tokens: int = 0) -> float:
        return float(self.quantiles_of([features], q, generated_tokens)[0])

    def grid(self, features: LengthFeatures, generated_tokens: int = 0) -> tuple[float, ...]:
        levels = grid_levels(self.settings.points)
        return tuple(self._quantiles([features], levels, generated_tokens)[0].tolist())

    def quantiles_of(
        self, features: Sequence[LengthFeatures], q: float, generated_tokens: int = 0
    ) -> Floats:
        """`quantile` of many rows in one call: most of the package's time is per call."""
        quantiles: Floats = self._quantiles(features, one_level(q), generated_tokens)[:, 0]
        return quantiles

    def _quantiles(
        self, features: Sequence[LengthFeatures], levels: Floats, generated_tokens: int
    ) -> Floats:
        """[row, level]. The package cannot condition: levels are moved up past the lengths below g.

        It predicts one set of levels for all rows, so the rows share their quantiles on a fine grid
        of levels, between which the moved levels are interpolated.
        """
        x = np.array([_vector(f, self.tasks, self.n_features) for f in features])
        if generated_tokens == 0:
            predicted = np.reshape(self.forest.predict(x, levels.tolist()), (len(x), len(levels)))
            return np.maximum(predicted, 1.0)
        fine = grid_levels(_FINE_LEVELS)
        curves = np.reshape(self.forest.predict(x, fine.tolist()), (len(x), len(fine)))
        out = np.empty((len(x), len(levels)))
        for i, curve in enumerate(curves):
            shorter = np.searchsorted(curve, generated_tokens, side="right") / len(fine)
            out[i] = np.interp(shorter + levels * (1.0 - shorter), fine, curve)
        return np.maximum(out, generated_tokens + 1.0)

    def compiled(self) -> CompiledForest:
        """The same trees and leaves as arrays."""
        leaves = self.forest.forest_.y_train_leaves
        trained = np.asarray(self.forest.forest_.y_train)[0]
        share = (1.0 - self.settings.marginal_weight) / len(self.forest.estimators_)
        roots, split, threshold, left, right = [], [], [], [], []
        values: list[Ints] = []
        masses: list[Floats] = []
        nodes = entries = 0
        for tree, in_leaf in zip(self.forest.estimators_, leaves, strict=True):
            roots.append(nodes)
            grown = tree.tree_
            for node in range(grown.node_count):
                if grown.children_left[node] >= 0:
                    split.append(int(grown.feature[node]))
                    threshold.append(float(grown.threshold[node]))
                    left.append(nodes + int(grown.children_left[node]))
                    right.append(nodes + int(grown.children_right[node]))
                    continue
                held = np.asarray(in_leaf[node][0])
                lengths = trained[held[held > 0] - 1]  # 1-based; 0 is padding
                value, n = np.unique(np.searchsorted(self.support, lengths), return_counts=True)
                values.append(value.astype(np.int64))
                masses.append(share * n / n.sum())
                split.append(-1)
                threshold.append(0.0)
                left.append(entries)
                entries += len(value)
                right.append(entries)
            nodes += grown.node_count
        weight = self.settings.marginal_weight
        return CompiledForest(
            tasks=self.tasks,
            n_features=self.n_features,
            support=self.support,
            counts=self.counts[-1],
            base=weight * self.counts / self.counts.sum(axis=1, keepdims=True),
            roots=np.array(roots, dtype=np.int64),
            split=np.array(split, dtype=np.int64),
            threshold=np.array(threshold),
            left=np.array(left, dtype=np.int64),
            right=np.array(right, dtype=np.int64),
            leaf_value=np.concatenate(values),
            leaf_mass=np.concatenate(masses),
            points=self.settings.points,
        )


@dataclass(frozen=True, slots=True, eq=False)
class CompiledForest(ByLevels):
    """A quantile forest as arrays: microseconds per prediction.

    Each tree contributes its leaf's distribution with equal weight (Meinshausen 2006, equation
    for w_i); the package pools the leaves, which favours large ones. Node and leaf arrays are
    those of `survival.mixture`; `base[i]` is the contribution of the marginal of `tasks[i]`, its
    last row for an unknown task. Nodes compare float32 features, as scikit-learn does.
    """

    tasks: tuple[TaskName, ...]
    n_features: int
    support: Floats
    counts: Floats
    base: Floats
    roots: Ints
    split: Ints
    threshold: Floats
    left: Ints
    right: Ints
    leaf_value: Ints
    leaf_mass: Floats
    points: int = GRID_POINTS
    _levels: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_levels", grid_levels(self.points))

    def grid(self, features: LengthFeatures, generated_tokens: int = 0) -> tuple[float, ...]:
        return tuple(self._quantiles(features, self._levels, generated_tokens).tolist())

    def warmed_up(self) -> CompiledForest:
        """Itself, after one prediction: the first call in a process compiles or loads the code."""
        task = self.tasks[0]
        self.grid(LengthFeatures(task, (0.0,) * self.n_features))
        return self

    def _quantiles(self, features: LengthFeatures, levels: Floats, generated_tokens: int) -> Floats:
        mass = mixture(
            np.array(_vector(features, self.tasks, self.n_features), dtype=np.float32),
            self.roots,
            self.split,
            self.threshold,
            self.left,
            self.right,
            self.leaf_value,
            self.leaf_mass,
            self.base[row_of(self.tasks, features.task)],
        )
        out: Floats = quantiles_after(
            self.support, mass, self.counts, levels, float(generated_tokens)
        )
        return out


def _vector(
    features: LengthFeatures, tasks: tuple[TaskName, ...], n_features: int
) -> tuple[float, ...]:
    """The values, plus one column per task if there are several; all 0 for an unknown task."""
    if len(features.values) != n_features:
        raise InputError(
            f"the length model was trained on {n_features} features, got "
            f"{len(features.values)}: give the same ones in the same order"
        )
    if len(tasks) == 1:
        return features.values
    return features.values + tuple(float(task == features.task) for task in tasks)
