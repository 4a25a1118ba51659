"""Which calls leave the last free place of a pool to others."""

from __future__ import annotations

from math import inf

from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView
from cato.policies.admission.foresight import AGED_S, MIN_PLACES, is_aged
from cato.policies.outlook import UNLIKELY, chance_alone

# Of the replicas so many keep room, and one at least.
SPARE = 0.1
# Where work in time takes less of a pool than this, there is nothing to keep a place for.
LEAST_IN_TIME = 0.05


def leaves_room(invocation: Invocation, pool: PoolSnapshot) -> bool:
    """Whether it should wait although a replica has room: no SLO hangs on it, and places are few.

    Work that is late, or has no SLO, loses nothing by waiting. In the last free place it would make
    what arrives next wait, and a place that is one of few is not free again soon. What has waited
    for `AGED_S` takes any place. Replicas with many places keep some for the others themselves: see
    `ForesightAdmission`.
    """
    replicas = len(pool.accepting)
    if pool.with_room > max(1.0, SPARE * replicas) or pool.with_room >= replicas:
        return False
    if pool.in_time < LEAST_IN_TIME or pool.replicas[0].max_running >= MIN_PLACES:
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
