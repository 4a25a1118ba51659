"""Which replica, in CATO's default policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView
from cato.policies.outlook import PRICE, joining, saved_s


@dataclass(frozen=True, slots=True)
class ForesightRouting:
    """The replica where the invocation is predicted to save most SLOs, net of what it costs there.

    Late binding has given all of them room. Looks at `looked_at` of them, spread evenly from the
    invocation's draw on, and projects the running sets of the `projected` least loaded of those
    (see `cato.policies.outlook`): more would cost time and change little; that with most of the
    prompt in its prefix cache is always among them. An idle replica is taken at once, the fastest
    first; one that processes a prompt comes last.
    """

    looked_at: int = 16
    projected: int = 4
    price: float = PRICE

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        replicas = pool.replicas
        n = len(replicas)
        if n == 0:
            return Hold("no replica has room")
        if n == 1:
            return Route(replicas[0].id, "the one with room")
        if n > self.looked_at:
            first, stride = int(invocation.draw * n), n // self.looked_at
            replicas = [replicas[(first + i * stride) % n] for i in range(self.looked_at)]

        loads = sorted((r.prefilling, r.held, i) for i, r in enumerate(replicas))
        least = [replicas[i] for _, _, i in loads[: self.projected]]
        if invocation.prefix:
            warmest = max(replicas, key=lambda r: r.cached_tokens(invocation))
            if warmest not in least:
                least.append(warmest)
        idle = [r for r in least if r.held == 0]
        if idle:
            best = min(idle, key=lambda r: (_own_s(invocation, r, 1), r.id))
            return Route(best.id, f"the fastest idle one of {len(replicas)} with room")

        def cost(r: ReplicaView) -> tuple[float, float, str]:
            own_s = _own_s(invocation, r, r.batch)
            if r.prefilling:
                return (inf, own_s, r.id)
            join = joining(invocation, r, pool.now_s)
            return (round(self.price * join.loss - join.own, 2), own_s, r.id)

        best = min(least, key=cost)
        return Route(best.id, f"most SLOs met of {len(replicas)} with room")


def _own_s(invocation: Invocation, replica: ReplicaView, batch: int) -> float:
    return invocation.own_s(replica.profile, batch) - saved_s(invocation, replica)
