"""The queue order of CATO's default policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf, log

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation
from cato.policies.ordering.hopeless_last import doubted_s, latest_start_s
from cato.policies.outlook import UNLIKELY, chance_alone

URGENT, PACED, DOUBTFUL, UNBOUND, HOPELESS = range(5)
# The rank of a call with slack is computed again after this share of it, as the queue may grow.
REVIEW, LEAST_REVIEW_S = 0.5, 1e-3


@dataclass(frozen=True, slots=True)
class ForesightOrdering:
    """Urgent feasible calls first, by least work per chance; then by slack; hopeless last.

    Urgent: the slack is shorter than `of_queue` of the queued work that can be met plus
    `margin` times the call's own. Of the urgent calls the shortest goes first: it costs the others
    least (Moore, 1968, keeps the same ones). Work counts more the less likely it is in time, by the
    belief about its length. Streams whose work differs by less than their decoding may (`alike`
    times) go by arrival: as their lengths are uncertain, it is better to keep those that can wait
    until a burst is over. Where prompts take nearly all the time, the order is exact. New streams
    whose prompts take most of their work are urgent earlier: once `of_prompts` times the queue
    exceeds the slack that they came with, the shortest goes first.

    Doubtful: a stream that is in time only if its first token comes as soon as predicted
    (`doubted_s`). Such calls follow those that can be met.

    Calls that are not urgent go by slack: where all can be met, that order meets them. The engine
    gives both the same priority, or urgent calls that come later would pass prompts that wait
    there. If more than `overload` of the work was missed lately, new calls with less slack than
    `urgency` times their own work are urgent: the shortest goes first, and what can wait, waits.
    For those that go on, `margin` is `again`. If more than `deep` was missed, all is urgent: short
    calls that wait would find only long ones before them. Without an SLO: after all calls that can
    be met. Hopeless: late with a chance above 1 - `unlikely` even if started now, alone. Hopeless
    calls go last, shortest first. Turns of sessions, which no other replica can take over, gain
    priority as they wait. A stream that began in time, and whose pace is no SLO, is never hopeless:
    `most_behind_s` behind the pace of its reader it goes before all others. One whose pace is an
    SLO ranks like a new stream while more than `most_in_vain` of such rests were in vain: it needs
    less than most.

    Measured (0020): shortest first at all times loses to bounded EDF at bearable load, and EDF
    loses to bounded SJF in overload.
    """

    margin: float = 1.0
    of_queue: float = 0.7
    of_prompts: float = 6.0
    overload: float = 0.01
    urgency: float = 20.0
    again: float = 3.0
    deep: float = 0.2
    unlikely: float = UNLIKELY
    alike: float = 1.2
    most_in_vain: float = 0.8
    most_behind_s: float = 5.0
    # For sessions: a second of waiting offsets this much additional work.
    aging: float = 0.05
    # A rank by chance is computed again after this share of the work, because it changes over time.
    refreshed: float = 0.1

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        deadline_s = invocation.deadline_s
        if deadline_s == inf:
            return Rank(UNBOUND, "no SLO", key=invocation.arrived_at_s)
        slack_s = deadline_s - work.remaining_s - now_s
        # A stream is in time once it has begun. Its decoding follows: on a replica with few batch
        # slots that costs the others more than its prompt.
        is_stream = invocation.until_first_token
        own_s = (work.load_s or work.remaining_s) if is_stream else work.service_s
        work_s = own_s + invocation.downstream_s
        margin, ahead_s = self.margin, self.of_queue * work.ahead_s
        if work.missed > self.overload and invocation.generated:
            margin = self.again
        elif work.missed > self.overload:
            margin, ahead_s = self.urgency, 0.0
        relaxed_s = deadline_s - (1 + margin) * work.remaining_s - ahead_s - now_s
        has_slack = relaxed_s > 0 and work.missed <= self.deep
        if has_slack and not self._is_crowd_of_prompts(invocation, work):
            until_s = now_s + max(REVIEW * relaxed_s, LEAST_REVIEW_S)
            key = deadline_s - work.remaining_s
            reason = f"{slack_s:.3f} s of slack"
            return Rank(PACED, reason, key=key, until_s=until_s, in_engine=URGENT)
        if is_stream or work.token_s <= 0:
            if slack_s < 0:
                if invocation.session:
                    work_s += self.aging * invocation.arrived_at_s
                return Rank(HOPELESS, f"hopeless by {-slack_s:.3f} s", key=work_s)
            latest_s, doubt_s = latest_start_s(invocation, work), doubted_s(invocation, work)
            if slack_s < doubt_s:
                reason = f"doubtful, {slack_s:.3f} s of slack"
                return Rank(DOUBTFUL, reason, work_s, latest_s, worsens=True)
            reason = f"urgent, {slack_s:.3f} s of slack"
            key = self._key_of(work_s, work.decoding_s)
            return Rank(URGENT, reason, key, latest_s - doubt_s, worsens=True)
        if invocation.begun_in_time and invocation.tpot_target_s == inf:
            return self._rank_of_rest(slack_s, work_s, now_s)
        chance = chance_alone(invocation, slack_s, work.token_s)
        if chance < self.unlikely:
            reason = f"likely late, {slack_s:.3f} s of slack, chance {chance:.2f}"
            return Rank(HOPELESS, reason, key=work_s)
        reason = f"urgent, in time with chance {chance:.2f}, {slack_s:.3f} s of slack"
        until_s = now_s + max(work.token_s, self.refreshed * work.service_s)
        key = work_s / chance
        if work.in_vain > self.most_in_vain:
            key = self._key_of(key, 0.0)
        return Rank(URGENT, reason, key, until_s, worsens=True)

    def _is_crowd_of_prompts(self, invocation: Invocation, work: Work) -> bool:
        """Whether a new stream, most of whose work is known, may wait longer than it can."""
        is_new = invocation.until_first_token and not invocation.generated
        if not is_new or invocation.session or 2 * work.decoding_s >= work.load_s:
            return False
        came_with_s = invocation.deadline_s - invocation.arrived_at_s
        slack_s = came_with_s - (1 + self.margin) * work.remaining_s
        return self.of_prompts * work.ahead_s > slack_s

    def _rank_of_rest(self, slack_s: float, work_s: float, now_s: float) -> Rank:
        """Of a stream that began in time and has no target pace: its SLO is met if it ends."""
        left_s = slack_s + self.most_behind_s
        if left_s < 0:
            return Rank(URGENT, f"its reader waits, {-slack_s:.3f} s behind", key=-inf)
        until_s = now_s + max(left_s, LEAST_REVIEW_S)
        return Rank(URGENT, f"goes on, {slack_s:.3f} s of slack", key=work_s, until_s=until_s)

    def _key_of(self, work_s: float, decoding_s: float) -> float:
        """The natural logarithm of the work, in steps of what its decoding may take more or less.

        Calls due as a whole rank by seconds of work per chance, so nearly all streams go before
        them: a stream is in time once it has begun.
        """
        if work_s <= 0:
            return -inf
        if decoding_s > 0:
            step_s = (self.alike - 1) * self.alike ** floor(log(decoding_s) / log(self.alike))
            work_s = step_s * floor(work_s / step_s)
        return log(work_s)
