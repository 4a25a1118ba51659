"""Largest remaining memory: SLO-SA's assignment of requests to instances."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView


@dataclass(frozen=True, slots=True)
class RemainingMemory:
    """The replica whose KV cache has most room left for its assigned calls.

    SLO-SA ("SLO-Aware Scheduling for Large Language Model Inferences", SC 2025), Algorithm 2 and
    its equation 20: of what remains of a cache, `usable` (the paper's mu) holds tokens. A running
    call takes its context and the rest of its expected answer, a bound waiting one its prompt. When
    no replica has room for a new call, all start another round with whole caches, as printed, so
    that caches of different sizes fill in proportion. Ignores the speed of replicas and deadlines:
    the mapping of each queue considers those.
    """

    usable: float = 0.9

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if not pool.replicas:
            return Hold("no replica has room")
        needed = invocation.prompt_tokens + invocation.left_tokens()
        left = {r.id: self._left_tokens(r) for r in pool.replicas}
        rounds = {
            r.id: max(0, ceil((needed - left[r.id]) / self._size(r)))
            for r in pool.replicas
            if self._size(r) > 0
        }
        first = min(rounds.values(), default=0)
        open_ = [r for r in pool.replicas if rounds.get(r.id, inf) == first] or pool.replicas
        best = max(open_, key=lambda r: left[r.id] + first * self._size(r))
        tokens = left[best.id] + first * self._size(best)
        when = f", in round {first + 1}" if first else ""
        return Route(best.id, f"most memory of {len(pool.replicas)}: {tokens:.0f} tokens{when}")

    def _size(self, replica: ReplicaView) -> float:
        return self.usable * replica.profile.kv_capacity_tokens

    def _left_tokens(self, replica: ReplicaView) -> float:
        running = sum(r.left_tokens for r in replica.running)
        taken = replica.context_tokens + running + replica.queued_tokens
        return self._size(replica) - self.usable * taken
