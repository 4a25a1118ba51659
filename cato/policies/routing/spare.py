"""Spare room: which calls leave the last free batch slots of a pool to others."""

from __future__ import annotations

from math import inf

from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView
from cato.policies.admission.foresight import AGED_S, MIN_PLACES, is_aged
from cato.policies.outlook import UNLIKELY, chance_alone

# Share of the replicas that keep room; at least one does.
SPARE = 0.1
# If work in time uses less of a pool than this, no slot needs to be kept.
LEAST_IN_TIME = 0.05


def leaves_room(invocation: Invocation, pool: PoolSnapshot) -> bool:
    """Whether a call that no SLO depends on should wait, to keep one of few free slots.

    A call that is late or has no SLO loses nothing by waiting. In the last free slot it would delay
    the next arrivals, and in a pool with few slots the next one frees late. A call that has waited
    for `AGED_S` takes any slot, and so does a stream that goes on. Replicas with many slots keep
    some for other calls themselves: see `ForesightAdmission`.
    """
    replicas = len(pool.accepting)
    if pool.with_room > max(1.0, SPARE * replicas) or pool.with_room >= replicas:
        return False
    if pool.in_time < LEAST_IN_TIME or pool.replicas[0].max_running >= MIN_PLACES:
        return False
    if invocation.begun_in_time:
        return False
    if invocation.deadline_s == inf:
        return pool.now_s - invocation.arrived_at_s < AGED_S
    if is_aged(invocation, pool.now_s):
        return False
    return not any(_may_be_met(invocation, r, pool.now_s) for r in pool.replicas)


def _may_be_met(invocation: Invocation, replica: ReplicaView, now_s: float) -> bool:
    profile = replica.profile
    slack_s = invocation.deadline_s - invocation.remaining_s(profile) - now_s
    if slack_s >= 0 or invocation.until_first_token:
        return slack_s >= 0
    context_tokens = invocation.prompt_tokens + invocation.expected_tokens
    token_s = profile.decode_step_s(1, context_tokens)
    return token_s > 0 and chance_alone(invocation, slack_s, token_s) >= UNLIKELY
