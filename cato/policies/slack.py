"""The three classes of slack of CATO, Algorithm 1, shared by its routing and its ordering."""

from __future__ import annotations

LATE = 0
TIGHT = 1
FEASIBLE = 2


def slack_class(slack_s: float, wait_s: float, remaining_s: float) -> int:
    """0: the deadline has passed. 1: it cannot be met any more. 2: it can."""
    if slack_s < 0:
        return LATE
    return FEASIBLE if wait_s + remaining_s <= slack_s else TIGHT
