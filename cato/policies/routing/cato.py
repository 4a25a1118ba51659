"""CATO, "SLA-Awareness for AI-assisted coding" (2025), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView
from cato.policies.slack import FEASIBLE, LATE, slack_class


@dataclass(frozen=True, slots=True)
class CatoRouting:
    """Among the replicas that can still meet the slack, the one with the least wait.

    slack = deadline - now; a replica is feasible when wait + remaining <= slack, where remaining is
    the invocation's own execution plus the downstream nodes up to the SLO event. Slack below zero,
    or no feasible replica: the least wait of all. As printed, wait and remaining ignore batching: a
    replica's calls are assumed to run one after another.

    Deviations from the printed text: its line 24 takes the *first* replica for a call that is not
    late and fits nowhere, so that such calls pile up on one (`takes_first`; late calls go to the
    least wait there, too, lines 11-16); here all are evaluated first. `wait = 0` ties every idle
    replica: ties go by remaining work, then load, then id. `knows_batches` (not as printed): a call
    with a free batch slot does not wait, and runs at batch speed.
    """

    knows_batches: bool = False
    takes_first: bool = False

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if not pool.replicas:
            return Hold("no replica has room")
        slack_s = invocation.deadline_s - pool.now_s

        def wait_s(replica: ReplicaView) -> float:
            return replica.wait_s if self.knows_batches else replica.serial_s

        def remaining_s(replica: ReplicaView) -> float:
            batch = replica.batch if self.knows_batches else 1
            return invocation.remaining_s(replica.profile, batch)

        def least_wait(replica: ReplicaView) -> tuple[float, float, int, str]:
            return (
                wait_s(replica),
                remaining_s(replica),
                replica.held + replica.queued,
                replica.id,
            )

        feasible = [
            r for r in pool.replicas if slack_class(slack_s, wait_s(r), remaining_s(r)) == FEASIBLE
        ]
        best = min(feasible or pool.replicas, key=least_wait)
        is_late = slack_class(slack_s, 0.0, 0.0) == LATE
        if self.takes_first and not feasible and not is_late:
            best = pool.replicas[0]
        n = len(pool.replicas)
        if is_late:
            why = f"late by {-slack_s:.3f} s: least wait of {n}"
        elif feasible:
            why = f"slack {slack_s:.3f} s, feasible on {len(feasible)} of {n}: least wait"
        else:
            why = f"slack {slack_s:.3f} s, feasible on none of {n}: least wait of all"
        return Route(best.id, f"{why} {wait_s(best):.3f} s, remaining {remaining_s(best):.3f} s")
