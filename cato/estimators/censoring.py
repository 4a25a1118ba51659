"""Answers that were cut off: their lengths are known only to be longer.

An answer that ends at `max_tokens` would have gone on. Counted as ended there it makes every bound
too small, left out it makes the long prompts look short: it is a censored observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cato.core.errors import InputError
from cato.estimators.survival import TAIL_INDEX, Floats, Ints

# The golden ratio: multiples of it fill the unit interval evenly however many there are.
_STEP = (5**0.5 - 1) / 2
# Of the tail beyond everything seen, the part that is drawn from: up to 20 times the longest.
_TAIL_SHARE = 0.99


def completed(lengths: Sequence[int], ended: Sequence[bool]) -> Ints:
    """Output tokens of each answer, with a likely length for those that were cut off.

    `ended[i]`: the answer ended by itself, at `lengths[i]`; else it is longer. The lengths of cut
    answers are spread over the Kaplan–Meier estimate of all longer ones, which is what
    redistributing their weight to the right does (Efron 1967), and beyond the longest seen over
    a Pareto tail. Cutting is taken to be independent of the length, given that it is longer: true
    of a limit that a workflow sets, not quite of one that a client chooses for each prompt.
    The same arguments give the same lengths. Raise `InputError` for a length below 1.
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
    # Answers cut at a length were still going on there.
    at_risk = len(ordered) - np.searchsorted(ordered, support, side="left")
    survival = np.cumprod(1.0 - ends / at_risk)
    return support.astype(np.int64), survival.astype(np.float64)


def _longer_than(length: int, share: float, support: Ints, survival: Floats, longest: int) -> int:
    """The length that exceeds `length` with the share `share` of those that do below it."""
    first = int(np.searchsorted(support, length, side="right"))
    alive = float(survival[first - 1]) if first > 0 else 1.0
    left = alive * (1.0 - share)
    at = first + int(np.searchsorted(-survival[first:], -left, side="left"))
    if at < len(support):
        return int(support[at])
    beyond = float(survival[-1]) if len(support) else 1.0
    # The last answers were cut: part of the mass lies beyond every seen length.
    deeper = min(_TAIL_SHARE, 1.0 - left / beyond) if beyond > 0.0 else 0.0
    tail = longest * math.pow(1.0 - deeper, -1.0 / TAIL_INDEX)
    return max(length + 1, round(tail))
