"""The outlook of a running set: how likely each SLO is met if no other call joins."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from operator import attrgetter

from cato.core.length import LengthBelief, around
from cato.core.pool.window import wait_for_prompts_s
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.snapshot import Invocation, ReplicaView, Running, due_s

# A candidate must gain this many times what the running calls lose: future arrivals pay, too.
# Chosen on seeds 0-9 of SABER's workloads and rows 1-2,500 of the trace.
PRICE = 3.0
# Least meaningful difference in SLOs: predictions cannot resolve less; below it the load decides.
# On two replicas, SABER's W3 at half load, beliefs of half the true lengths (seeds 0-5): 93.1 %,
# the same as simple rules, against 92.4 with differences of 0.01.
LEAST_DIFFERENCE = 0.1
# A call is hopeless if its chance to be in time alone is smaller than this.
UNLIKELY = 0.3
# What a stream with a target pace may risk by a rest: the chance that it falls behind that pace.
MOST_LOSS = 0.02
_LEAST_STEP_S = 1e-9


@dataclass(slots=True)
class Prospect:
    """One call of a running set.

    `left_tokens` and `context_tokens` are expected values, `due_s` is the deadline of its last
    token (inf: its SLO is settled, or there is none). `points` of `length` from `first` on are
    those above `generated`. Not frozen, because thousands are created per second; they are not
    mutated.
    """

    left_tokens: float
    context_tokens: float
    due_s: float
    invocation: Invocation
    generated: int
    length: LengthBelief
    points: tuple[float, ...]
    first: int

    def chance(self, tokens: float) -> float:
        """Probability that its output ends within `tokens` more tokens."""
        return self.length.chance_within(tokens, self.generated)


def prospect_of(running: Running) -> Prospect:
    return _prospect(running.invocation, running.tokens, running.first_token_at_s)


def prospect_of_newcomer(invocation: Invocation) -> Prospect:
    return _prospect(invocation, 0, None)


def _prospect(invocation: Invocation, tokens: int, first_token_at_s: float | None) -> Prospect:
    length, generated = believed(invocation), invocation.generated + tokens
    left = length.left_mean(generated)
    if invocation.until_first_token and (first_token_at_s or -inf) > invocation.deadline_s:
        due = inf  # its SLO is missed, so its pace decides nothing
    else:
        due = due_s(invocation, first_token_at_s, generated + left)
    first = bisect_right(length.points, generated)
    context = invocation.prompt_tokens + tokens
    return Prospect(left, context, due, invocation, generated, length, length.points, first)


def believed(invocation: Invocation) -> LengthBelief:
    """The belief about its whole output; never a point: see `LengthBelief.wide`."""
    return _believed(invocation.length, invocation.generated + invocation.expected_tokens)


def _believed(length: LengthBelief | None, expected_tokens: int) -> LengthBelief:
    return around(expected_tokens) if length is None else length.wide


def chance_alone(invocation: Invocation, slack_s: float, token_s: float) -> float:
    """Chance that its last token is in time if it starts now, alone, at `token_s` per token.

    `slack_s` is the slack that an output of the expected length would leave. What follows a stage
    waits for all of its calls, so all of them must end by then.
    """
    length = believed(invocation)
    tokens = length.left_mean(invocation.generated) + slack_s / token_s
    calls = invocation.stage or (invocation.as_stage_call(),)
    return prod(
        _believed(c.length, c.expected_tokens).chance_within(tokens, c.generated) for c in calls
    )


def others_tokens(invocation: Invocation) -> float:
    """Expected tokens to come of the other calls of its stage."""
    calls = invocation.stage
    left = sum(_believed(c.length, c.expected_tokens).left_mean(c.generated) for c in calls)
    return left - believed(invocation).left_mean(invocation.generated)


def can_be_met(invocation: Invocation, profile: Profile, now_s: float) -> bool:
    """Whether it is expected to be in time if it starts now, alone."""
    return now_s + invocation.remaining_s(profile) <= invocation.deadline_s < inf


BY_TOKENS_LEFT = attrgetter("left_tokens")


def chances(profile: Profile, start_s: float, prospects: Sequence[Prospect]) -> list[float]:
    """Chance of each call that its last token is in time; `prospects` ascend by tokens left.

    0 where nothing is due: calls that can neither win nor lose do not count. All get a token per
    step. Calls that reach their expected end leave, and the steps of the others become shorter:
    step(b, S) = base + per_request · b + per_context_token · S, and more if the batch is so large
    that computation exceeds the reads.
    """
    batch = len(prospects)
    context = 0.0
    last_due_s = start_s  # steps after it decide nothing
    for p in prospects:
        context += p.context_tokens
        if last_due_s < p.due_s < inf:
            last_due_s = p.due_s
    if last_due_s == start_s:
        return [0.0] * batch
    # A profile may contain steps that take no time; this keeps tokens per second finite.
    base_s, request_s = profile.step_base_s or _LEAST_STEP_S, profile.decode_per_request_s
    token_s, reads = profile.context_token_s, profile.weights_read_s > 0.0
    knots_s, knot_tokens, steps_s = [start_s], [0.0], []
    t, done, step_s = start_s, 0.0, 0.0
    for p in prospects:
        left = p.left_tokens
        steps = left - done
        if steps > 0:
            held = context + batch * steps / 2
            step_s = base_s + request_s * batch + token_s * held
            if reads:
                step_s += profile.beyond_reads_s(batch, held)
            t += steps * step_s
            context += batch * steps
            done = left
            knots_s.append(t)
            knot_tokens.append(done)
            steps_s.append(step_s)
            if t > last_due_s:
                break
        batch -= 1
        context -= p.context_tokens + left
    steps_s.append(step_s)
    found: list[float] = []
    for p in prospects:
        due = p.due_s
        if due == inf or due <= start_s:
            found.append(0.0)
            continue
        i = bisect_right(knots_s, due) - 1
        tokens = knot_tokens[i] + (due - knots_s[i]) / steps_s[i]
        points, first = p.points, p.first
        n = len(points) - first
        if n > 0:  # inlined `chance`: a router evaluates about thirty per dispatch
            found.append((bisect_right(points, p.generated + tokens, first) - first) / n)
        else:
            found.append(p.chance(tokens))
    return found


@record
class Outlook:
    """A running set at one instant: its calls by tokens left, and their chances."""

    prospects: tuple[Prospect, ...]
    chances: tuple[float, ...]
    total: float


def outlook_of(replica: ReplicaView, now_s: float) -> Outlook:
    """The outlook of the running set of `replica`; use `replica.derived(outlook_of, now_s)`."""
    prospects = sorted([r.derived(prospect_of) for r in replica.running], key=BY_TOKENS_LEFT)
    # Decoding almost stops while the prompts ahead are processed.
    each = chances(replica.profile, now_s + replica.prompts_ahead_s, prospects)
    return Outlook(tuple(prospects), tuple(each), sum(each))


def saved_s(invocation: Invocation, replica: ReplicaView) -> float:
    """Predicted saving in its prefill time from the replica's prefix cache."""
    cached = replica.cached_tokens(invocation)
    if not cached:
        return 0.0
    profile, tokens = replica.profile, invocation.prompt_tokens
    return profile.prefill_s(tokens) - profile.prefill_s(tokens, cached_tokens=cached)


