"""Home replicas of sessions, and the KV working set of each replica.

A session is expected back for `MEMORY_S` after its last call: until then its context is part of the
working set of the replica that served it. Think times of tools and people are seconds to minutes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from cato.core.ids import ReplicaId

MEMORY_S = 600.0


@dataclass(frozen=True, slots=True)
class Home:
    """The home of one session since its last call.

    An engine counted `counted_tokens` in the prompt of one of its calls, which had `counted_nodes`
    nodes; 0 before any answer.
    """

    replica_id: ReplicaId
    context_tokens: int
    seen_at_s: float
    counted_nodes: int = 0
    counted_tokens: int = 0


@dataclass(slots=True)
class WorkingSet:
    """The sessions of one replica, and the tokens of their contexts."""

    sessions: int = 0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class Homes:
    """The homes of one pool's sessions."""

    _homes: OrderedDict[str, Home] = field(default_factory=OrderedDict)  # last seen last
    _sets: dict[ReplicaId, WorkingSet] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._homes)

    def of(self, session: str) -> Home | None:
        return self._homes.get(session)

    def working_set(self, id: ReplicaId) -> WorkingSet:
        """The replica's working set; the same object is updated until the replica is lost."""
        return self._sets.setdefault(id, WorkingSet())

    def note(self, session: str, id: ReplicaId, context_tokens: int, now_s: float) -> None:
        """A call of `session` was sent to the replica, which is its home now."""
        known = self._leave(session)
        counted = (known.counted_nodes, known.counted_tokens) if known else ()
        self._homes[session] = Home(id, context_tokens, now_s, *counted)
        own = self.working_set(id)
        own.sessions += 1
        own.tokens += context_tokens

    def count(self, session: str, nodes: int, tokens: int) -> None:
        """An engine counted `tokens` in a prompt of the session with that many nodes."""
        home = self._homes.get(session)
        if home is not None:
            self._homes[session] = replace(home, counted_nodes=nodes, counted_tokens=tokens)

    def forget_old(self, now_s: float) -> None:
        while self._homes:
            session, home = next(iter(self._homes.items()))
            if home.seen_at_s >= now_s - MEMORY_S:
                return
            self._leave(session)

    def lose(self, id: ReplicaId) -> None:
        """The replica is lost: its sessions have no home."""
        for session in [s for s, h in self._homes.items() if h.replica_id == id]:
            self._leave(session)
        self._sets.pop(id, None)

    def _leave(self, session: str) -> Home | None:
        home = self._homes.pop(session, None)
        if home is not None:
            own = self._sets[home.replica_id]
            own.sessions -= 1
            own.tokens -= home.context_tokens
        return home
