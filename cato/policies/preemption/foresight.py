"""Who gives way, in CATO's default policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cato.core.ids import InvocationId
from cato.core.snapshot import Invocation, ReplicaView
from cato.policies.outlook import BY_TOKENS_LEFT, chances, prospect_of


@dataclass(frozen=True, slots=True)
class ForesightPreemption:
    """What cannot be in time any more gives way when those that can gain by it.

    It goes behind all that can be met, and comes back when there is room: its tokens are kept, its
    context is processed again.
    """

    least_gain: float = 0.01

    def preempt(
        self, replica: ReplicaView, waiting: Sequence[Invocation], now_s: float
    ) -> Sequence[tuple[InvocationId, str]]:
        if len(replica.running) < 2:
            return ()
        profile = replica.profile
        prospects = sorted(map(prospect_of, replica.running), key=BY_TOKENS_LEFT)
        now = chances(profile, now_s, prospects)
        lost = [p for p, c in zip(prospects, now, strict=True) if c <= 0 and p.due_s < inf]
        if not lost:
            return ()
        kept = [p for p, c in zip(prospects, now, strict=True) if c > 0 or p.due_s == inf]
        gain = sum(chances(profile, now_s, kept)) - sum(now)
        if gain < self.least_gain:
            return ()
        reason = f"cannot be in time; {len(kept)} others gain {gain:.2f} without such"
        return [(p.invocation.id, reason) for p in lost]
