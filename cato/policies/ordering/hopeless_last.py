"""Wraps another order: hopeless calls go last, after streams in doubt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cato.core.decision import Rank
from cato.core.policies import OrderingPolicy, Work
from cato.core.snapshot import Invocation

CAN_BE_MET, DOUBTFUL, HOPELESS = range(3)
# A stream is in doubt if its slack is shorter than this many times the predicted time of its first
# token, plus a step, and than this share of the slack that it came with.
DOUBT, MOST_DOUBT = 1.0, 0.15


@dataclass(frozen=True, slots=True)
class HopelessLast:
    """By `order`: calls that can be in time, then streams in doubt, then the rest.

    Every order by deadline or length needs this in overload, or else it serves lost causes.
    Hopeless: late even if started now, alone. In doubt: see `doubted_s`.
    """

    order: OrderingPolicy

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        rank = self.order.rank(invocation, work, now_s)
        latest_s = latest_start_s(invocation, work)
        if now_s > latest_s:
            return replace(rank, value=HOPELESS, reason=f"hopeless; {rank.reason}")
        safe_s = latest_s - doubted_s(invocation, work)
        if now_s > safe_s:
            reason = f"doubtful; {rank.reason}"
            return replace(rank, value=DOUBTFUL, reason=reason, until_s=latest_s, worsens=True)
        return replace(rank, value=CAN_BE_MET, until_s=safe_s, worsens=True)


def latest_start_s(invocation: Invocation, work: Work) -> float:
    """When it must start to be in time, alone; a little later, so that rounding does not end a rank
    too early."""
    latest_s = invocation.deadline_s - work.remaining_s
    return latest_s + 1e-9 * abs(latest_s)


def doubted_s(invocation: Invocation, work: Work) -> float:
    """The last part of a stream's slack, in which it should follow those with more.

    It is in time only if its first token comes as soon as predicted. Otherwise, in an overload, the
    oldest call that is not hopeless would go first and begin just too late, again and again.
    """
    if not invocation.until_first_token:
        return 0.0
    came_with_s = invocation.deadline_s - work.remaining_s - invocation.arrived_at_s
    return min(DOUBT * work.remaining_s + work.token_s, MOST_DOUBT * came_with_s)
