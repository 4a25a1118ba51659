"""A pool router's newest decisions with their reasons, and counts of each kind."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from statistics import median

from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.events import Event, InvocationOffered, ReplicaLost, ReplicaReported
from cato.core.ids import PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.record import record
from cato.core.snapshot import Invocation

# Kept separately for dispatches and for the rest: a busy pool's dispatches must not push out the
# loss of a replica within seconds.
KEPT_DECISIONS = 100
# Without their numbers, a policy has a handful of reasons. More than this many means that it writes
# names into them; Prometheus must not get a series for each.
MAX_RULES = 40
OTHER = "other"
# Window of a pool's current slack: long enough for a quiet pool to have had a call.
SLACK_WINDOW_S = 60.0

DISPATCH = "dispatch"
SUPERSEDE = "supersede"
LOAD = "load"
LOST = "lost"
LEFT = "left"
"""The kinds for a replica that is lost, and for one that leaves as planned: its deployment has
fewer replicas, or new ones. The others are `dispatch`, `refuse`, `supersede` (a newer run of the
editor buffer replaced the call), `preempt`, and `load` (in a shared pool)."""

# Numbers, and names such as req-8c1f. Every dispatch is searched: nothing is tried twice.
_WITH_DIGIT = re.compile(r"(?<![^\s,;:()/])[^\s,;:()/\d]*+\d[^\s,;:()/]*+")


@record
class Decided:
    """One decision of a pool, at `at_s` seconds since the epoch.

    `slack_s` at the dispatch: time to the deadline minus the predicted remaining service. Negative
    when predicted to be late; None without an SLO or a dispatch. `run_id`, `task`, `node` and
    `tenant` are empty for decisions about a replica alone.
    """

    at_s: float
    pool: PoolName
    kind: str
    reason: str
    replica: str = ""
    run_id: str = ""
    task: str = ""
    node: str = ""
    tenant: str = ""
    attempt: int = 0
    queue_s: float | None = None
    slack_s: float | None = None


@dataclass(frozen=True, slots=True)
class PoolDecisions:
    """A router's newest decisions, oldest first, and the counts of all.

    `counts` is by kind and rule, which is the reason without its numbers.
    """

    newest: tuple[Decided, ...] = ()
    counts: Mapping[tuple[str, str], int] | None = None


def all_decisions(shards: Sequence[PoolDecisions]) -> PoolDecisions:
    """Decisions of a pool, merged from its router shards."""
    if len(shards) == 1:
        return shards[0]
    newest = sorted((d for shard in shards for d in shard.newest), key=attrgetter("at_s"))
    counts: Counter[tuple[str, str]] = Counter()
    for shard in shards:
        counts.update(shard.counts or {})
    return PoolDecisions(tuple(newest), dict(counts))


def rule_of(reason: str) -> str:
    """First part of a reason, with `N` for words with digits: few values, for a metric label."""
    return _WITH_DIGIT.sub("N", reason.split(";", 1)[0]).strip()


class DecisionBook:
    """Records decisions as the router makes them; counters start at 0 with the router."""

    def __init__(self, pool: PoolName) -> None:
        self._pool = pool
        self._dispatches: deque[Decided] = deque(maxlen=KEPT_DECISIONS)
        self._others: deque[Decided] = deque(maxlen=KEPT_DECISIONS)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._replicas: set[ReplicaId] = set()

    def note(
        self, at_s: float, event: Event, commands: Iterable[Command], core: PoolOrchestrator
    ) -> None:
        """Record `core`'s answer to `event` at `at_s`, seconds since the epoch."""
        self.note_commands(at_s, event, commands, core)
        match event:
            case ReplicaReported(replica_id=replica):
                self._replicas.add(replica)
            case ReplicaLost(replica_id=replica, reason=reason) if replica in self._replicas:
                self._replicas.discard(replica)
                self.add(Decided(at_s, self._pool, LOST, reason, replica), reason)
            case _:
                pass

    def note_commands(
        self, at_s: float, event: Event, commands: Iterable[Command], core: PoolOrchestrator
    ) -> None:
        """Like `note`, but replicas that leave are not counted as lost."""
        for command in commands:
            decided = _decided(at_s, self._pool, event, command, core)
            # The reason names the newer run.
            self.add(decided, SUPERSEDE if decided.kind == SUPERSEDE else decided.reason)

    def note_silent(self, at_s: float, known: Iterable[ReplicaId]) -> None:
        """Note dropped replicas as lost; `known` are the replicas that the router still has."""
        for replica in sorted(self._replicas.difference(known)):
            self._replicas.discard(replica)
            reason = "it stopped reporting"
            self.add(Decided(at_s, self._pool, LOST, reason, replica), reason)

    def note_left(self, at_s: float, replica: ReplicaId, reason: str) -> None:
        """The replica leaves as planned; the loss that ends its leases is not noted."""
        if replica in self._replicas:
            self._replicas.discard(replica)
            self.add(Decided(at_s, self._pool, LEFT, reason, replica), reason)

    def all(self) -> PoolDecisions:
        newest = sorted((*self._dispatches, *self._others), key=attrgetter("at_s"))
        return PoolDecisions(tuple(newest), dict(self._counts))

    def add(self, decided: Decided, reason: str) -> None:
        """Record a decision, counted under the rule of `reason`."""
        (self._dispatches if decided.kind == DISPATCH else self._others).append(decided)
        name = (decided.kind, rule_of(reason))
        if name not in self._counts and len(self._counts) >= MAX_RULES:
            name = (decided.kind, OTHER)
        self._counts[name] += 1


def dispatched(at_s: float, pool: PoolName, command: Dispatch, call: Invocation | None) -> Decided:
    """The decision that leased a replica to `call` (None: unknown)."""
    slack_s = command.slack_s - command.remaining_s
    return Decided(
        at_s, pool, DISPATCH, command.reason, command.replica_id, *_names(call),
        attempt=command.attempt, queue_s=command.queue_s,
        slack_s=slack_s if slack_s < inf else None,
    )  # fmt: skip


def _decided(
    at_s: float, pool: PoolName, event: Event, command: Command, core: PoolOrchestrator
) -> Decided:
    match command:
        case Dispatch():
            return dispatched(at_s, pool, command, core.invocation(command.invocation_id))
        case Refuse():
            call = event.invocation if isinstance(event, InvocationOffered) else None
            names = _names(call)
            if call is not None and call.id != command.invocation_id:
                names = ("", *names[1:])  # the call belongs to another run of the buffer
            kind = SUPERSEDE if command.superseded else "refuse"
            return Decided(at_s, pool, kind, command.reason, "", *names)
        case Preempt():
            call = core.invocation(command.invocation_id)
            # A preempted invocation queues again, unless a newer run of its buffer replaced it.
            kind = SUPERSEDE if call is None else "preempt"
            return Decided(
                at_s, pool, kind, command.reason, command.replica_id, *_names(call),
                attempt=command.attempt,
            )  # fmt: skip


def _names(call: Invocation | None) -> tuple[str, str, str, str]:
    """Run, task, node and tenant of a call."""
    return ("", "", "", "") if call is None else (call.run_id, call.task, call.node, call.tenant)


def slack_now(decisions: Iterable[Decided], now_s: float) -> tuple[float, float] | None:
    """Median and minimum slack of the last minute's dispatches; None without any."""
    found = [
        d.slack_s for d in decisions if d.slack_s is not None and now_s - d.at_s <= SLACK_WINDOW_S
    ]
    return (median(found), min(found)) if found else None
