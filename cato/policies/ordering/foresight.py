"""The queue order of CATO's default policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf, log

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation
from cato.policies.outlook import UNLIKELY, chance_alone

URGENT, PACED, UNBOUND, HOPELESS = 0, 1, 2, 3
# What has time is judged again after this share of it, as the queue may grow.
REVIEW, LEAST_REVIEW_S = 0.5, 1e-3


@dataclass(frozen=True, slots=True)
class ForesightOrdering:
    """Urgent feasible first, by least work per chance; then the feasible by slack; hopeless last.

    Urgent: the slack does not outlast `of_queue` of the work that waits and can be met, and
    `margin` times its own. Of what must start now the shortest goes first: it costs the others
    least (Moore, 1968, keeps the same ones); work counts more the less likely it is in time, by
    what is believed of its length. Work that differs by less than `alike` counts as the same and
    goes by arrival. What has time goes by slack: where all can be met, that order
    meets them. Where more than `overload` of the work was missed lately, slack below `urgency`
    times its own work is urgent: nearly everything, so that the shortest goes first. Without an
    SLO: behind all that can be met. Hopeless: even alone and at once it is late with a chance above
    1 - `unlikely`; it goes last, shortest first; turns of sessions, which nobody else can take
    over, age meanwhile.

    Measured (0020): shortest first at all times loses to bounded EDF where the load is bearable,
    and EDF to bounded SJF in overload.
    """

    margin: float = 1.0
    of_queue: float = 0.7
    overload: float = 0.05
    urgency: float = 40.0
    unlikely: float = UNLIKELY
    alike: float = 1.5
    # Of sessions: a second of waiting makes up for so much more work.
    aging: float = 0.05
    # A rank by chance is judged again after this share of the work: it changes as time passes.
    refreshed: float = 0.1

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        deadline_s = invocation.deadline_s
        if deadline_s == inf:
            return Rank(UNBOUND, "no SLO", key=invocation.arrived_at_s)
        slack_s = deadline_s - work.remaining_s - now_s
        # Once it has begun, a stream costs its pace alone: only its start is urgent.
        is_stream = invocation.until_first_token
        work_s = work.remaining_s if is_stream else work.service_s + invocation.downstream_s
        margin, ahead_s = self.margin, self.of_queue * work.ahead_s
        if work.missed > self.overload:
            margin, ahead_s = self.urgency, 0.0
        relaxed_s = deadline_s - (1 + margin) * work.remaining_s - ahead_s - now_s
        if relaxed_s > 0:
            until_s = now_s + max(REVIEW * relaxed_s, LEAST_REVIEW_S)
            key = deadline_s - work.remaining_s
            return Rank(PACED, f"{slack_s:.3f} s of slack", key=key, until_s=until_s)
        if is_stream or work.token_s <= 0:
            if slack_s < 0:
                if invocation.session:
                    work_s += self.aging * invocation.arrived_at_s
                return Rank(HOPELESS, f"hopeless by {-slack_s:.3f} s", key=work_s)
            reason = f"urgent, {slack_s:.3f} s of slack"
            until_s = deadline_s - work.remaining_s
            key = self._class_of(work_s)
            return Rank(URGENT, reason, key, until_s + 1e-9 * abs(until_s), worsens=True)
        chance = chance_alone(invocation, slack_s, work.token_s)
        if chance < self.unlikely:
            return Rank(HOPELESS, f"in time with chance {chance:.2f}", key=work_s)
        reason = f"urgent, in time with chance {chance:.2f}, {slack_s:.3f} s of slack"
        until_s = now_s + max(work.token_s, self.refreshed * work.service_s)
        return Rank(URGENT, reason, self._class_of(work_s / chance), until_s, worsens=True)

    def _class_of(self, work_s: float) -> float:
        """Classes of work, each `alike` times as long as the one before."""
        return floor(log(work_s) / log(self.alike)) if work_s > 0 else -inf
