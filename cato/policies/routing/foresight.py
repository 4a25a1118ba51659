"""Which replica, in CATO's default policy."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView
from cato.policies.outlook import joining


@dataclass(frozen=True, slots=True)
class ForesightRouting:
    """The replica where the invocation's part of the SLO event is predicted to come first.

    Looks at `looked_at` of those with room, spread evenly from the invocation's draw on: with
    late binding all have room, and more would cost time and change little.
    """

    looked_at: int = 16
    price: float = 3.0

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        replicas = pool.replicas
        n = len(replicas)
        if n == 0:
            return Hold("no replica has room")
        if n == 1:
            return Route(replicas[0].id, "the one with room")
        if n > self.looked_at:
            first = int(invocation.draw * n)
            replicas = [
                replicas[(first + i * n // self.looked_at) % n] for i in range(self.looked_at)
            ]

        def net(r: ReplicaView) -> tuple[float, float, int, str]:
            """Sorts the best first; ties by the own finish."""
            loads = (invocation.own_s(r.profile, r.batch), r.prefilling + r.held, r.id)
            if not r.held:
                return (-1.0, *loads)
            if r.prefilling:
                return (9.0, *loads)
            join = joining(invocation, r, pool.now_s)
            return (round(self.price * join.loss - join.own, 2), *loads)

        best = min(replicas, key=net)
        return Route(best.id, f"most SLOs met of {len(replicas)} with room")
