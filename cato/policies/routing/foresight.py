"""Routing in CATO's default policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cato.core.decision import Hold, Route
from cato.core.ids import ReplicaId
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView
from cato.policies.admission.foresight import why_closed
from cato.policies.outlook import LEAST_DIFFERENCE, PRICE, joining, net_cost, saved_s
from cato.policies.routing.across import has_several_speeds, route_across
from cato.policies.routing.lateness import LEAST_LATENESS, LeastLateness
from cato.policies.routing.spare import leaves_room

LEAVES_ROOM = "the last free place is for what can be in time"
LEAST_COST = round(-1 / LEAST_DIFFERENCE)
"""The best cost of joining: the new call is surely in time, and no other loses."""


@dataclass(frozen=True, slots=True)
class ForesightRouting:
    """The replica where the call is predicted to save most SLOs, net of its cost to others.

    With late binding all candidates have room. Looks at `looked_at` of them, evenly spaced from the
    invocation's draw on, and projects the running sets of the `projected` ones with the fewest
    calls (see `cato.policies.outlook`): more would cost time and change little. Of equals the one
    that will have computed the prompt first takes it. The replica with most of
    the prompt in its prefix cache is always among them. An idle replica is taken at once, the
    fastest first; one that is closed to the call (`why_closed`) comes last. Calls that no SLO
    depends on leave the last slots of a small pool to others (`leaves_room`). Where accelerators
    differ in speed, see `cato.policies.routing.across`. Turns of sessions go by `for_sessions`.
    """

    looked_at: int = 16
    projected: int = 4
    price: float = PRICE
    for_sessions: LeastLateness = LEAST_LATENESS

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if invocation.session:
            return self.for_sessions.route(invocation, pool)
        replicas = pool.replicas
        n = len(replicas)
        if n == 0:
            return Hold("no replica has room")
        if leaves_room(invocation, pool):
            return Hold(LEAVES_ROOM)
        has_speeds = not pool.is_uniform and has_several_speeds(pool.accepting or replicas)
        if n == 1 and not has_speeds:
            return Route(replicas[0].id, "the one with room")
        if n > self.looked_at:
            first, stride = int(invocation.draw * n), n // self.looked_at
            replicas = [replicas[(first + i * stride) % n] for i in range(self.looked_at)]
        if pool.is_uniform and not invocation.prefix:
            for replica in replicas:
                if not replica.held:
                    return Route(replica.id, _idle(len(replicas)))
        elif has_speeds:
            return route_across(invocation, replicas, self.price, pool)

        loads = sorted((r.held, r.prefilling, i) for i, r in enumerate(replicas))
        least = [replicas[i] for _, _, i in loads[: self.projected]]
        if invocation.prefix:
            warmest = max(replicas, key=lambda r: r.cached_tokens(invocation))
            if warmest not in least:
                least.append(warmest)
        idle = [r for r in least if r.held == 0]
        if idle:
            fastest = min(idle, key=lambda r: (_own_s(invocation, r, 1), r.id))
            return Route(fastest.id, _idle(len(replicas)))

        best, least_cost = ReplicaId(""), inf
        for _, _, _, id, replica in sorted(
            (r.prefilling > 0, _first_token_s(invocation, r), r.held, r.id, r) for r in least
        ):
            cost: float = inf
            if not why_closed(invocation, replica, pool.now_s):
                join = joining(invocation, replica, pool.now_s)
                cost = net_cost(join, self.price)
            if not best or cost < least_cost:
                best, least_cost = id, cost
            if cost <= LEAST_COST:  # slower ones are not better
                break
        return Route(best, f"most SLOs met of {len(replicas)} with room")


def _idle(n: int) -> str:
    return f"the fastest idle one of {n} with room"


def _first_token_s(invocation: Invocation, replica: ReplicaView) -> float:
    """After the prompts ahead; of a call judged by its last token, the time to that one."""
    return replica.prompts_ahead_s + _own_s(invocation, replica, replica.batch)


def _own_s(invocation: Invocation, replica: ReplicaView, batch: int) -> float:
    return invocation.own_s(replica.profile, batch) - saved_s(invocation, replica)
