"""Who may join a running batch, in CATO's default policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from cato.core.decision import Admit, Defer
from cato.core.profile import Profile
from cato.core.snapshot import Invocation, ReplicaView
from cato.policies.due import due_s, running_due_s


def projected_ends_s(
    profile: Profile, start_s: float, left: Iterable[tuple[float, float]]
) -> list[float]:
    """When each of a running set has its last token, if nobody joins later.

    `left` holds (tokens left, context tokens), ascending by tokens left. All get a token per step;
    whoever is done leaves, and the steps of the others become shorter.
    """
    items = list(left)
    batch = len(items)
    context = sum(c for _, c in items)
    base_s, request_s = profile.decode_base_s, profile.decode_per_request_s
    token_s = profile.decode_per_context_token_s
    ends: list[float] = []
    t, done = start_s, 0.0
    for tokens, own_context in items:
        steps = tokens - done
        if steps > 0:
            step_s = base_s + request_s * batch + token_s * (context + batch * steps / 2)
            t += steps * step_s
            context += batch * steps
            done = tokens
        ends.append(t)
        batch -= 1
        context -= own_context + tokens
    return ends


@dataclass(frozen=True, slots=True)
class ForesightAdmission:
    """Project the finish of the whole running set with the newcomer in it; admit without net loss.

    A newcomer may join when it saves more SLOs than its company costs those that run, or costs
    none. One prompt at a time: while one is being processed the next waits here, where its place
    can still change. What cannot meet its SLO any more, or has none, gets `reserve` of the places,
    one at least, and never at the price of one that can.
    """

    reserve: float = 0.1

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        running = replica.running
        if not running:
            return Admit("the replica is idle")
        if replica.prefilling:
            return Defer("a prompt is being processed", closes=True)
        profile = replica.profile
        left = sorted(
            ((r.left_tokens, r.context_tokens, running_due_s(r)) for r in running),
        )
        without = projected_ends_s(profile, now_s, [(t, c) for t, c, _ in left])
        start_s = now_s + profile.prefill_s(invocation.prompt_tokens)
        own_tokens = invocation.left_tokens()
        own_due = due_s(invocation, None, invocation.generated + own_tokens)
        mine = (own_tokens, float(invocation.prompt_tokens), own_due)
        joined = sorted([*left, mine])
        ends = projected_ends_s(profile, start_s, [(t, c) for t, c, _ in joined])
        met_before = sum(e <= due for e, (_, _, due) in zip(without, left, strict=True))
        own_end = ends[joined.index(mine)]
        own_met = own_end <= own_due and (
            not invocation.until_first_token or start_s <= invocation.deadline_s
        )
        met_after = sum(e <= due for e, (_, _, due) in zip(ends, joined, strict=True)) - (
            own_end <= own_due
        )
        lost = met_before - met_after
        if own_met and invocation.deadline_s < inf:
            if lost <= 0:
                return Admit(f"meets its SLO beside {len(left)}, at no loss")
            return Defer(f"would cost {lost} of {len(left)} their SLO")
        if lost > 0:
            return Defer(f"cannot meet its SLO here, and would cost {lost} theirs")
        places = max(1, int(self.reserve * replica.max_running))
        taken = sum(e > due or due == inf for e, (_, _, due) in zip(without, left, strict=True))
        if taken >= places:
            return Defer(f"{taken} run already that are late or have no SLO")
        return Admit(f"cannot meet its SLO; place {taken + 1} of {places} for such")


