"""Dynamo's router cost: the sum of blocks to prefill and blocks held."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import PREFIX_BLOCK_TOKENS, Invocation, PoolSnapshot


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The replica with the least `overlap_weight` x prefill blocks + decode blocks.

    NVIDIA Dynamo's KV router, "Cost Calculation" of its routing concepts. Prefill blocks: prompt
    tokens sent to the replica whose calls have no first token, and the uncached ones of this
    prompt. Decode blocks: the context of all its calls, including this prompt. Dynamo's default
    weight is 1; a larger one favours time to first token. Its temperature of 0 takes the least;
    ties go by calls held, then by id.
    """

    overlap_weight: float = 1.0

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if not pool.replicas:
            return Hold("no replica has room")
        costs = []
        for replica in pool.replicas:
            queued_tokens = replica.queued_tokens
            uncached_tokens = invocation.prompt_tokens - replica.cached_tokens(invocation)
            prefill_tokens = replica.prompt_tokens_ahead + queued_tokens + uncached_tokens
            decode_tokens = replica.context_tokens + queued_tokens + invocation.prompt_tokens
            blocks = self.overlap_weight * prefill_tokens + decode_tokens
            costs.append((blocks / PREFIX_BLOCK_TOKENS, replica.held + replica.queued, replica.id))
        cost, _, best = min(costs)
        return Route(best, f"costs {cost:.0f} blocks, the least of {len(costs)}")
