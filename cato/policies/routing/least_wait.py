"""Least expected wait."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot


@dataclass(frozen=True, slots=True)
class LeastWait:
    """The replica where the invocation would start first.

    CATO's Algorithm 1 without its slack classes: considers the work that waits, not the number of
    invocations. Ties go by calls held, then by id.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if not pool.replicas:
            return Hold("no replica has room")
        best = min(pool.replicas, key=lambda r: (r.wait_s, r.held + r.queued, r.id))
        return Route(best.id, f"least wait of {len(pool.replicas)}: {best.wait_s:.3f} s")