@record
class Joining:
    """The effect of letting a call join: its own chance, and the loss of the others."""

    own: float
    loss: float


def net_cost(join: Joining, price: float) -> int:
    """SLOs that the others lose by it, less those gained; in steps of `LEAST_DIFFERENCE`."""
    return round((price * join.loss - join.own) / LEAST_DIFFERENCE)


def joining(invocation: Invocation, replica: ReplicaView, now_s: float) -> Joining:
    """Project the running set with the candidate in it; its prompt delays all others."""
    profile = replica.profile
    outlook = replica.derived(outlook_of, now_s)
    mine = prospect_of_newcomer(invocation)
    own_s = profile.prefill_s(invocation.prompt_tokens) - saved_s(invocation, replica)
    start_s = now_s + wait_for_prompts_s(replica, own_s) + own_s
    own, others = beside(profile, outlook.prospects, mine, start_s, replica.first_late_s)
    return Joining(own, outlook.total - others)


def beside(
    profile: Profile,
    running: Sequence[Prospect],
    candidate: Prospect,
    start_s: float,
    first_late_s: float,
) -> tuple[float, float]:
    """The candidate's chance in a batch with `running` from `start_s` on; the sum of theirs.

    Its first token comes `first_late_s` later.
    """
    at = bisect_right(running, candidate.left_tokens, key=BY_TOKENS_LEFT)
    each = chances(profile, start_s, [*running[:at], candidate, *running[at:]])
    own = each[at]
    others = sum(each) - own
    invocation = candidate.invocation
    if invocation.until_first_token:
        in_time = start_s + first_late_s <= invocation.deadline_s
        own = (own if candidate.due_s < inf else 1.0) if in_time else 0.0
    return own, others
