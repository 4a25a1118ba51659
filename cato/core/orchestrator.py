"""The state of one pool. All changes go through `handle`.

Its parts are in `cato.core.pool`: the backlog and its queues, the replicas and their leases, the
dispatcher and the refusal. This module says which of them an event concerns, in which order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import assert_never

from cato.core.commands import Command, Preempt, Refuse
from cato.core.events import (
    CacheChanged,
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    PoliciesChanged,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReported,
    StreamLost,
    Ticked,
    TurnCame,
    TurnsEnded,
)
from cato.core.ids import InvocationId, PoolName, ReplicaId, RunId
from cato.core.policies import ADMIT_ALWAYS, Policies
from cato.core.pool.backlog import Backlog
from cato.core.pool.buffers import Buffers, LatestRun, replaced_by
from cato.core.pool.dispatcher import Dispatcher
from cato.core.pool.leases import Leases
from cato.core.pool.queue import Head, Waiting
from cato.core.pool.refusal import Refusal
from cato.core.pool.replica import Replica
from cato.core.pool.replicas import BY_ID, Replicas
from cato.core.record import changed
from cato.core.snapshot import Invocation, ReplicaSnapshot, Running

# Replicas report every 0.5 s; a busy host may be late several times in a row.
SILENCE_S = 5.0
# Preemption policies see at most this many replicas, evenly spaced in the list.
PLACES_LOOKED_AT = 16
# How many replicas are asked to preempt for a new call.
REPLICAS_ASKED = 8


@dataclass(frozen=True, slots=True)
class PoolPicture:
    """A pool's state for operators."""

    name: PoolName
    now_s: float
    queued: int
    dispatched: int
    refused: int
    replicas: tuple[ReplicaSnapshot, ...]

    @property
    def queued_per_place(self) -> float:
        """Queued calls per batch slot; without an accepting replica the divisor is 1."""
        places = sum(r.max_running for r in self.replicas if r.accepting)
        return self.queued / max(1, places)


