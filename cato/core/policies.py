"""The questions a pool asks of its policies. Every answer must be pure: values in, values out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cato.core.decision import Hold, Rank, Route
from cato.core.snapshot import Invocation, PoolSnapshot


class RoutingPolicy(Protocol):
    """Which replica of `pool` should take `invocation` now?

    `pool.replicas` holds only replicas that may be chosen: with late binding those with room.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold: ...


class OrderingPolicy(Protocol):
    """Where in the queue does `invocation` stand at `now_s`?

    `remaining_s` is the expected time to its SLO event if it started now on the fastest replica.
    """

    def rank(self, invocation: Invocation, remaining_s: float, now_s: float) -> Rank: ...


@dataclass(frozen=True, slots=True)
class Policies:
    """How one pool decides; see `cato.core.topology.PoolPolicies` for the words."""

    routing: RoutingPolicy
    ordering: OrderingPolicy
    late_binding: bool = True
    max_queued: int = 1000
