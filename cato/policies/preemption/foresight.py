"""Preemption in CATO's default policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from cato.core.ids import InvocationId
from cato.core.policies import NO_LOAD, QueueLoad
from cato.core.pool.window import takes_prompt
from cato.core.profile import Profile
from cato.core.snapshot import READING_S, Invocation, ReplicaView, due_at_pace_s
from cato.policies.admission.foresight import is_aged
from cato.policies.outlook import (
    MOST_LOSS,
    Outlook,
    Prospect,
    beside,
    can_be_met,
    chances,
    outlook_of,
    prospect_of_newcomer,
)

# What a stream may lose that must not be preempted at all.
NEVER = -1.0


@dataclass(frozen=True, slots=True)
class ForesightPreemption:
    """Hopeless calls yield if others gain; calls with slack yield to calls without.

    Hopeless calls: while a call that can be in time is queued, they yield if the calls beside them
    gain from shorter steps, or if the queued call needs their slot. They go after all calls that
    can be met. At lighter load they continue: they would only come back later, at the same cost.
    Calls without an SLO, at any load: as few as possible, if the first queued call and those that
    run then meet more SLOs, by at least `least_by_pace`: where slots are many, what is short is not
    slots but the time of a step.
    Calls with slack: the pool is full, and exchanging the running call with the first queued call,
    until the next slot frees, meets more SLOs, by at least `least_exchange`. What it costs to
    process the context again is subtracted, as a share of the queued call's service. In a queue
    longer than `longest_queue` a preempted call that must end in time pushes out another one: then
    the queued call's service is subtracted too, as a share of the longest one in the queue. Streams
    that have begun, and calls without an SLO, may wait until all queued calls that can be in time
    have started, if the streams still keep their pace, and may rest more than once. A pace that is
    an SLO may be lost with a chance of `most_loss` at most in a long queue, because calls that
    arrive later delay the stream further. If more than `deep` of the work was missed lately, such a
    stream goes on: no time is left over in which it could catch up. Tokens are kept; the context is
    processed again, and in a long queue or a crowd that takes, of a stream with such a pace, at
    most `again` of its share of the work to come, times the cube of the share of such rests that
    were not in vain: where many replicas share a queue, a place is free soon, and its rest only
    takes one from others. When calls have just begun to queue, these bounds are
    `most_loss_in_burst` and `again_in_burst`; they fall until calls have been queued for as long as
    the stream could rest: a burst is over by then.
    In a crowd the wait of the last queued stream exceeds the first one's slack at arrival: it would
    be late, too, in its place. Then as many streams rest at once as queued ones can still begin in
    time, even if the first could wait for the next slot. A crowd may last `lasts` times as long
    again as it has lasted, and a stream whose pace is no SLO rests only if it then still keeps that
    of a reader: in an overload that lasts, a rest makes room for one call and takes it from
    another.
    """

    least_gain: float = 0.1
    least_exchange: float = 0.05
    least_by_pace: float = 0.5
    # Below `PREEMPTORS_SHOWN` of the orchestrator, which limits the visible part of the queue.
    longest_queue: int = 7
    most_loss: float = MOST_LOSS
    again: float = 0.3
    most_loss_in_burst: float = 0.1
    again_in_burst: float = 1.0
    lasts: float = 2.0
    deep: float = 0.5

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
        load: QueueLoad = NO_LOAD,
    ) -> Sequence[tuple[InvocationId, str]]:
        profile = replica.profile
        outlook = replica.derived(outlook_of, now_s)
        running = outlook.prospects
        lost = [
            p
            for p, c in zip(running, outlook.chances, strict=True)
            if c <= 0
            and p.due_s < inf
            and not p.invocation.session
            and not is_aged(p.invocation, now_s)
        ]
        wanting = sum(can_be_met(i, profile, now_s) for i in waiting) if lost else 0
        if wanting:
            gone = {p.invocation.id for p in lost}
            kept = [p for p in running if p.invocation.id not in gone]
            gain = sum(chances(profile, now_s, kept)) - outlook.total
            if gain >= self.least_gain:
                reason = f"cannot be in time; {len(kept)} others gain {gain:.2f} without it"
                return [(p.invocation.id, reason) for p in lost]
        without_slo = self._without_slo(replica, waiting, now_s, outlook)
        if without_slo:
            return without_slo
        # All its calls may have been leased before a restart of the router.
        if replica.held < replica.max_running or not running:
            return ()
        if lost:
            worst = sorted(lost, key=lambda p: (-p.left_tokens, p.invocation.id))[:wanting]
            reason = "cannot be in time; one that can waits for its place"
            return [(p.invocation.id, reason) for p in worst]
        if not waiting or waiting[0].deadline_s == inf or not takes_prompt(replica, waiting[0]):
            return ()
        resting = self._resting(replica, waiting, now_s, load)
        if resting:
            return resting
        wait_s = place_s()
        if wait_s <= 0:
            return ()
        candidate = prospect_of_newcomer(waiting[0])
        if _can_wait(candidate, replica, now_s + wait_s):
            return ()
        return self._exchange(replica, waiting, candidate, now_s, wait_s, load)

    def _without_slo(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        outlook: Outlook,
    ) -> Sequence[tuple[InvocationId, str]]:
        """Calls without an SLO, if the first queued call could not keep its SLO beside them."""
        profile, running = replica.profile, outlook.prospects
        # Those without a token would have had their prompts in vain.
        others = [
            p
            for p in running
            if p.invocation.deadline_s == inf and p.generated > 0 and _may_rest(p.invocation)
        ]
        if not (others and waiting and can_be_met(waiting[0], profile, now_s)):
            return ()
        first = waiting[0]
        if not takes_prompt(replica, first):
            return ()
        candidate = prospect_of_newcomer(first)
        start_s = now_s + profile.prefill_s(first.prompt_tokens)

        def met(running: Sequence[Prospect]) -> float:
            return sum(beside(profile, running, candidate, start_s, replica.first_late_s))

        before = met(running)
        others.sort(key=lambda p: (-p.left_tokens, p.invocation.id))
        for some in (others[:n] for n in _doubling(len(others))):
            gone = {p.invocation.id for p in some}
            gain = met([p for p in running if p.invocation.id not in gone]) - before
            if gain >= self.least_by_pace:
                reason = f"no SLO; {first.id} needs its share of the steps: {gain:.2f} SLOs more"
                return [(p.invocation.id, reason) for p in some]
        return ()

    def _resting(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        load: QueueLoad,
    ) -> Sequence[tuple[InvocationId, str]]:
        """Streams that rest while queued ones begin, one for each that can still be in time."""
        profile, first = replica.profile, waiting[0]
        if not first.until_first_token:
            return ()
        slack_s = first.deadline_s - first.arrived_at_s - profile.first_token_s(first.prompt_tokens)
        if load.ahead_s <= slack_s:
            return ()
        outlook = replica.derived(outlook_of, now_s)
        lasts_s = self.lasts * load.crowded_s
        losses = self._losses(profile, outlook, now_s, load, inf, is_long=True, lasts_s=lasts_s)
        begins = sum(i.until_first_token and can_be_met(i, profile, now_s) for i in waiting)
        reason = (
            f"can rest {load.rest_s:.2f} s; the last queued stream begins in {load.ahead_s:.2f} s"
        )
        rests = [outlook.prospects[at].invocation.id for _, _, at in sorted(losses)[:begins]]
        return [(id, reason) for id in rests]

    def _exchange(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        candidate: Prospect,
        now_s: float,
        place_s: float,
        load: QueueLoad,
    ) -> Sequence[tuple[InvocationId, str]]:
        """Whether the head of the queue, which gets the slot, should take another call's slot."""
        outlook = replica.derived(outlook_of, now_s)
        profile, running, first = replica.profile, outlook.prospects, waiting[0]
        service_s = profile.service_s(first.prompt_tokens, first.expected_tokens, len(running))
        back_s = now_s + min(place_s, service_s)
        is_long, price = len(waiting) > self.longest_queue, 0.0
        if is_long:
            queued = [(i.prompt_tokens, i.expected_tokens, len(running)) for i in waiting[1:]]
            price = service_s / max(profile.service_s(*each) for each in queued)
        losses = self._losses(profile, outlook, back_s, load, price, is_long=is_long)
        if not losses:
            return ()
        loss, _, at = min(losses)
        rest = [*running[:at], *running[at + 1 :]]
        start_s = now_s + profile.prefill_s(first.prompt_tokens)
        late_s = replica.first_late_s
        own, others = beside(profile, rest, candidate, start_s, late_s)
        share = _share(candidate, profile, len(running))
        gain = own * share - loss + others - (outlook.total - outlook.chances[at])
        # Others lose the time in which its context is processed again.
        gain -= profile.prefill_s(int(running[at].context_tokens)) / service_s
        if gain >= self.least_exchange:  # otherwise not even if it had no chance later
            gain -= share * beside(profile, rest, candidate, start_s + place_s, late_s)[0]
        if gain < self.least_exchange:
            return ()
        reason = f"can wait {place_s:.2f} s for a place, {first.id} cannot: {gain:.2f} SLOs more"
        return [(running[at].invocation.id, reason)]

    def _losses(
        self,
        profile: Profile,
        outlook: Outlook,
        back_s: float,
        load: QueueLoad,
        price: float,
        *,
        is_long: bool,
        lasts_s: float = 0.0,
    ) -> list[tuple[float, float, int]]:
        """What each running call that may be preempted would lose; of equals those with the most
        tokens to come first. The last value is its place in the outlook. A call whose end decides
        its SLO costs `price` more, as queued calls have to wait for its rest (inf: none is
        preempted).

        It would go on at `back_s`, when the slot is free again, or `load.rest_s` later at the
        latest, after all queued calls that can be in time, and after those that have begun. Those
        go on one after another, so a stream whose pace is no SLO is expected halfway between, and
        `lasts_s` later, as more calls come. One whose pace is an SLO follows new calls, and those
        that must go on sooner. A call whose end decides its SLO may then have to wait for as long
        as it still needs: calls that arrive meanwhile go first.
        """
        running, batch = outlook.prospects, len(outlook.prospects)
        step_s = profile.decode_step_s(batch)
        # Its context takes that long to process again, at most.
        again_s = profile.prefill_s(int(max(p.context_tokens for p in running)))
        back_s += again_s
        late_s = back_s + load.rest_s
        soon: list[float] = []
        if price < inf:
            urgent = [replace(p, due_s=p.due_s - again_s - p.left_tokens * step_s) for p in running]
            soon = chances(profile, back_s, urgent)
        found = []
        for i, (p, chance) in enumerate(zip(running, outlook.chances, strict=True)):
            if not _may_rest(p.invocation):
                continue
            left_s = p.left_tokens * step_s
            if p.due_s < inf and (p.invocation.until_first_token or p.invocation.is_paced_rest):
                loss = _pace_loss(p, back_s + load.rest_before_s(p.due_s - left_s), step_s)
                costs_s = profile.prefill_s(int(p.context_tokens))
                slack_s = p.due_s - left_s - back_s
                most_loss, most_again = self._bounds(load, slack_s, is_long=is_long)
                may_yield = loss <= most_loss and costs_s <= most_again * left_s / batch
                if may_yield and p.generated > 0:
                    found.append((loss, -p.left_tokens, i))
            elif p.invocation.until_first_token or p.invocation.deadline_s == inf:
                goes_on_s = (back_s + late_s) / 2 + lasts_s
                if _keeps_pace(p, goes_on_s + left_s):
                    found.append((0.0, -p.left_tokens, i))
            elif price < inf:
                loss = (chance - soon[i]) * _share(p, profile, batch) + price
                found.append((loss, 0.0, i))
        return found

    def _bounds(self, load: QueueLoad, slack_s: float, *, is_long: bool) -> tuple[float, float]:
        """What a rest may risk and cost if the stream can rest for `slack_s`."""
        if load.missed > self.deep:
            return NEVER, 0.0
        if not is_long:
            return 1.0, inf  # an exchange is worth its cost, or it is not made
        burst = max(0.0, 1.0 - load.crowded_s / slack_s) if slack_s > 0 else 0.0
        most_loss = self.most_loss + burst * (self.most_loss_in_burst - self.most_loss)
        again = self.again + burst * (self.again_in_burst - self.again)
        return most_loss, again * (1.0 - load.in_vain) ** 3


