"""Serialize a fitted length model to the bytes of one file, and back.

The file is NumPy's npz: the model's arrays under their field names, and `header`, a JSON text with
`format` (1), `kind` ("marginal", "gaussian" or "forest"), `tasks`, `points` and, for a forest,
`n_features`. It contains no pickle, since loading one may run any code. Indices are checked here,
because the compiled code that follows them has no bounds checks.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from cato.core.errors import InputError
from cato.core.ids import TaskName
from cato.estimators.gaussian_lengths import GaussianLengths
from cato.estimators.length_bound import MarginalLengths
from cato.estimators.length_forest import CompiledForest

FORMAT = 1

_Array = np.ndarray[Any, np.dtype[Any]]
_ARRAYS = {
    "marginal": ("support", "counts"),
    "gaussian": ("mean_tokens", "deviation_tokens"),
    "forest": (
        "support", "counts", "base", "roots", "split", "threshold", "left", "right",
        "leaf_value", "leaf_mass",
    ),
}  # fmt: skip
_INDICES = ("roots", "split", "left", "right", "leaf_value")

FileModel = MarginalLengths | GaussianLengths | CompiledForest


def to_bytes(model: FileModel) -> bytes:
    """The content of a file; equal models give equal bytes."""
    header: dict[str, object] = {
        "format": FORMAT,
        "kind": _kind(model),
        "tasks": list(model.tasks),
        "points": model.points,
    }
    if isinstance(model, CompiledForest):
        header["n_features"] = model.n_features
    arrays = {name: getattr(model, name) for name in _ARRAYS[_kind(model)]}
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, header=np.array(json.dumps(header)), **arrays)
    return out.getvalue()


def from_bytes(content: bytes) -> FileModel:
    """The model that `to_bytes` wrote; raise `InputError` for any other content."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            kind = header["kind"]
            if header["format"] != FORMAT:
                raise InputError(
                    f"a length model of format {header['format']}, this version reads {FORMAT}: "
                    "fit it again"
                )
            arrays = {name: _array(name, file[name]) for name in _ARRAYS[kind]}
        tasks = tuple(TaskName(str(task)) for task in header["tasks"])
        points = int(header["points"])
        n_features = int(header["n_features"]) if kind == "forest" else 0
    except (KeyError, ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile) as exc:
        raise InputError(f"not a length model ({exc}): fit and save it again") from exc
    if not _is_sound(kind, arrays, len(tasks), n_features) or points < 1:
        raise InputError("a damaged length model: fit and save it again")
    if kind == "marginal":
        return MarginalLengths(tasks, arrays["support"], arrays["counts"], points)
    if kind == "gaussian":
        return GaussianLengths(tasks, arrays["mean_tokens"], arrays["deviation_tokens"], points)
    return CompiledForest(tasks=tasks, n_features=n_features, points=points, **arrays)


def _kind(model: FileModel) -> str:
    match model:
        case MarginalLengths():
            return "marginal"
        case GaussianLengths():
            return "gaussian"
        case CompiledForest():
            return "forest"


def _array(name: str, array: _Array) -> _Array:
    return array.astype(np.int64 if name in _INDICES else np.float64, casting="safe")


def _is_sound(kind: str, arrays: Mapping[str, _Array], n_tasks: int, n_features: int) -> bool:
    if n_tasks < 1 or not all(np.isfinite(a).all() for a in arrays.values()):
        return False
    if kind == "gaussian":
        shape = (n_tasks + 1,)
        mean, deviation = arrays["mean_tokens"], arrays["deviation_tokens"]
        return mean.shape == shape == deviation.shape and bool((deviation >= 0).all())
    support = arrays["support"]
    n = len(support) if support.ndim == 1 else 0
    if n == 0 or support[0] < 1 or (np.diff(support) <= 0).any():
        return False
    if kind == "marginal":
        counts = arrays["counts"]
        # A row without counts has no quantiles; the last row holds every length seen.
        return (
            counts.shape == (n_tasks + 1, n)
            and bool((counts >= 0).all() and (counts.sum(axis=1) > 0).all())
            and bool((counts[-1] > 0).all())
        )
    return _is_sound_forest(arrays, n_tasks, n_features, n)


def _is_sound_forest(
    arrays: Mapping[str, _Array], n_tasks: int, n_features: int, n_support: int
) -> bool:
    split, left, right = arrays["split"], arrays["left"], arrays["right"]
    roots, value, mass = arrays["roots"], arrays["leaf_value"], arrays["leaf_mass"]
    if split.ndim != 1 or not split.shape == left.shape == right.shape == arrays["threshold"].shape:
        return False
    if roots.ndim != 1 or value.ndim != 1 or value.shape != mass.shape:
        return False
    if arrays["base"].shape != (n_tasks + 1, n_support) or arrays["counts"].shape != (n_support,):
        return False
    columns = n_features + (n_tasks if n_tasks > 1 else 0)
    node = np.arange(len(split))
    inner = split >= 0
    leaf = ~inner
    return bool(
        ((roots >= 0) & (roots < len(split))).all()
        and (split < columns).all()
        # Children come after their parent, so that no walk loops.
        and ((left > node) & (right > node) & (left < len(node)) & (right < len(node)))[inner].all()
        and ((left >= 0) & (left <= right) & (right <= len(value)))[leaf].all()
        and ((value >= 0) & (value < n_support)).all()
        and (mass >= 0).all()
        and (arrays["base"] >= 0).all()
        and (arrays["counts"] > 0).all()
    )
