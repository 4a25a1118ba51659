"""CATO, "SLA-Awareness for AI-assisted coding" (2025), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView
from cato.policies.slack import FEASIBLE, LATE, slack_class


@dataclass(frozen=True, slots=True)
class CatoRouting:
    """Among the replicas that can still meet the slack, the one with the least wait.

    slack = deadline - now; a replica is feasible when wait + remaining <= slack, where remaining
    is the invocation's own execution plus the downstream nodes up to the SLO event. Slack below
    zero, or no feasible replica: the least wait of all.

    Deviations from the printed text: its line 24 takes the *first* replica when none is
    feasible, so that overload piles on one; here all are evaluated first. `wait = 0` ties every
    replica with room: ties go by remaining work, then load, then id.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if not pool.replicas:
            return Hold("no replica has room")
        slack_s = invocation.deadline_s - pool.now_s

        def remaining_s(replica: ReplicaView) -> float:
            return invocation.remaining_s(replica.profile, replica.batch)

        def least_wait(replica: ReplicaView) -> tuple[float, float, int, str]:
            return (
                replica.wait_s,
                remaining_s(replica),
                replica.held + replica.queued,
                replica.id,
            )

        feasible = [
            r for r in pool.replicas if slack_class(slack_s, r.wait_s, remaining_s(r)) == FEASIBLE
        ]
        best = min(feasible or pool.replicas, key=least_wait)
        n = len(pool.replicas)
        if slack_class(slack_s, 0.0, 0.0) == LATE:
            why = f"late by {-slack_s:.3f} s: least wait of {n}"
        elif feasible:
            why = f"slack {slack_s:.3f} s, feasible on {len(feasible)} of {n}: least wait"
        else:
            why = f"slack {slack_s:.3f} s, feasible on none of {n}: least wait of all"
        return Route(best.id, f"{why} {best.wait_s:.3f} s, remaining {remaining_s(best):.3f} s")
