"""Who gives way, in CATO's default policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from cato.core.ids import InvocationId
from cato.core.pool.window import takes_prompt
from cato.core.profile import Profile
from cato.core.snapshot import Invocation, ReplicaView
from cato.policies.admission.foresight import is_aged
from cato.policies.outlook import (
    Outlook,
    Prospect,
    beside,
    chances,
    outlook_of,
    prospect_of_newcomer,
)


@dataclass(frozen=True, slots=True)
class ForesightPreemption:
    """What cannot be in time any more gives way when others can gain by it; what can wait gives
    its place to what cannot.

    Cannot be in time: it makes way while a call waits that can, for those that run beside it and
    gain by shorter steps, or for a place. It goes behind all that can be met. In a lighter load it
    runs on: it would only come back, and cost the others as much then. Can wait: the pool is full,
    and of the call that runs and the first that waits, more SLOs are met when they change places
    until the next place becomes free, by `least_exchange` or more. In a queue longer than
    `longest_queue` it would not come back in time. Tokens are kept; the context is processed again.
    """

    least_gain: float = 0.1
    least_exchange: float = 0.2
    # Below `PREEMPTORS_SHOWN` of the orchestrator: of a longer queue no more is seen.
    longest_queue: int = 7

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
    ) -> Sequence[tuple[InvocationId, str]]:
        profile = replica.profile
        outlook = replica.derived(outlook_of, now_s)
        pairs = list(zip(outlook.prospects, outlook.chances, strict=True))
        lost = [
            p
            for p, c in pairs
            if c <= 0
            and p.due_s < inf
            and not p.invocation.session
            and not is_aged(p.invocation, now_s)
        ]
        wanting = sum(_can_be_met(i, profile, now_s) for i in waiting) if lost else 0
        if wanting:
            gone = {p.invocation.id for p in lost}
            kept = [p for p, _ in pairs if p.invocation.id not in gone]
            gain = sum(chances(profile, now_s, kept)) - outlook.total
            if gain >= self.least_gain:
                reason = f"cannot be in time; {len(kept)} others gain {gain:.2f} without it"
                return [(p.invocation.id, reason) for p in lost]
        # What it holds may all have been leased before a restart of the router.
        if replica.held < replica.max_running or not pairs:
            return ()
        if lost:
            worst = sorted(lost, key=lambda p: (-p.left_tokens, p.invocation.id))[:wanting]
            reason = "cannot be in time; one that can waits for its place"
            return [(p.invocation.id, reason) for p in worst]
        may_exchange = 0 < len(waiting) <= self.longest_queue and waiting[0].deadline_s < inf
        if not may_exchange or not takes_prompt(replica, waiting[0]):
            return ()
        wait_s = place_s()
        if wait_s <= 0:
            return ()
        return self._exchange(replica, outlook, waiting[0], now_s, wait_s)

    def _exchange(
        self,
        replica: ReplicaView,
        outlook: Outlook,
        first: Invocation,
        now_s: float,
        place_s: float,
    ) -> Sequence[tuple[InvocationId, str]]:
        """Whether the first of the queue, to whom a place goes, should have that of another."""
        profile, running = replica.profile, outlook.prospects
        context_tokens = max(p.context_tokens for p in running)
        back_s = now_s + place_s + profile.prefill_s(int(context_tokens))
        later = chances(profile, back_s, running)
        losses = [
            ((now - then) * _share(p, profile, len(running)), i)
            for i, (p, now, then) in enumerate(zip(running, outlook.chances, later, strict=True))
            if _may_be_taken_back(p)
        ]
        if not losses:
            return ()
        loss, at = min(losses)
        rest = [*running[:at], *running[at + 1 :]]
        newcomer = prospect_of_newcomer(first)
        start_s = now_s + profile.prefill_s(first.prompt_tokens)
        own, others = beside(profile, rest, newcomer, start_s)
        share = _share(newcomer, profile, len(running))
        gain = own * share - loss + others - (outlook.total - outlook.chances[at])
        if gain >= self.least_exchange:  # else not even if it had no chance later
            gain -= share * beside(profile, rest, newcomer, start_s + place_s)[0]
        if gain < self.least_exchange:
            return ()
        reason = f"can wait {place_s:.2f} s for a place, {first.id} cannot: {gain:.2f} SLOs more"
        return [(running[at].invocation.id, reason)]


def _may_be_taken_back(prospect: Prospect) -> bool:
    """It has something to be in time for, and is no stream, whose start would look missed then."""
    invocation = prospect.invocation
    may_go_on = invocation.resumable and not invocation.session
    return prospect.due_s < inf and may_go_on and not invocation.until_first_token


def _share(prospect: Prospect, profile: Profile, batch: int) -> float:
    """How far its own end decides the SLO: the expected calls downstream decide the rest."""
    left_s = prospect.left_tokens * profile.decode_step_s(batch)
    return left_s / (left_s + prospect.invocation.downstream_s) if left_s > 0 else 1.0


def _can_be_met(invocation: Invocation, profile: Profile, now_s: float) -> bool:
    return now_s + invocation.remaining_s(profile) <= invocation.deadline_s < inf
