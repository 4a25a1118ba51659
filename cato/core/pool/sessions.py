"""Home replicas of sessions, and the KV working set of each replica.

A session is expected back for `MEMORY_S` after its last call: until then its context is part of the
working set of the replica that served it. Think times of tools and people are seconds to minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from cato.core.ids import ReplicaId
from cato.core.snapshot import node_tokens

MEMORY_S = 600.0
# Prompts whose tokens are remembered for each session. Text between two of them counts as even.
MOST_ENDS = 32


@dataclass(frozen=True, slots=True)
class Home:
    """The home of one session since its last call.

    `ends`: nodes of earlier prompts, and the tokens up to the last of them, as engines counted.
    """

    replica_id: ReplicaId
    context_tokens: int
    seen_at_s: float
    ends: tuple[tuple[int, float], ...] = ()

    def tokens(self, nodes: int, all_nodes: int, all_tokens: float) -> float:
        """Tokens of the first `nodes` nodes of the session's next prompt."""
        at = bisect_left(self.ends, (nodes,))
        before, tokens = self.ends[at - 1] if at else (0, 0.0)
        if at < len(self.ends) and self.ends[at][0] <= all_nodes:
            after, tokens_after = self.ends[at]
            return tokens + (nodes - before) * (tokens_after - tokens) / (after - before)
        return tokens + (nodes - before) * node_tokens(all_tokens, all_nodes, before, tokens)


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
        ends = known.ends if known else ()
        self._homes[session] = Home(id, context_tokens, now_s, ends)
        own = self.working_set(id)
        own.sessions += 1
        own.tokens += context_tokens

    def count(self, session: str, nodes: int, tokens: int) -> None:
        """An engine counted `tokens` in a prompt of the session with that many nodes."""
        home = self._homes.get(session)
        if home is None or not nodes:
            return
        ends = tuple(e for e in home.ends if e[0] < nodes and e[1] < tokens)
        if len(ends) >= MOST_ENDS:
            ends = ends[::2]
        known = replace(home, ends=ends)
        end = known.tokens(nodes, nodes, tokens)
        self._homes[session] = replace(home, ends=(*ends, (nodes, end)))

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
