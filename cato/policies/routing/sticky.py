"""Sticky sessions: simple rules that keep agents' caches warm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView


@dataclass(frozen=True, slots=True)
class Sticky:
    """A new session goes where the fewest live sessions are, and stays there.

    Calls without a session go to the replica with the fewest calls. Ties go by calls held, then by
    id.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        home = _home(invocation, pool.replicas)
        if home is not None:
            return Route(home.id, "its session is at home there")
        if not pool.replicas:
            return Hold("no replica has room")
        best = _least(invocation, pool.replicas, lambda r: r.sessions)
        return Route(best.id, f"{best.sessions} sessions, {best.held + best.queued} invocations")


@dataclass(frozen=True, slots=True)
class SmallestWorkingSet:
    """A session stays at home, and waits for room there; a new one takes the smallest working set.

    The routing for `WorkingSetAdmission`. Calls without a session go to the replica with the fewest
    calls.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        home = _home(invocation, pool.accepting)
        if home is not None:
            if home in pool.replicas:
                return Route(home.id, "its session is at home there")
            return Hold(f"waits for its home {home.id}", home.id)
        if not pool.replicas:
            return Hold("no replica has room")
        best = _least(invocation, pool.replicas, lambda r: r.working_set_tokens)
        return Route(best.id, f"a working set of {best.working_set_tokens} tokens")


@dataclass(frozen=True, slots=True)
class SessionHash:
    """The replica chosen by a hash of the session's and the replica's names (rendezvous hashing).

    No state; a replica that is lost moves only its own sessions. Calls without a session go by
    their id.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if not pool.replicas:
            return Hold("no replica has room")
        name = invocation.session or invocation.id
        best = max(pool.replicas, key=lambda r: (crc32(f"{name} {r.id}".encode()), r.id))
        return Route(best.id, f"the hash of {name} among {len(pool.replicas)}")


def _home(invocation: Invocation, replicas: Sequence[ReplicaView]) -> ReplicaView | None:
    if not invocation.session:
        return None
    return next((r for r in replicas if r.is_home(invocation)), None)


def _least(
    invocation: Invocation, replicas: Sequence[ReplicaView], load: Callable[[ReplicaView], int]
) -> ReplicaView:
    """The replica with the least `load` of sessions, for a turn of one.

    Ties, and calls without a session, go by calls held, then by id.
    """
    is_turn = bool(invocation.session)
    return min(replicas, key=lambda r: (load(r) if is_turn else 0, r.held + r.queued, r.id))
