"""The queue order of CATO's default policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation

URGENT, PACED, UNBOUND, HOPELESS = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class ForesightOrdering:
    """Urgent feasible first, by least work; then the feasible by laxity; hopeless last.

    Urgent: laxity (slack - remaining) at most `urgency` times the remaining time. Of what must
    start now the shortest goes first: it costs the others least (Moore, 1968, keeps the same
    ones). What has time is paced by the instant when it becomes urgent. Without an SLO: behind
    all that can be met. Hopeless: even alone and at once it is late; it goes last, shortest first.
    """

    urgency: float = 10.0

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        deadline_s = invocation.deadline_s
        if deadline_s == inf:
            return Rank(UNBOUND, "no SLO", key=invocation.arrived_at_s)
        latest_s = deadline_s - work.remaining_s
        if now_s > latest_s:
            return Rank(HOPELESS, f"hopeless by {now_s - latest_s:.3f} s", key=work.service_s)
        urgent_s = latest_s - self.urgency * work.remaining_s
        if now_s >= urgent_s:
            reason = f"urgent, {latest_s - now_s:.3f} s of laxity"
            return Rank(URGENT, reason, key=work.service_s, until_s=latest_s + 1e-9 * latest_s)
        return Rank(PACED, f"{latest_s - now_s:.3f} s of laxity", key=urgent_s, until_s=urgent_s)
