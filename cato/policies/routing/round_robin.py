"""Round robin."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Take the replicas in turn, ignoring load: the baseline that every other rule must beat."""

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if not pool.replicas:
            return Hold("no replica has room")
        turn = pool.dispatched % len(pool.replicas)
        return Route(pool.replicas[turn].id, f"turn {turn + 1} of {len(pool.replicas)}")
