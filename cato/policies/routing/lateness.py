"""Least expected lateness: which replica takes a turn of a session, in CATO's default policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView

_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class LeastLateness:
    """The replica where the turn's first token is expected to be least late, moves counted.

    A turn of an agent has 100,000 tokens of which 1,000 are new: where its context is cached it is
    a tenth of a second of work, elsewhere twelve seconds, which delay all others there. Cost, in
    seconds: expected lateness; `move_s` and the recomputation when it leaves a warm cache;
    what its replica's working set exceeds the KV cache by, as the part of a whole prefill that each
    later turn will pay for it; `spread_s_per_mtoken` of the working set, so that new sessions are
    spread; and a little of the expected time. Ties: most cached, then id.

    A replica without room now may be the best: then the turn waits for it.
    """

    move_s: float = 1.0
    shortage_s: float = 1.0
    spread_s_per_mtoken: float = 0.5
    time_weight: float = 0.05

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        replicas = pool.accepting or pool.replicas
        if not replicas:
            return Hold("no replica has room")
        cached = [r.cached_tokens(invocation) for r in replicas]
        most_cached = max(cached)
        best, least = replicas[0], (inf, 0, "")
        for replica, tokens in zip(replicas, cached, strict=True):
            cost = self._cost_s(invocation, replica, tokens, most_cached, pool.now_s)
            key = (round(cost, 6), -tokens, str(replica.id))
            if key < least:
                best, least = replica, key
        reason = f"expected cost {least[0]:.2f} s, {-least[1]} of its prompt tokens cached"
        if replicas is pool.replicas or best in pool.replicas:
            return Route(best.id, reason)
        return Hold(f"waits for {best.id}: {reason}", best.id)

    def _cost_s(
        self,
        invocation: Invocation,
        replica: ReplicaView,
        cached: int,
        most_cached: int,
        now_s: float,
    ) -> float:
        profile, prompt_tokens = replica.profile, invocation.prompt_tokens
        own_s = profile.prefill_s(prompt_tokens, 1, cached)
        context_tokens = prompt_tokens + invocation.expected_tokens
        wait_s = replica.prompts_ahead_s + replica.awaited_s + replica.dispatch_s
        missing = replica.context_tokens + context_tokens - profile.kv_capacity_tokens
        if missing > 0 and replica.held:
            wait_s += self.shortage_s + profile.prefill_s(min(missing, prompt_tokens))
        first_s = wait_s + own_s
        cost_s = self.time_weight * first_s
        if invocation.deadline_s < inf:
            cost_s += max(0.0, now_s + first_s - invocation.deadline_s)
        else:
            cost_s += first_s
        if cached < most_cached:
            cost_s += own_s - profile.prefill_s(prompt_tokens, 1, most_cached)
        working_set = replica.working_set_tokens
        if not replica.is_home(invocation):
            working_set += context_tokens
            if most_cached:
                cost_s += self.move_s
        excess = working_set - profile.kv_capacity_tokens
        if excess > 0:
            cost_s += excess / working_set * profile.prefill_s(prompt_tokens)
        return cost_s + self.spread_s_per_mtoken * working_set / _MILLION


LEAST_LATENESS = LeastLateness()
