"""Wraps another order: hopeless calls go after all others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from cato.core.decision import Rank
from cato.core.policies import OrderingPolicy, Work
from cato.core.snapshot import Invocation

CAN_BE_MET, HOPELESS = 0, 1


@dataclass(frozen=True, slots=True)
class HopelessLast:
    """By `order`: first calls that are in time if they start now, alone; then the rest.

    Every order by deadline or length needs this in overload, or else it serves lost causes.
    """

    order: OrderingPolicy

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        rank = self.order.rank(invocation, work, now_s)
        latest_s = invocation.deadline_s - work.remaining_s
        if now_s > latest_s:
            return replace(rank, value=HOPELESS, reason=f"hopeless; {rank.reason}")
        # A little after the latest start, so that rounding does not end the rank too early.
        until_s = latest_s + 1e-9 * abs(latest_s) if latest_s < inf else inf
        return replace(rank, value=CAN_BE_MET, until_s=until_s, worsens=True)
