"""Answers of policies. Each carries the reason that `cato explain` shows."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.ids import ReplicaId


@dataclass(frozen=True, slots=True)
class Route:
    """Send the invocation to `replica_id`."""

    replica_id: ReplicaId
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Leave the invocation in the pool's queue."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rank:
    """Place in the queue: smaller goes first; ties go by arrival, then id.

    The engine receives the same value as its priority.
    """

    value: int
    reason: str
