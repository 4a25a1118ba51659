"""Answers of policies. Each carries the reason that `cato explain` shows."""

from __future__ import annotations

from math import inf

from cato.core.ids import InvocationId, ReplicaId
from cato.core.record import record


@record
class Route:
    """Send the invocation to `replica_id`."""

    replica_id: ReplicaId
    reason: str


@record
class Hold:
    """Leave the invocation in the pool's queue; `replica_id`: it waits for that one."""

    reason: str
    replica_id: ReplicaId | None = None


@record
class Admit:
    """The invocation may join the replica's running batch now."""

    reason: str


@record
class Defer:
    """It may not, now. `closes`: nor may any other before something changes on the replica."""

    reason: str
    closes: bool = False


@record
class Batch:
    """`ids` start now, in this order; none does where it is empty."""

    ids: tuple[InvocationId, ...]
    reason: str


@record
class Rank:
    """Place in the queue: smaller goes first, by `value`, then `key`; ties by arrival, then id.

    The engine receives `value` as its priority. The rank holds until `until_s`, when it is
    judged again. `worsens`: what follows is never a better place, so that it is judged again
    only when it comes to the head; deep in a long queue nobody needs it.
    """

    value: int
    reason: str
    key: float = 0.0
    until_s: float = inf
    worsens: bool = False
