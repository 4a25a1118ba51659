"""Routing in a pool whose accelerators differ in speed."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from math import inf

from cato.core.decision import Hold, Route
from cato.core.pool.window import wait_for_prompts_s
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView
from cato.policies.admission.foresight import why_closed
from cato.policies.due import step_beside_s
from cato.policies.outlook import UNLIKELY, Joining, joining, net_cost, saved_s

# Replicas projected per speed, the least loaded first.
PROJECTED_OF_A_SPEED = 2
# A slower accelerator takes a call that has at least this many times the time it needs there:
# predictions do not include calls that join later.
COMFORT = 3.0


def has_several_speeds(replicas: Sequence[ReplicaView]) -> bool:
    """Cheap, because it is called for every routing decision."""
    first = replicas[0].profile
    base_s, token_s = first.decode_base_s, first.prefill_per_batch_token_s
    for replica in replicas:
        profile = replica.profile
        if profile.decode_base_s != base_s or profile.prefill_per_batch_token_s != token_s:
            return True
    return False


def route_across(
    invocation: Invocation, replicas: Sequence[ReplicaView], price: float, pool: PoolSnapshot
) -> Route | Hold:
    """The slowest accelerator on which as many SLOs are met as on any, net of joining costs.

    Calls that are not urgent thus leave the fast replicas to urgent ones; a call without time to
    spare anywhere goes where it ends first. Unlike in a uniform pool, an idle fast replica is not
    taken at once. Measured on 2 replicas and 4 that are 2.5 times slower, at 80 % load, half of
    SABER's calls three times as patient (seeds 0-2): 97.7 % of W2 and 94.4 % of W3, against 93.1
    and 89.7 when the fastest idle replica takes each call. A call that is too late, or too slow,
    wherever it has room waits for an accelerator on which it can still be in time.
    """
    now_s = pool.now_s
    joins: dict[str, Joining] = {}
    by_speed: dict[float, list[ReplicaView]] = {}
    for replica in replicas:
        by_speed.setdefault(replica.profile.typical_call_s, []).append(replica)

    def cost(call_s: float, replica: ReplicaView) -> tuple[bool, int, bool, float, int, str]:
        # it takes the call only if no other replica can
        if why_closed(invocation, replica, now_s):
            return True, 0, True, call_s, replica.held, replica.id
        join = joins[replica.id] = _joining(invocation, replica, now_s)
        net = net_cost(join, price)
        needed_s = _until_slo_event_s(invocation, replica)
        is_pressed = now_s + COMFORT * needed_s > invocation.deadline_s
        by_speed = needed_s if is_pressed else -call_s
        return False, net, is_pressed, by_speed, replica.held, replica.id

    candidates = [
        (cost(call_s, replica), replica)
        for call_s, equals in by_speed.items()
        for replica in sorted(equals, key=_load)[:PROJECTED_OF_A_SPEED]
    ]
    _, best = min(candidates, key=lambda c: c[0])
    join = joins.get(best.id)
    if join is not None and join.own <= UNLIKELY and now_s < invocation.deadline_s < inf:
        for replica in _least_loaded(pool.accepting, joins):
            if _is_met_after_a_wait(invocation, replica, now_s):
                return Hold(f"waits for {replica.id}: too slow on those with room")
    return Route(best.id, f"the slowest of {len(by_speed)} speeds with as many SLOs met")


def _until_slo_event_s(invocation: Invocation, replica: ReplicaView) -> float:
    """After the work ahead and the current step."""
    profile, batch = replica.profile, replica.batch
    known_s = saved_s(invocation, replica)
    own_s = invocation.remaining_s(profile, batch) - known_s
    ahead_s = wait_for_prompts_s(replica, profile.prefill_s(invocation.prompt_tokens) - known_s)
    step_s = 0.0
    if replica.held:
        step_s = profile.decode_step_s(replica.held, replica.context_tokens / replica.held)
    return replica.dispatch_s + ahead_s + step_s + own_s


def _least_loaded(
    replicas: Sequence[ReplicaView], others: Container[str]
) -> Collection[ReplicaView]:
    """Of each speed the replica with the fewest calls, except `others`."""
    found: dict[int, ReplicaView] = {}
    for replica in replicas:
        speed = id(replica.profile)
        known = found.get(speed)
        if (known is None or replica.held < known.held) and replica.id not in others:
            found[speed] = replica
    return found.values()


def _is_met_after_a_wait(invocation: Invocation, replica: ReplicaView, now_s: float) -> bool:
    wait_s = replica.wait_s if replica.held >= replica.max_running else 0.0
    if now_s + wait_s + _until_slo_event_s(invocation, replica) > invocation.deadline_s:
        return False
    return _joining(invocation, replica, now_s).own > UNLIKELY


def _joining(invocation: Invocation, replica: ReplicaView, now_s: float) -> Joining:
    """As everywhere, but on an accelerator too slow for its target pace it is not in time."""
    join = joining(invocation, replica, now_s)
    if step_beside_s(invocation, replica) > invocation.tpot_target_s:
        return Joining(0.0, join.loss)
    return join


def _load(replica: ReplicaView) -> tuple[int, int, str]:
    return replica.prefilling, replica.held, replica.id
