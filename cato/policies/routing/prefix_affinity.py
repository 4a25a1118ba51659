"""Ray Serve LLM's affinity to cached prefixes."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot
from cato.policies.routing.power_of_two import PowerOfTwo

_POWER_OF_TWO = PowerOfTwo()


@dataclass(frozen=True, slots=True)
class PrefixAffinity:
    """The longest cached prefix while loads are balanced, else the power of two choices.

    Ray Serve LLM's `PrefixCacheAffinityRouter`. Balanced: the most and the fewest calls on a
    replica differ by at most `imbalance`. Then the candidates are the replicas that match most of
    the prompt or, when that is less than `match_rate` of it, those with the smallest prefix tree;
    the shortest queue among them wins. `imbalance` 10 is from its documentation; Ray 2.60 never
    finds a pool imbalanced by default. Here the size of a tree is the working set of the sessions
    at home there, and cached prefixes are those estimated by the pool, which evicts as engines do.
    """

    imbalance: int = 10
    match_rate: float = 0.1

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        replicas = pool.replicas
        if not replicas:
            return Hold("no replica has room")
        loads = [r.held + r.queued for r in replicas]
        if max(loads) - min(loads) > self.imbalance:
            return _POWER_OF_TWO.route(invocation, pool)
        cached = [r.cached_tokens(invocation) for r in replicas]
        most = max(cached)
        if most >= self.match_rate * invocation.prompt_tokens:
            sizes, why = [-tokens for tokens in cached], f"{most} prompt tokens match"
        else:
            sizes, why = [r.working_set_tokens for r in replicas], "the smallest prefix tree"
        least = min(sizes)
        candidates = zip(loads, replicas, sizes, strict=True)
        load, best = min((load, r.id) for load, r, size in candidates if size == least)
        return Route(best, f"{why}, {load} invocations")
