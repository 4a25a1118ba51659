"""The three slack classes of CATO, Algorithm 1, shared by its routing and its ordering."""

from __future__ import annotations

from math import inf

LATE = 0
TIGHT = 1
FEASIBLE = 2


def slack_class(slack_s: float, wait_s: float, remaining_s: float) -> int:
    """0: the deadline has passed. 1: it can no longer be met. 2: it can."""
    if slack_s < 0:
        return LATE
    return FEASIBLE if wait_s + remaining_s <= slack_s else TIGHT


def holds_until_s(cls: int, deadline_s: float, remaining_s: float) -> float:
    """When the class of a queued call must be computed again; classes only get worse."""
    if cls == LATE or deadline_s == inf:
        return inf
    # A little early, so that rounding does not keep a class for too long.
    at_s = deadline_s if cls == TIGHT else deadline_s - remaining_s
    return at_s - 1e-9 * max(1.0, abs(at_s))
