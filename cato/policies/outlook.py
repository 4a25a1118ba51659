"""The outlook of a running set: how likely is each of its SLOs met, if nobody joins later?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from cato.core.profile import Profile
from cato.core.snapshot import Invocation, ReplicaView, Running
from cato.policies.due import due_s


@dataclass(frozen=True, slots=True)
class Prospect:
    """One of a running set. `left_tokens` and `context_tokens` are expected values, `due_s` is the
    instant by which its last token must have come (inf: its SLO is settled, or there is none).
    """

    left_tokens: float
    context_tokens: float
    due_s: float
    invocation: Invocation
    generated: int

    def chance(self, tokens: float) -> float:
        """Probability that its output ends within `tokens` more tokens."""
        if self.invocation.length is not None:
            return self.invocation.length.chance_within(tokens, self.generated)
        return 1.0 if self.left_tokens <= tokens else 0.0


def prospect_of(running: Running) -> Prospect:
    invocation = running.invocation
    left, generated = running.left_tokens, invocation.generated + running.tokens
    due = due_s(invocation, running.first_token_at_s, generated + left)
    return Prospect(left, running.context_tokens, due, invocation, generated)


def prospect_of_newcomer(invocation: Invocation) -> Prospect:
    left = invocation.left_tokens()
    due = due_s(invocation, None, invocation.generated + left)
    return Prospect(left, invocation.prompt_tokens, due, invocation, invocation.generated)


BY_TOKENS_LEFT = attrgetter("left_tokens")


def tokens_until_due(
    profile: Profile, start_s: float, prospects: Sequence[Prospect]
) -> list[float]:
    """Tokens that each gets until it is due; `prospects` ascend by tokens left.

    All get a token per step. Whoever is expected to be done leaves, and the steps of the others
    become shorter: step(b, S) = base + per_request · b + per_context_token · S.
    """
    batch = len(prospects)
    context = 0.0
    for p in prospects:
        context += p.context_tokens
    base_s, request_s = profile.decode_base_s, profile.decode_per_request_s
    token_s = profile.decode_per_context_token_s
    knots_s, knot_tokens, steps_s = [start_s], [0.0], []
    t, done, step_s = start_s, 0.0, 0.0
    for p in prospects:
        steps = p.left_tokens - done
        if steps > 0:
            step_s = base_s + request_s * batch + token_s * (context + batch * steps / 2)
            t += steps * step_s
            context += batch * steps
            done = p.left_tokens
            knots_s.append(t)
            knot_tokens.append(done)
            steps_s.append(step_s)
        batch -= 1
        context -= p.context_tokens + p.left_tokens
    steps_s.append(step_s)
    tokens: list[float] = []
    for p in prospects:
        if p.due_s == inf:
            tokens.append(inf)
        elif p.due_s <= start_s:
            tokens.append(0.0)
        else:
            i = bisect_right(knots_s, p.due_s) - 1
            tokens.append(knot_tokens[i] + (p.due_s - knots_s[i]) / steps_s[i])
    return tokens


def chances(profile: Profile, start_s: float, prospects: Sequence[Prospect]) -> list[float]:
    """Probability of each that its last token comes in time; 0 where nothing is due.

    What is not due can neither be won nor lost, so it counts as nothing.
    """
    return [
        0.0 if p.due_s == inf else p.chance(tokens)
        for p, tokens in zip(prospects, tokens_until_due(profile, start_s, prospects), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Outlook:
    """A running set at one instant: its prospects by tokens left, and their chances."""

    prospects: tuple[Prospect, ...]
    chances: tuple[float, ...]
    total: float


def outlook_of(replica: ReplicaView, now_s: float) -> Outlook:
    """Of what `replica` runs; ask for it by `replica.derived(outlook_of, now_s)`."""
    prospects = sorted(map(prospect_of, replica.running), key=BY_TOKENS_LEFT)
    each = chances(replica.profile, now_s, prospects)
    return Outlook(tuple(prospects), tuple(each), sum(each))


@dataclass(frozen=True, slots=True)
class Joining:
    """What it would mean to let an invocation join: its own chance, and what the others lose."""

    own: float
    loss: float


def joining(invocation: Invocation, replica: ReplicaView, now_s: float) -> Joining:
    """Project the running set with the newcomer in it; its prompt delays all others."""
    profile = replica.profile
    outlook = replica.derived(outlook_of, now_s)
    mine = prospect_of_newcomer(invocation)
    at = bisect_right(outlook.prospects, mine.left_tokens, key=BY_TOKENS_LEFT)
    joined = [*outlook.prospects[:at], mine, *outlook.prospects[at:]]
    start_s = now_s + profile.prefill_s(invocation.prompt_tokens)
    after = chances(profile, start_s, joined)
    own = after[at]
    loss = outlook.total - (sum(after) - own)
    if invocation.until_first_token:
        in_time = start_s <= invocation.deadline_s
        own = (own if mine.due_s < inf else 1.0) if in_time else 0.0
    return Joining(own, loss)
