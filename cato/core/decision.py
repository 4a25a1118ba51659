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
    """Leave the invocation in the pool's queue; with `replica_id`, wait for that replica."""

    reason: str
    replica_id: ReplicaId | None = None


@record
class Admit:
    """The invocation may join the replica's running batch now."""

    reason: str


@record
class Defer:
    """Do not let it join now. `closes`: nor any other until the replica changes."""

    reason: str
    closes: bool = False


@record
class Batch:
    """Start `ids` now, in this order; an empty batch starts none."""

    ids: tuple[InvocationId, ...]
    reason: str


@record
class Rank:
    """Place in the queue: smaller goes first, by `value`, then `key`; ties by arrival, then id.

    The engine keeps `priority` for as long as the call runs: `in_engine`, or `value` if that is
    None. The rank is computed again after `until_s`. `worsens`: later ranks are never better, so
    the rank is computed again only at the head of the queue.
    """

    value: int
    reason: str
    key: float = 0.0
    until_s: float = inf
    worsens: bool = False
    in_engine: int | None = None

    @property
    def priority(self) -> int:
        """The engine's priority: smaller goes first."""
        return self.value if self.in_engine is None else self.in_engine
