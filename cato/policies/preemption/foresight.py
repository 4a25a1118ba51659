"""Who gives way, in CATO's default policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cato.core.ids import InvocationId
from cato.core.profile import Profile
from cato.core.snapshot import Invocation, ReplicaView
from cato.policies.outlook import chances, outlook_of


@dataclass(frozen=True, slots=True)
class ForesightPreemption:
    """What cannot be in time any more gives way when others can gain by it.

    Either those that run beside it, by shorter steps, or one that waits for its place and can
    still be in time. It goes behind all that can be met, and comes back when there is room: its
    tokens are kept, its context is processed again.
    """

    least_gain: float = 0.1

    def preempt(
        self, replica: ReplicaView, waiting: Sequence[Invocation], now_s: float
    ) -> Sequence[tuple[InvocationId, str]]:
        profile = replica.profile
        outlook = replica.derived(outlook_of, now_s)
        pairs = list(zip(outlook.prospects, outlook.chances, strict=True))
        lost = [p for p, c in pairs if c <= 0 and p.due_s < inf]
        if lost:
            kept = [p for p, c in pairs if c > 0 or p.due_s == inf]
            gain = sum(chances(profile, now_s, kept)) - outlook.total
            if gain >= self.least_gain:
                reason = f"cannot be in time; {len(kept)} others gain {gain:.2f} without it"
                return [(p.invocation.id, reason) for p in lost]
        if not lost or replica.held < replica.max_running:
            return ()
        wanting = sum(_can_be_met(i, profile, now_s) for i in waiting)
        worst = sorted(lost, key=lambda p: (-p.left_tokens, p.invocation.id))[:wanting]
        return [
            (p.invocation.id, "cannot be in time; one that can waits for its place") for p in worst
        ]


def _can_be_met(invocation: Invocation, profile: Profile, now_s: float) -> bool:
    return now_s + invocation.remaining_s(profile) <= invocation.deadline_s < inf
