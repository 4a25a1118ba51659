"""The queue order of CATO's default policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation
from cato.policies.outlook import believed

URGENT, PACED, UNBOUND, HOPELESS = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class ForesightOrdering:
    """Urgent feasible first, by least work per chance; then the feasible by laxity; hopeless last.

    Urgent: laxity (slack - remaining) at most `urgency` times the remaining time. Of what must
    start now the shortest goes first: it costs the others least (Moore, 1968, keeps the same
    ones); work counts more the less likely it is in time, by what is believed of its length. What
    has time is paced by the instant when it becomes urgent. Without an SLO: behind all that can be
    met. Hopeless: even alone and at once it is late with a chance above 1 - `unlikely`; it goes
    last, shortest first; turns of sessions, which nobody else can take over, age meanwhile.
    """

    # Large, so that short prompts are urgent from the first moment: with 10 the oldest of them went
    # before the shortest in overload.
    urgency: float = 40.0
    unlikely: float = 0.3
    # Of sessions: a second of waiting makes up for so much more work.
    aging: float = 0.05
    # A rank by chance is judged anew after this share of the work: it changes as time passes.
    refreshed: float = 0.1

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        deadline_s = invocation.deadline_s
        if deadline_s == inf:
            return Rank(UNBOUND, "no SLO", key=invocation.arrived_at_s)
        laxity_s = deadline_s - work.remaining_s - now_s
        # Once it has begun, a stream costs its pace alone: only its start is urgent.
        is_stream = invocation.until_first_token
        work_s = work.remaining_s if is_stream else work.service_s + invocation.downstream_s
        urgent_s = deadline_s - (1 + self.urgency) * work.remaining_s
        if now_s < urgent_s:
            return Rank(PACED, f"{laxity_s:.3f} s of laxity", key=urgent_s, until_s=urgent_s)
        if is_stream or work.token_s <= 0:
            if laxity_s < 0:
                if invocation.session:
                    work_s += self.aging * invocation.arrived_at_s
                return Rank(HOPELESS, f"hopeless by {-laxity_s:.3f} s", key=work_s)
            reason = f"urgent, {laxity_s:.3f} s of laxity"
            until_s = deadline_s - work.remaining_s
            return Rank(URGENT, reason, work_s, until_s + 1e-9 * abs(until_s), worsens=True)
        length = believed(invocation)
        tokens = length.left_mean(invocation.generated) + laxity_s / work.token_s
        chance = length.chance_within(tokens, invocation.generated)
        if chance < self.unlikely:
            return Rank(HOPELESS, f"in time with chance {chance:.2f}", key=work_s)
        reason = f"urgent, in time with chance {chance:.2f}, {laxity_s:.3f} s of laxity"
        until_s = now_s + max(work.token_s, self.refreshed * work.service_s)
        return Rank(URGENT, reason, work_s / chance, until_s, worsens=True)