def _can_wait(candidate: Prospect, replica: ReplicaView, start_s: float) -> bool:
    """Whether it is sure to be in time if its prompt begins at `start_s` in a batch as full as now,
    as long as its output is not longer than believed."""
    call, profile = candidate.invocation, replica.profile
    start_s += profile.prefill_s(call.prompt_tokens)
    if call.until_first_token and start_s + replica.first_late_s > call.deadline_s:
        return False
    if candidate.due_s == inf:
        return True
    if candidate.first == len(candidate.points):
        return False  # it is longer already, and nobody knows by how much
    batch, left_tokens = len(replica.running), candidate.points[-1] - candidate.generated
    context = (replica.context_tokens + call.prompt_tokens) / batch + left_tokens
    return start_s + left_tokens * profile.decode_step_s(batch, context) <= candidate.due_s


def _pace_loss(prospect: Prospect, back_s: float, step_s: float) -> float:
    """The chance that a stream falls behind its target pace if it goes on at `back_s` only.

    A longer rest can make up for more: each token gains the difference to the pace.
    """
    pace_s = prospect.invocation.tpot_target_s
    behind_s = back_s - (prospect.due_s - pace_s * prospect.left_tokens)
    if behind_s <= 0:
        return 0.0
    return prospect.chance(behind_s / (pace_s - step_s)) if pace_s > step_s else 1.0


def _keeps_pace(prospect: Prospect, end_s: float) -> bool:
    """Whether it is a stream that has begun and, ending at `end_s`, keeps at least the pace of a
    reader. One that has not begun must not be preempted: its first token would come too late."""
    tokens = prospect.generated + prospect.left_tokens
    due_s = due_at_pace_s(prospect.invocation.deadline_s, READING_S, tokens)
    return prospect.generated > 0 and end_s <= due_s


def _may_rest(invocation: Invocation) -> bool:
    """Whether it can go on later, and leaves no context that its session needs."""
    return invocation.resumable and not invocation.session


def _doubling(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and at last `most`."""
    n = 1
    while n < most:
        yield n
        n *= 2
    yield most


def _share(prospect: Prospect, profile: Profile, batch: int) -> float:
    """How far its own end decides the SLO; the expected downstream calls decide the rest."""
    left_s = prospect.left_tokens * profile.decode_step_s(batch)
    return left_s / (left_s + prospect.invocation.downstream_s) if left_s > 0 else 1.0
