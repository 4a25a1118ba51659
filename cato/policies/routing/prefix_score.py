"""llm-d's scorers: cached prefix, queue length and free KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot


@dataclass(frozen=True, slots=True)
class PrefixScore:
    """Weighted sum of three scores in [0, 1], the defaults of llm-d's scheduler.

    Prefix: the cached part of the prompt. Queue: 1 where fewest calls wait for their first token, 0
    where most do. Free KV: the part of the KV cache that no running call holds.
    """

    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    free_kv_weight: float = 2.0

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        replicas = pool.replicas
        if not replicas:
            return Hold("no replica has room")
        queues = [r.prefilling + r.queued for r in replicas]
        least, most = min(queues), max(queues)
        scored = []
        for replica, queue in zip(replicas, queues, strict=True):
            cached = replica.cached_tokens(invocation) / invocation.prompt_tokens
            short = (most - queue) / (most - least) if most > least else 1.0
            held = replica.context_tokens / max(1, replica.profile.kv_capacity_tokens)
            score = self.prefix_weight * cached + self.queue_weight * short
            score += self.free_kv_weight * max(0.0, 1.0 - held)
            scored.append((-score, replica.held, replica.id))
        score, _, best = min(scored)
        return Route(best, f"score {-score:.2f} of {len(replicas)}")
