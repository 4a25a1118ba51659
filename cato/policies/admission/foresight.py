"""Who may join a running batch, in CATO's default policy."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from math import inf

from cato.core.decision import Admit, Defer
from cato.core.snapshot import Invocation, ReplicaView
from cato.policies.outlook import (
    BY_TOKENS_LEFT,
    chances,
    prospect_of,
    prospect_of_newcomer,
)


@dataclass(frozen=True, slots=True)
class ForesightAdmission:
    """Project the whole running set with the newcomer in it; admit when more SLOs are met.

    The chance of each to be in time comes from what is believed of its length, given what it has
    generated. A newcomer joins when its own chance exceeds `price` times what it takes from those
    that run. One prompt at a time: while one is being processed the next waits here, where its
    place can still change. What cannot be in time, or has no SLO, gets `reserve` of the places,
    one at least, and only at no loss.
    """

    price: float = 1.0
    reserve: float = 0.1
    unlikely: float = 0.1

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        running = replica.running
        if not running:
            return Admit("the replica is idle")
        if replica.prefilling:
            return Defer("a prompt is being processed", closes=True)
        profile = replica.profile
        prospects = sorted(map(prospect_of, running), key=BY_TOKENS_LEFT)
        before = chances(profile, now_s, prospects)
        mine = prospect_of_newcomer(invocation)
        joined = prospects.copy()
        insort(joined, mine, key=BY_TOKENS_LEFT)
        start_s = now_s + profile.prefill_s(invocation.prompt_tokens)
        after = chances(profile, start_s, joined)
        own = after[joined.index(mine)]
        loss = sum(before) - (sum(after) - own)
        if invocation.until_first_token and invocation.tpot_target_s == inf:
            own = 1.0 if start_s <= invocation.deadline_s else 0.0
        if own > self.unlikely:
            if own >= self.price * loss:
                return Admit(f"in time with chance {own:.2f}, costs the others {loss:.2f}")
            return Defer(f"in time with chance {own:.2f}, but costs the others {loss:.2f}")
        if loss > 0.01:
            return Defer(f"in time with chance {own:.2f}, costs the others {loss:.2f}")
        places = max(1, int(self.reserve * replica.max_running))
        taken = sum(c <= self.unlikely for c in before)
        if taken >= places:
            return Defer(f"{taken} run already that are late or have no SLO")
        return Admit(f"in time with chance {own:.2f}; place {taken + 1} of {places} for such")