class PoolOrchestrator:
    """Queue, leases and replicas of one pool.

    `handle` is deterministic: the same events give the same commands. With late binding an
    invocation stays in the pool's queue until a replica has room. With early binding it goes to a
    replica's own queue on arrival.
    """

    def __init__(self, name: PoolName, policies: Policies, silence_s: float = SILENCE_S) -> None:
        """A replica that has not reported for `silence_s` is lost."""
        self.name = name
        self._silence_s = silence_s
        self._replicas = Replicas()
        self._clock = self._replicas.clock
        self._backlog = Backlog(self._replicas, policies)
        self._waiting = self._backlog.waiting
        self._leases = Leases(self._replicas, self._backlog)
        self._refusal = Refusal(name, self._backlog, self._replicas)
        self._dispatcher = Dispatcher(
            name, self._backlog, self._replicas, self._leases, self._refusal
        )
        self._buffers = Buffers()
        # Preempted attempts that their ingress has not offered again yet, by invocation.
        self._taken_back: dict[InvocationId, int] = {}

    def handle(self, event: Event) -> tuple[Command, ...]:
        now_s = self._clock.now_s = event.now_s
        if self._backlog.policies.refuse_late:
            self._refusal.watch(now_s)
        # Do not refuse a call while handling its renewed offer.
        if not self._refusal.may_be_due or isinstance(event, InvocationOffered):
            return self._commands(event, now_s)
        refused = self._refusal.impatient(now_s, _is_told_of(event))
        return (*refused, *self._commands(event, now_s))

    def _commands(self, event: Event, now_s: float) -> tuple[Command, ...]:
        match event:
            case InvocationOffered():
                return self._offer(event)
            case ReplicaProgressed():
                return self._progress(event)
            case FirstTokenSent():
                return self._note_first_token(event)
            case InvocationEnded():
                return self._end(event)
            case InvocationWithdrawn():
                return self._withdraw(event)
            case ReplicaReported():
                return self._report(event)
            case TurnCame():
                waiting = self._backlog.parked.waiting.get(event.invocation_id)
                if waiting is None:
                    return ()
                self._backlog.give_turn(waiting)
                return self._dispatcher.fill_for(waiting, now_s)
            case TurnsEnded():
                self._backlog.end_turns()
                return ()
            case CacheChanged():
                self._leases.hear_cache(event)
                return ()
            case ReplicaLost():
                self._note_takes_calls(event.replica_id, False)
                self._drop(self._replicas.lose(event.replica_id))
            case StreamLost():
                self._doubt(event)
            case PoliciesChanged():
                self._backlog.change_policies(event.policies)
                self._backlog.stages.turn(event.policies.knows_stages, self._calls())
                if not event.policies.reserve:
                    self._dispatcher.saved = 0.0
            case Ticked():
                for replica in list(self._replicas.known.values()):
                    if now_s - replica.seen_at_s > self._silence_s:
                        self._drop(self._replicas.miss(replica.id))
                self._replicas.forget_silent()
                self._replicas.homes.forget_old(now_s)
                return (*self._refusal.hopeless(now_s), *self._dispatcher.fill_all(now_s))
            case _:
                assert_never(event)
        return self._dispatcher.fill_all(now_s)

    @property
    def leased(self) -> Collection[InvocationId]:
        """Invocations that replicas hold under a lease, as far as this router knows."""
        return self._leases.by_id.keys()

    def invocation(self, id: InvocationId) -> Invocation | None:
        """The call as last offered, while it is queued or leased."""
        waiting = self._waiting.get(id)
        if waiting is not None:
            return waiting.invocation
        lease = self._leases.by_id.get(id)
        return None if lease is None else lease.running.invocation

    @property
    def replicas(self) -> Collection[ReplicaId]:
        """All known replicas, including those that accept no work."""
        return self._replicas.known.keys()

    @property
    def queued(self) -> int:
        """Number of queued calls."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[Invocation]:
        """Queued calls in order of arrival."""
        return [w.invocation for w in self._waiting.values()]

    @property
    def unplaced(self) -> Mapping[InvocationId, Waiting]:
        """Queued calls by arrival; where calls take turns, only those whose turn is to come."""
        return self._backlog.parked.waiting if self._backlog.policies.by_turns else self._waiting

    @property
    def first_parked(self) -> Invocation | None:
        """The oldest call whose turn has not come."""
        return self._backlog.parked.first()

    @property
    def in_turn(self) -> int:
        """Queued calls whose turn has already come."""
        return len(self._waiting) - len(self._backlog.parked.waiting)

    @property
    def room(self) -> int:
        """Free batch slots of all replicas."""
        return sum(r.max_running + r.standby - r.held for r in self._replicas.open)

    @property
    def accepting(self) -> Sequence[Replica]:
        """Replicas that accept work, sorted by id."""
        return self._replicas.accepting

    @property
    def backlog_s(self) -> float:
        """Work of the queued calls, in replica-seconds."""
        return self._backlog.load_s

    def held_by(self, replica_id: ReplicaId) -> tuple[InvocationId, ...]:
        """Invocations known to run on the replica."""
        replica = self._replicas.known.get(replica_id)
        return () if replica is None else (*replica.leases, *sorted(replica.adopted))

    def picture(self, now_s: float) -> PoolPicture:
        replicas = tuple(
            r.snapshot(now_s) for r in sorted(self._replicas.known.values(), key=BY_ID)
        )
        return PoolPicture(
            self.name,
            now_s,
            len(self._waiting),
            self._dispatcher.dispatched,
            self._refusal.refused,
            replicas,
        )

    def check_invariants(self) -> None:
        """Assert that the pool's state is consistent; for tests."""
        self._replicas.check_invariants()
        self._backlog.check_invariants()
        self._leases.check_invariants()
        self._backlog.stages.check_invariants(self._calls())

    def _calls(self) -> list[Waiting | Running]:
        return [*self._waiting.values(), *(lease.running for lease in self._leases.by_id.values())]

    def why_waiting(self, invocation_id: InvocationId) -> str:
        """Why the invocation is still queued; empty if it is not queued."""
        waiting = self._waiting.get(invocation_id)
        if waiting is None:
            return ""
        if waiting.bound_to is not None:
            return f"in the queue of {waiting.bound_to}: {waiting.held_because}"
        if not self._replicas.open:
            return f"none of {len(self._replicas.known)} replicas has room"
        return waiting.held_because

    # Events

    def _offer(self, event: InvocationOffered) -> tuple[Command, ...]:
        invocation, now_s = event.invocation, event.now_s
        if self._backlog.policies.corrects:
            invocation = self._leases.lengths.believed(invocation)
        invocation = self._refusal.turns.as_first_asked(invocation, now_s)
        if not invocation.buffer:
            return self._take(invocation, now_s, [])
        latest = self._buffers.latest(invocation.buffer)
        if latest is not None and latest.is_later_than(invocation):
            self._taken_back.pop(invocation.id, None)
            return (_superseded(invocation.id, latest.run_id),)
        commands: list[Command] = []
        freed: list[Replica] = []
        if latest is not None and latest.run_id != invocation.run_id:
            commands, freed = self._supersede(latest, invocation.run_id)
        place_s = self._buffers.join(invocation, ended_older=bool(commands))
        invocation = changed(invocation, arrived_at_s=place_s)
        return (*commands, *self._take(invocation, now_s, freed))

    def _supersede(self, older: LatestRun, newer: RunId) -> tuple[list[Command], list[Replica]]:
        """End all calls of `older`'s run in favour of `newer`; also returns the freed replicas."""
        commands: list[Command] = []
        freed: list[Replica] = []
        for id in sorted(older.ids):
            waiting, lease = self._waiting.get(id), self._leases.by_id.get(id)
            if waiting is not None:
                self._backlog.remove(waiting)
                commands.append(_superseded(id, newer))
            elif lease is not None:
                freed += self._leases.release(id)
                commands.append(
                    Preempt(id, lease.command.attempt, lease.replica_id, replaced_by(newer), True)
                )
        return commands, freed

    def _take(
        self, invocation: Invocation, now_s: float, freed: list[Replica]
    ) -> tuple[Command, ...]:
        """Queue `invocation` or lease it to a replica; replicas in `freed` have new room."""
        id = invocation.id
        lease = self._leases.by_id.get(id)
        if self._taken_back.get(id, invocation.attempt) < invocation.attempt:
            del self._taken_back[id]  # its ingress has seen the preemption
        if lease is not None:
            if invocation.attempt <= lease.running.invocation.attempt:
                return (lease.command,)  # the answer was lost: repeat it
            freed += self._leases.release(id)
        known = self._waiting.get(id)
        if known is not None:
            return self._renew(known, invocation, now_s)
        freed += self._leases.unadopt(id)
        dispatcher = self._dispatcher
        waiting = dispatcher.waiting(invocation)
        has_been_asked = not (self._waiting or freed) and dispatcher.may_place_at_once()
        if has_been_asked:
            command = dispatcher.place_at_once(waiting, now_s)
            if command is not None:
                return (command,)
        self._join(waiting)
        commands: tuple[Command, ...] = ()
        if not has_been_asked:
            fill_all = dispatcher.fill_all
            commands = fill_all(now_s) if freed else dispatcher.fill_for(waiting, now_s)
        if id not in self._waiting or invocation.attempt > 1 or invocation.was_taken:
            # calls that resume after losing their replica or router were admitted before
            return commands
        why_not = self._refusal.why_not_queued(waiting, now_s)
        if why_not:
            return (*commands, self._refusal.refuse(waiting, why_not))
        return (*commands, *self._make_room(waiting, now_s))

    def _renew(self, known: Waiting, invocation: Invocation, now_s: float) -> tuple[Command, ...]:
        """A queued call is offered again."""
        if invocation.attempt < known.invocation.attempt:
            return ()  # a late duplicate of an earlier attempt
        self._backlog.renew(known, invocation)
        if invocation.generated:
            self._refusal.await_client(known, now_s)
        if known.bound_to is not None:
            self._backlog.expect(known, self._replicas.known[known.bound_to])
        known.queue.forget_rank(known)
        return self._dispatcher.fill_all(now_s)

    def _withdraw(self, event: InvocationWithdrawn) -> tuple[Command, ...]:
        id = event.invocation_id
        known = self.invocation(id)
        # An ingress that withdraws a preempted attempt has not seen a newer one.
        is_late = known is not None and event.attempt < known.attempt
        if is_late and id not in self._taken_back:
            return ()
        self._taken_back.pop(id, None)
        waiting = self._waiting.get(id)
        if waiting is not None:
            self._backlog.remove(waiting)
        freed = self._leases.unadopt(id) + self._leases.release(id)
        return self._dispatcher.fill_freed(freed, event.now_s)

    def _end(self, event: InvocationEnded) -> tuple[Command, ...]:
        id = event.invocation_id
        freed = self._leases.unadopt(id)
        lease = self._leases.by_id.get(id)
        # The call's end and its preemption may cross; then no next attempt will be offered.
        has_crossed = self._taken_back.get(id) == event.attempt and event.outcome == "done"
        if lease is not None and (lease.command.attempt == event.attempt or has_crossed):
            freed += self._leases.end(lease, event)
        elif has_crossed and id in self._waiting:
            self._backlog.remove(self._waiting[id])
        # After another end its ingress withdraws the call, or offers the next attempt.
        if event.outcome == "done" and (lease is None or id not in self._leases.by_id):
            self._taken_back.pop(id, None)
        return self._dispatcher.fill_freed(freed, event.now_s)

    def _report(self, event: ReplicaReported) -> tuple[Command, ...]:
        self._note_takes_calls(event.replica_id, event.accepting)
        replica = self._replicas.report(event, self._backlog.versions)
        self._leases.reported(replica, frozenset(event.held))
        if not replica.accepting:
            self._backlog.unbind(replica)
        is_new_mix = self._backlog.place_replica(replica)
        has_unbound = self._backlog.queue.waiting and not self._backlog.policies.late_binding
        if is_new_mix or has_unbound:
            return self._dispatcher.fill_all(event.now_s)
        return self._dispatcher.fill_one(replica, event.now_s)

    def _note_takes_calls(self, id: ReplicaId, takes_calls: bool) -> None:
        replica = self._replicas.known.get(id)
        if replica is None or replica.accepting_work == takes_calls:
            return
        if takes_calls:
            self._dispatcher.returns(replica)
        else:
            self._dispatcher.leaves(replica)

    def _drop(self, replica: Replica | None) -> None:
        """The replica is not known any more: its leases end."""
        if replica is not None:
            self._leases.lose(replica)
            self._close(replica)

    def _doubt(self, event: StreamLost) -> None:
        """Its call is offered again, and should go elsewhere."""
        replica = self._replicas.known.get(event.replica_id)
        if replica is None:
            return
        running = replica.leases.get(event.invocation_id)
        if running is not None and running.invocation.attempt == event.attempt:
            self._leases.release(event.invocation_id)
        self._close(replica)

    def _close(self, replica: Replica) -> None:
        """It gets no new calls until it reports; those bound to it are free to go elsewhere."""
        self._backlog.unbind(replica)
        replica.accepting_work = False
        self._backlog.place_replica(replica)

    def _note_first_token(self, event: FirstTokenSent) -> tuple[Command, ...]:
        lease = self._leases.by_id.get(event.invocation_id)
        if lease is None:
            return ()
        replica = self._leases.see_first_token(lease)
        if self._backlog.policies.admission is ADMIT_ALWAYS:
            return ()  # no replica has new room
        return self._dispatcher.fill_one(replica, event.now_s)

    def _progress(self, event: ReplicaProgressed) -> tuple[Command, ...]:
        replica = self._replicas.known.get(event.replica_id)
        if replica is None:
            return ()
        self._leases.progress(replica, event)
        commands = self._preempt((replica,), event.now_s)
        return commands or self._dispatcher.fill_one(replica, event.now_s)

    def _join(self, waiting: Waiting) -> None:
        """Add it to the queue."""
        self._backlog.add(waiting)
        self._refusal.joined(waiting, self._clock.now_s)

    # Preemption

    def _make_room(self, waiting: Waiting, now_s: float) -> tuple[Command, ...]:
        """Preempt for a new call that no replica takes, if it comes first.

        The next progress report may come too late for it: of few replicas there are few a second.
        """
        policies, accepting = self._backlog.policies, self._replicas.accepting
        asks = policies.asks_at_once and policies.late_binding
        if not asks or waiting.invocation.deadline_s == inf:
            return ()
        return self._preempt(accepting[:REPLICAS_ASKED], now_s, waiting.invocation.id)

    def _preempt(
        self, replicas: Sequence[Replica], now_s: float, only_for: InvocationId | None = None
    ) -> tuple[Command, ...]:
        """Preempt on the first of `replicas` where others gain by it, and place calls again.

        `only_for`: only if that call is the first of the queue.
        """
        policies, backlog = self._backlog.policies, self._backlog
        if policies.preemption is None or not self._replicas.profiles:
            return ()
        queue = backlog.queue if policies.late_binding else replicas[0].queue
        if not queue.waiting:
            return ()
        backlog.refresh(queue, now_s)
        head = Head(queue, backlog.rank, now_s)
        preempted: list[tuple[Replica, InvocationId, str]] = []
        if only_for is None or head[0].id == only_for:
            load = backlog.queue_load(now_s)
            place_s = cache(self._next_place_s)  # the same for all of them
            for replica in replicas:
                victims = policies.preemption.preempt(replica, head, now_s, place_s, load)
                preempted = [
                    (replica, id, reason)
                    for id, reason in victims
                    if replica.leases[id].invocation.resumable
                ]
                if preempted:
                    break
        head.put_back()
        if not preempted:
            return ()
        commands = tuple(self._take_back(*victim) for victim in preempted)
        # The calls for which they yielded get the slots; then they may run anywhere.
        last = {c.invocation_id for c in commands}
        return commands + self._dispatcher.fill_all(now_s, last)

    def _next_place_s(self) -> float:
        """Seconds until the pool's next batch slot frees, judged by a sample of its replicas, and
        by the pace at which work ends."""
        accepting = self._replicas.accepting
        looked_at = accepting[:: max(1, len(accepting) // PLACES_LOOKED_AT)]
        pace = self._backlog.pressure.pace
        return min([r.wait_s for r in looked_at], default=inf) / pace

    def _take_back(self, replica: Replica, id: InvocationId, reason: str) -> Preempt:
        running = replica.leases[id]
        before = running.invocation
        self._leases.take_back(id)
        self._taken_back[id] = before.attempt
        invocation = before.continued(before.attempt + 1, running.tokens, running.first_token_at_s)
        waiting = self._dispatcher.waiting(invocation, has_turn=True)
        waiting.waited_s = running.waited_s
        self._join(waiting)
        if not self._backlog.policies.late_binding:
            self._dispatcher.bind(waiting)
        return Preempt(id, before.attempt, replica.id, reason)


def _superseded(id: InvocationId, newer: RunId) -> Refuse:
    return Refuse(id, replaced_by(newer), 0.0, superseded=True)


def _is_told_of(event: Event) -> Collection[InvocationId]:
    """The call whose fate `event` decides; it must not be refused now."""
    match event:
        case InvocationEnded() | InvocationWithdrawn():
            return (event.invocation_id,)
        case ReplicaReported():
            return event.held
        case _:
            return ()
