"""Dynamo's router cost: the sum of blocks to prefill and blocks held."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import PREFIX_BLOCK_TOKENS, Invocation, PoolSnapshot


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The replica with the least `prefill_scale` x prefill blocks + decode blocks + cost of calls.

    NVIDIA Dynamo's KV router, "Cost Calculation" of its routing concepts; its names and defaults
    (lib/kv-router, 2026-11). Prefill blocks: uncached prompt tokens of the replica's calls without
    a first token, and this prompt, less `overlap_credit` for each of its tokens that is cached on
    the accelerator and `host_credit` for each in host memory. Decode blocks: the context of all its
    calls, including this prompt. Each of its calls costs `call_tokens` more. A larger
    `prefill_scale` favours time to first token. Its temperature of 0 takes the least; ties go by
    calls held, then by id.
    """

    prefill_scale: float = 1.0
    overlap_credit: float = 1.0
    host_credit: float = 0.75
    call_tokens: float = 0.0

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if not pool.replicas:
            return Hold("no replica has room")
        costs = []
        for replica in pool.replicas:
            queued_tokens, calls = replica.queued_tokens, replica.held + replica.queued
            cached, loaded = replica.cached_tokens(invocation), replica.loaded_tokens(invocation)
            credit = self.overlap_credit * (cached - loaded) + self.host_credit * loaded
            ahead_tokens = replica.prompt_tokens_ahead + replica.queued_uncached_tokens
            prefill_tokens = max(0.0, ahead_tokens + invocation.prompt_tokens - credit)
            decode_tokens = replica.context_tokens + queued_tokens + invocation.prompt_tokens
            tokens = self.prefill_scale * prefill_tokens + decode_tokens + self.call_tokens * calls
            costs.append((tokens / PREFIX_BLOCK_TOKENS, calls, replica.id))
        cost, _, best = min(costs)
        return Route(best, f"costs {cost:.0f} blocks, the least of {len(costs)}")


AGENTIC = BlockCost(prefill_scale=4.0, overlap_credit=2.0, call_tokens=64 * 16)
"""Dynamo's preset for agents (`--agentic`): its cost of a call is 64 blocks of 16 tokens."""
