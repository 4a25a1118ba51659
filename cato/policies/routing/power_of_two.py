"""The power of two choices, Ray Serve's default rule."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Of two replicas drawn at random, the one with fewer invocations.

    Mitzenmacher, "The power of two choices in randomized load balancing" (2001). One draw in [0, 1)
    selects one of the n(n-1)/2 pairs, so the policy needs no generator of its own.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        n = len(pool.replicas)
        if n == 0:
            return Hold("no replica has room")
        if n == 1:
            return Route(pool.replicas[0].id, "the only replica with room")
        cell = min(int(invocation.draw * n * (n - 1)), n * (n - 1) - 1)
        first, second = divmod(cell, n - 1)
        second += second >= first
        pair = (pool.replicas[first], pool.replicas[second])
        best = min(pair, key=lambda r: (r.held + r.queued, r.id))
        other = pair[0] if best is pair[1] else pair[1]
        load, other_load = best.held + best.queued, other.held + other.queued
        return Route(best.id, f"{load} invocations against {other_load} on {other.id}")
