"""Censored lengths: answers that were cut off, so that only a lower bound is known.

An answer that ends at `max_tokens` would have gone on. Counting it as ended makes every bound too
small; leaving it out makes long prompts look short. It is a censored observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cato.core.errors import InputError
from cato.estimators.survival import TAIL_INDEX, Floats, Ints

# The golden ratio: its multiples fill the unit interval evenly, however many there are.
_STEP = (5**0.5 - 1) / 2
# Draw from this share of the tail beyond all lengths seen: up to 20 times the longest.
_TAIL_SHARE = 0.99


def completed(lengths: Sequence[int] | Ints, ended: Sequence[bool] | NDArray[np.bool_]) -> Ints:
    """Output tokens of each answer, with a likely length for those that were cut off.

    `ended[i]`: the answer ended by itself, at `lengths[i]`; otherwise it is longer. Lengths of cut
    answers are spread over the Kaplan–Meier estimate of all longer ones, which is equivalent to
    redistributing their weight to the right (Efron 1967); beyond the longest seen, over a Pareto
    tail. Cutting is assumed independent of the length, given that it is longer: true of a limit
    set by a workflow, not quite of one that a client chooses for each prompt.
    Deterministic. Raise `InputError` for a length below 1.
    """
    seen = np.asarray(lengths, dtype=np.int64)
    is_end = np.asarray(ended, dtype=np.bool_)
    if len(seen) != len(is_end):
        raise InputError(f"{len(seen)} lengths and {len(is_end)} endings do not pair")
    if len(seen) and seen.min() < 1:
        raise InputError("an answer has less than 1 output token: leave it out")
    out = seen.copy()
    cut = np.flatnonzero(~is_end)
    if len(cut) == 0:
        return out
    support, survival = _survival(seen, is_end)
    longest = int(seen.max())
    order = cut[np.argsort(seen[cut], kind="stable")]
    shares = (0.5 + _STEP * np.arange(len(order))) % 1.0
    for i, share in zip(order.tolist(), shares.tolist(), strict=True):
        out[i] = _longer_than(int(seen[i]), share, support, survival, longest)
    return out


def _survival(lengths: Ints, is_end: NDArray[np.bool_]) -> tuple[Ints, Floats]:
    """Distinct lengths of ended answers, and the probability that one is longer than each."""
    support, ends = np.unique(lengths[is_end], return_counts=True)
    ordered = np.sort(lengths)
    # Answers cut at a length had not ended there.
    at_risk = len(ordered) - np.searchsorted(ordered, support, side="left")
    survival = np.cumprod(1.0 - ends / at_risk)
    return support.astype(np.int64), survival.astype(np.float64)


def _longer_than(length: int, share: float, support: Ints, survival: Floats, longest: int) -> int:
    """A longer length: `share` of the answers that outgrow `length` are shorter than it."""
    first = int(np.searchsorted(support, length, side="right"))
    alive = float(survival[first - 1]) if first > 0 else 1.0
    left = alive * (1.0 - share)
    at = first + int(np.searchsorted(-survival[first:], -left, side="left"))
    if at < len(support):
        return int(support[at])
    beyond = float(survival[-1]) if len(support) else 1.0
    # The longest answers were cut: part of the mass lies beyond every seen length.
    deeper = min(_TAIL_SHARE, 1.0 - left / beyond) if beyond > 0.0 else 0.0
    tail = longest * math.pow(1.0 - deeper, -1.0 / TAIL_INDEX)
    return max(length + 1, round(tail))
