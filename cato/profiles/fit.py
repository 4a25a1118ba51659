"""Fits of the linear latency forms of `Profile` to measured samples.

Non-negative least squares: a free fit bends the line to attention's square term with a negative
base (measured: -14 to -325 ms), which predicts negative times for short prompts. Residuals are
relative, because a scheduler that plans 20 ms completions needs them as right as 4 s prompts: to
what is fitted, as those relative to noisy samples pull the line below their mean. Samples far off
(a pause, another process) lose weight by Huber's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from cato.core.errors import InputError

MIN_SAMPLES = 4
"""Fewest samples fitted: one more than the coefficients that two batch sizes and lengths show."""

HUBER_SCALE = 1.345
"""Residuals beyond this many standard deviations count less (95 % efficiency on clean data)."""

LEAST_FITTED = 0.1
"""Of a sample's time: what is fitted to be less counts as so much where it divides."""

ROUNDS = 30
"""Most rounds of reweighting; they settle in about ten."""


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """`batch` prompts of `prompt_tokens` each, processed together in `duration_s`."""

    batch: int
    prompt_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One decode step of `batch` requests with `context_tokens` each on average."""

    batch: int
    context_tokens: float
    step_s: float


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Coefficients of `Profile`'s prefill; `r2` over all samples, outliers included."""

    per_batch_token_s: float
    per_request_s: float
    per_token_s: float
    base_s: float
    r2: float


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """Coefficients of `Profile`'s decode step; `r2` over all samples, outliers included."""

    per_context_token_s: float
    per_request_s: float
    base_s: float
    r2: float


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillFit:
    """Needs two prompt lengths; with one batch size the terms in b·l and 1 carry everything.

    Raise `InputError` when the samples cannot tell the coefficients apart.
    """
    batch = np.array([s.batch for s in samples], dtype=np.float64)
    tokens = np.array([s.prompt_tokens for s in samples], dtype=np.float64)
    seconds = np.array([s.duration_s for s in samples], dtype=np.float64)
    _check("prefill", batch, tokens, seconds)
    if len(set(tokens)) < 2:
        raise InputError("a prefill fit needs samples of at least two prompt lengths")
    one = np.ones_like(batch)
    if len(set(batch)) < 2:  # b·l and l, and b and 1, are then the same column
        (per_batch_token, base), r2 = _fit(np.column_stack([batch * tokens, one]), seconds)
        return PrefillFit(per_batch_token, 0.0, 0.0, base, r2)
    columns = np.column_stack([batch * tokens, batch, tokens, one])
    (per_batch_token, per_request, per_token, base), r2 = _fit(columns, seconds)
    return PrefillFit(per_batch_token, per_request, per_token, base, r2)


def fit_decode(samples: Sequence[DecodeSample]) -> DecodeFit:
    """Needs two batch sizes; with one context length the term in b carries its cost.

    Raise `InputError` when the samples cannot tell the coefficients apart.
    """
    batch = np.array([s.batch for s in samples], dtype=np.float64)
    context = np.array([s.context_tokens for s in samples], dtype=np.float64)
    seconds = np.array([s.step_s for s in samples], dtype=np.float64)
    _check("decode", batch, context, seconds)
    if len(set(batch)) < 2:
        raise InputError("a decode fit needs samples of at least two batch sizes")
    one = np.ones_like(batch)
    if len(set(context)) < 2:  # b·c and b are then the same column
        (per_request, base), r2 = _fit(np.column_stack([batch, one]), seconds)
        return DecodeFit(0.0, per_request, base, r2)
    columns = np.column_stack([batch * context, batch, one])
    (per_context_token, per_request, base), r2 = _fit(columns, seconds)
    return DecodeFit(per_context_token, per_request, base, r2)


def _check(what: str, batch: _Array, tokens: _Array, seconds: _Array) -> None:
    if len(seconds) < MIN_SAMPLES:
        raise InputError(
            f"a {what} fit needs at least {MIN_SAMPLES} samples, there are {len(seconds)}: "
            "measure more batch sizes and lengths"
        )
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise InputError(f"a {what} sample has a time that is not positive")
    if not ((batch >= 1) & (tokens >= 0) & np.isfinite(tokens)).all():
        raise InputError(f"a {what} sample has a batch below 1 or a negative length")


_Array = NDArray[np.float64]


def _fit(columns: _Array, seconds: _Array) -> tuple[list[float], float]:
    """Non-negative coefficients by reweighted relative least squares, and R²."""
    scale = np.linalg.norm(columns / seconds[:, None], axis=0)
    scale[scale == 0] = 1.0  # all lengths 0: a column of zeros
    scaled = columns / scale
    fitted, weight = seconds, np.ones_like(seconds)
    solution = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        before = solution
        row = np.sqrt(weight) / fitted
        solution, _ = nnls(scaled * row[:, None], seconds * row)
        fitted = np.maximum(scaled @ solution, LEAST_FITTED * seconds)
        residual = np.abs(scaled @ solution - seconds) / fitted
        spread = 1.4826 * float(np.median(residual))  # the deviation of a normal distribution
        if spread < 1e-12 or np.allclose(solution, before, rtol=1e-9, atol=0):
            break
        weight = np.minimum(1.0, HUBER_SCALE * spread / np.maximum(residual, 1e-300))
    coefficients = solution / scale
    error = float(np.sum((columns @ coefficients - seconds) ** 2))
    total = float(np.sum((seconds - seconds.mean()) ** 2))
    r2 = 1.0 - error / total if total > 0 else 1.0 if error < 1e-18 else 0.0
    return [float(c) for c in coefficients], r2
