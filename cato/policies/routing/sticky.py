"""Sessions stay where they are: the simple rules that keep agents' caches warm."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from cato.core.decision import Hold, Route
from cato.core.snapshot import Invocation, PoolSnapshot


@dataclass(frozen=True, slots=True)
class Sticky:
    """A session goes where fewest live sessions are, and stays there.

    Calls without a session go where least is held. Ties go by what is held, then by id.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if not pool.replicas:
            return Hold("no replica has room")
        if invocation.session:
            for replica in pool.replicas:
                if replica.is_home(invocation):
                    return Route(replica.id, "its session is at home there")
        is_turn = bool(invocation.session)
        best = min(
            pool.replicas, key=lambda r: (r.sessions if is_turn else 0, r.held + r.queued, r.id)
        )
        return Route(best.id, f"{best.sessions} sessions, {best.held + best.queued} invocations")


@dataclass(frozen=True, slots=True)
class SmallestWorkingSet:
    """A session stays at home, and waits for room there; a new one takes the smallest working set.

    The routing that belongs to `WorkingSetAdmission`. Calls without a session go where least is
    held.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if invocation.session:
            for replica in pool.accepting:
                if replica.is_home(invocation):
                    if replica in pool.replicas:
                        return Route(replica.id, "its session is at home there")
                    return Hold(f"waits for its home {replica.id}", replica.id)
        if not pool.replicas:
            return Hold("no replica has room")
        is_turn = bool(invocation.session)
        best = min(
            pool.replicas,
            key=lambda r: (r.working_set_tokens if is_turn else 0, r.held + r.queued, r.id),
        )
        return Route(best.id, f"a working set of {best.working_set_tokens} tokens")


@dataclass(frozen=True, slots=True)
class SessionHash:
    """The replica that the session's name and its own choose together (rendezvous hashing).

    No state, and a replica that goes moves its own sessions only. Calls without a session go by
    their id.
    """

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if not pool.replicas:
            return Hold("no replica has room")
        name = invocation.session or invocation.id
        best = max(pool.replicas, key=lambda r: (crc32(f"{name} {r.id}".encode()), r.id))
        return Route(best.id, f"the hash of {name} among {len(pool.replicas)}")
