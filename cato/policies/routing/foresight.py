"""Which replica, in CATO's default policy."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView


@dataclass(frozen=True, slots=True)
class ForesightRouting:
    """The replica where the invocation's part of the SLO event is predicted to come first.

    Looks at `looked_at` of those with room, spread evenly from the invocation's draw on: with
    late binding all have room, and more would cost time and change little.
    """

    looked_at: int = 16

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

        def finish_s(r: ReplicaView) -> tuple[float, int, str]:
            return (r.wait_s + invocation.own_s(r.profile, r.batch), r.prefilling + r.held, r.id)

        best = min(replicas, key=finish_s)
        return Route(best.id, f"first to finish of {len(replicas)} with room")
