"""The queue order of CATO's default policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, log

from cato.core.decision import Rank
from cato.core.policies import Plan, Queued, Work
from cato.core.snapshot import Invocation
from cato.policies.ordering.hopeless_last import doubted_s, latest_start_s
from cato.policies.ordering.keep_most import keep_most
from cato.policies.outlook import MOST_LOSS, UNLIKELY, believed, chance_alone, others_tokens

BEHIND, KEPT, DROPPED, RELAXED, DOUBTFUL, UNBOUND, HOPELESS = range(7)
# Their priority in the engine, but for the last three: one that comes later must not pass there.
IN_ENGINE = BEHIND
LEAST_REVIEW_S = 1e-3


@dataclass(frozen=True, slots=True)
class ForesightOrdering:
    """The calls that the plan of the queue keeps, in its order; then others; hopeless last.

    The plan keeps as many calls in time as possible (`keep_most`), as if all of them took longer
    (`_stretch`): more will come. A stream should start before it is doubtful (below). Of those
    kept, the shortest go first, but a longer one waits for them only while it has `margin` times
    the time that it needs. Turns of sessions that are kept go by deadline: one that comes sooner
    leaves its session more time. Of the others the one with the least work per chance goes first:
    it costs the others least. Work counts more the less likely it is in time, by the belief about
    its length. Streams whose work differs by less than their decoding may (`alike` times) go by
    arrival. Where prompts take nearly all the time, the order is exact. Calls due as a whole are
    never planned, since their pace depends on what runs beside them. Those of one run that are here
    at once count together: all of their work, and the chance that all of them are in time. While a
    call due as a whole has more slack than `relaxed` times its time alone, it follows the others,
    by deadline.

    Doubtful: a stream that is in time only if its first token comes as soon as predicted
    (`doubted_s`). Such calls follow those that can be met. Without an SLO: after all calls that can
    be met. Hopeless: late with a chance above 1 - `unlikely` even if started now, alone. Hopeless
    calls go last, shortest first. Turns of sessions, which no other replica can take over, gain
    priority as they wait.

    A stream that began in time, and whose pace is no SLO, is never hopeless: its SLO is met if it
    ends. It has no place in the plan, but `most_behind_s` behind the pace of its reader it goes
    before all others. One whose pace is an SLO rests while it has more slack than `rests` times its
    time alone, and its pace is kept with a chance of 1 - `most_loss` even if its output is short,
    unless calls have been queued for longer than that slack: in a burst it loses nothing, and new
    calls that the plan drops can still begin. Then it goes on when it must. Its place in the plan,
    which is an early one as it needs less than most, counts only while more than `most_in_vain` of
    such rests were in vain.
    """

    margin: float = 6.0
    # What an overload that lasts adds to it, and from which share of missed work on it is one.
    lasting: float = 8.0
    lasts_from: float = 0.05
    relaxed: float = 5.0
    rests: float = 3.0
    most_loss: float = MOST_LOSS
    unlikely: float = UNLIKELY
    alike: float = 1.2
    most_in_vain: float = 0.65
    most_behind_s: float = 4.0
    # For sessions: a second of waiting offsets this much additional work.
    aging: float = 0.05
    # A rank by chance is computed again after this share of the work, because it changes over time.
    refreshed: float = 0.1

    def reserve_s(self, invocation: Invocation, work: Work) -> float:
        # Turns of sessions go by deadline, so they do not wait for shorter ones.
        return 0.0 if invocation.session else doubted_s(invocation, work)

    def plan(
        self,
        queued: Sequence[Queued],
        replicas: float,
        now_s: float,
        offered_load: float,
        missed: float,
    ) -> Plan:
        stretch = self._stretch(offered_load, missed)
        return keep_most(queued, replicas, now_s, stretch, self.margin)

    def _stretch(self, offered_load: float, missed: float) -> float:
        """How many times the queued work counts, as more comes before it is done; up to `margin`.

        If work comes as it came lately, at `offered_load`, then in the time of a call's slack as
        much as `offered_load - 1` of it comes on top, so the queue may only take the rest of it.
        Once work is missed the overload lasts: then a queue that uses up all slack only makes all
        calls start at the last moment, where every error makes them late.
        """
        beyond = max(0.0, offered_load - 1.0)
        soon = 1.0 / max(1.0 / self.margin, 1.0 - beyond)
        lasting = 1.0 + self.lasting * beyond * min(1.0, missed / self.lasts_from)
        return min(self.margin, max(soon, lasting))

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
        if is_stream or work.token_s <= 0:
            return self._rank_of_stream(invocation, work, slack_s, work_s)
        if invocation.begun_in_time and invocation.tpot_target_s == inf:
            return self._rank_of_rest(slack_s, work_s, now_s)
        is_rest = invocation.begun_in_time
        is_planned = is_rest and work.start_by_s < inf
        # A rest goes on when it must, with its own time once more as a margin.
        latest_s = deadline_s - (2 if is_rest else 1) * work.remaining_s
        is_early = is_planned and work.in_vain > self.most_in_vain
        # What has lasted longer than it could rest is no burst that will soon be over.
        has_lasted = is_planned and work.crowded_s > slack_s
        relaxed = self.rests if is_rest else self.relaxed
        relaxed_until_s = deadline_s - (1 + relaxed) * work.remaining_s
        if is_rest:
            relaxed_until_s = min(relaxed_until_s, self._sure_until_s(invocation, work))
        if now_s < relaxed_until_s and not (is_early or has_lasted):
            until_s = relaxed_until_s + LEAST_REVIEW_S
            return Rank(
                RELAXED, f"{slack_s:.3f} s of slack", latest_s, until_s, in_engine=IN_ENGINE
            )
        if is_planned and slack_s > 0:
            start_by_s = work.start_by_s if is_early else latest_s
            return self._kept(start_by_s, slack_s, now_s + slack_s)
        if invocation.stage:
            # What follows a stage takes as many calls again, as far as anyone knows.
            work_s += others_tokens(invocation) * work.token_s
            work_s += (len(invocation.stage) - 1) * invocation.downstream_s
        chance = chance_alone(invocation, slack_s, work.token_s)
        if chance < self.unlikely:
            reason = f"likely late, {slack_s:.3f} s of slack, chance {chance:.2f}"
            return Rank(HOPELESS, reason, key=work_s)
        reason = f"in time with chance {chance:.2f}, {slack_s:.3f} s of slack"
        until_s = now_s + max(work.token_s, self.refreshed * work.service_s)
        return Rank(DROPPED, reason, work_s / chance, until_s, worsens=True, in_engine=IN_ENGINE)

    def _sure_until_s(self, invocation: Invocation, work: Work) -> float:
        """Until when it may rest and keep its target pace with a chance of 1 - `most_loss`.

        An output that ends sooner than expected is due sooner: it has less time to catch up.
        """
        length, generated = believed(invocation), invocation.generated
        left, pace_s = length.left_mean(generated), invocation.tpot_target_s
        begins_s = invocation.deadline_s - pace_s * left - (work.remaining_s - left * work.token_s)
        shortest = length.left_quantile(self.most_loss, generated)
        return begins_s + shortest * (pace_s - work.token_s)

    def _rank_of_stream(
        self, invocation: Invocation, work: Work, slack_s: float, work_s: float
    ) -> Rank:
        """Of a call that is in time or not once it has begun."""
        if slack_s < 0:
            if invocation.session:
                work_s += self.aging * invocation.arrived_at_s
            return Rank(HOPELESS, f"hopeless by {-slack_s:.3f} s", key=work_s)
        latest_s, doubt_s = latest_start_s(invocation, work), doubted_s(invocation, work)
        if slack_s < doubt_s:
            reason = f"doubtful, {slack_s:.3f} s of slack"
            return Rank(DOUBTFUL, reason, work_s, latest_s, worsens=True)
        until_s = latest_s - doubt_s
        if work.start_by_s < inf:
            # A turn that comes sooner leaves its session more time for the others.
            start_by_s = latest_s if invocation.session else work.start_by_s
            return self._kept(start_by_s, slack_s, until_s)
        reason = f"{slack_s:.3f} s of slack, others are shorter"
        key = self._key_of(work_s, work.decoding_s)
        return Rank(DROPPED, reason, key, until_s, worsens=True, in_engine=IN_ENGINE)

    def _kept(self, start_by_s: float, slack_s: float, until_s: float) -> Rank:
        reason = f"kept in time, {slack_s:.3f} s of slack"
        return Rank(KEPT, reason, start_by_s, until_s, worsens=True, in_engine=IN_ENGINE)

    def _rank_of_rest(self, slack_s: float, work_s: float, now_s: float) -> Rank:
        """Of a stream that began in time and has no target pace: its SLO is met if it ends."""
        left_s = slack_s + self.most_behind_s
        if left_s < 0:
            return Rank(BEHIND, f"its reader waits, {-slack_s:.3f} s behind")
        until_s = now_s + max(left_s, LEAST_REVIEW_S)
        reason = f"goes on, {slack_s:.3f} s of slack"
        return Rank(DROPPED, reason, work_s, until_s, in_engine=IN_ENGINE)

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
