"""The state of one pool: queue, leases and replicas. All changes go through `handle`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import assert_never

from cato.core.buffers import MAX_BUFFERS, LatestRun, replaced_by
from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.decision import Admit, Defer, Hold
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
    Ticked,
    TurnCame,
    TurnsEnded,
)
from cato.core.fairness import TokenShares
from cato.core.ids import InvocationId, PoolName, ReplicaId, RunId
from cato.core.policies import ADMIT_ALWAYS, MappingPolicy, Policies
from cato.core.pool.backlog import Backlog, load_of, work_alone
from cato.core.pool.caches import CachePicture
from cato.core.pool.pace import MOST_PROMPTS
from cato.core.pool.queue import Entry, Head, Queue, TenantQueues, Waiting
from cato.core.pool.refusal import Refusal
from cato.core.pool.replicas import Clock, Lease, Replica, Replicas
from cato.core.pool.sessions import Homes
from cato.core.pool.window import learnt_dispatch_s
from cato.core.profile import Profile
from cato.core.record import changed
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaSnapshot, Running

# If a replica still does not report a lease this long after its dispatch, the lease never reached
# it. The message from ingress to replica takes milliseconds, and a first connection a second at
# worst. An ingress looks for a replica that it does not know yet for up to 5 s.
LEASE_GRACE_S = 6.0
# Replicas report every 0.5 s; a busy host may be late several times in a row.
SILENCE_S = 5.0
# For editors: a longer burst of keystrokes keeps only its last 10 s of queue priority.
MAX_HEAD_START_S = 10.0
# Preemption policies see at most this many replicas, evenly spaced in the list.
PLACES_LOOKED_AT = 16


@dataclass(slots=True)
class _Buffer(LatestRun):
    """The latest run of an editor buffer, and when its first, since superseded, call arrived."""

    arrived_at_s: float = 0.0


_BY_ID: Callable[[Replica], ReplicaId] = attrgetter("id")


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
        self._policies = policies
        self._silence_s = silence_s
        self._clock = Clock()
        self._picture = CachePicture()
        self._homes = Homes()
        self._fleet = Replicas()
        self._replicas = self._fleet.known
        self._open = self._fleet.open
        self._accepting = self._fleet.accepting
        self._shares = TokenShares()
        self._backlog = Backlog(self._fleet, policies, self._shares)
        self._waiting = self._backlog.waiting
        self._queue = self._backlog.queue
        self._unbound = self._backlog.unbound
        self._pressure = self._backlog.pressure
        self._refusal = Refusal(name, self._backlog, self._fleet)
        self._leases: dict[InvocationId, Lease] = {}
        self._adopters: dict[InvocationId, set[ReplicaId]] = {}
        # Preempted attempts that their ingress has not offered again yet, by invocation.
        self._taken_back: dict[InvocationId, int] = {}
        self._buffers: OrderedDict[str, _Buffer] = OrderedDict()
        # Credit of calls without an SLO towards their reserved share, in dispatches.
        self._saved = 0.0
        self._dispatched = 0

    def handle(self, event: Event) -> tuple[Command, ...]:
        now_s = self._clock.now_s = event.now_s
        if self._policies.refuse_late:
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
                return self._fill_for(waiting, now_s)
            case TurnsEnded():
                self._backlog.end_turns()
                return ()
            case CacheChanged():
                self._hear_cache(event)
                return ()
            case ReplicaLost():
                self._lose(event.replica_id)
            case PoliciesChanged():
                self._change_policies(event.policies)
            case Ticked():
                for replica in list(self._replicas.values()):
                    if now_s - replica.seen_at_s > self._silence_s:
                        self._lose(replica.id)
                self._homes.forget_old(now_s)
                return (*self._refusal.hopeless(now_s), *self._fill_all(now_s))
            case _:
                assert_never(event)
        return self._fill_all(now_s)

    @property
    def leased(self) -> Collection[InvocationId]:
        """Invocations that replicas hold under a lease, as far as this router knows."""
        return self._leases.keys()

    def invocation(self, id: InvocationId) -> Invocation | None:
        """The call as last offered, while it is queued or leased."""
        waiting = self._waiting.get(id)
        if waiting is not None:
            return waiting.invocation
        lease = self._leases.get(id)
        return None if lease is None else lease.running.invocation

    @property
    def replicas(self) -> Collection[ReplicaId]:
        """All known replicas, including those that accept no work."""
        return self._replicas.keys()

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
        return self._backlog.parked.waiting if self._policies.by_turns else self._waiting

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
        return sum(r.max_running + r.standby - r.held for r in self._open)

    @property
    def accepting(self) -> Sequence[Replica]:
        """Replicas that accept work, sorted by id."""
        return self._accepting

    @property
    def backlog_s(self) -> float:
        """Work of the queued calls, in replica-seconds."""
        return self._backlog.load_s

    def held_by(self, replica_id: ReplicaId) -> tuple[InvocationId, ...]:
        """Invocations known to run on the replica."""
        replica = self._replicas.get(replica_id)
        return () if replica is None else (*replica.leases, *sorted(replica.adopted))

    def picture(self, now_s: float) -> PoolPicture:
        replicas = tuple(r.snapshot(now_s) for r in sorted(self._replicas.values(), key=_BY_ID))
        return PoolPicture(
            self.name, now_s, len(self._waiting), self._dispatched, self._refusal.refused, replicas
        )

    def check_invariants(self) -> None:
        """Assert that the pool's state is consistent; for tests."""
        self._fleet.check_invariants()
        self._backlog.check_invariants()
        leased = {id: r.id for r in self._replicas.values() for id in r.leases}
        assert leased == {id: lease.replica_id for id, lease in self._leases.items()}
        assert not leased.keys() & self._waiting.keys(), "a call waits or has a lease"
        adopters = {(id, r.id) for r in self._replicas.values() for id in r.adopted}
        assert adopters == {(id, r) for id, rs in self._adopters.items() for r in rs}

    def why_waiting(self, invocation_id: InvocationId) -> str:
        """Why the invocation is still queued; empty if it is not queued."""
        waiting = self._waiting.get(invocation_id)
        if waiting is None:
            return ""
        if waiting.bound_to is not None:
            return f"in the queue of {waiting.bound_to}: {waiting.held_because}"
        if not self._open:
            return f"none of {len(self._replicas)} replicas has room"
        return waiting.held_because

    # Events

    def _offer(self, event: InvocationOffered) -> tuple[Command, ...]:
        invocation, now_s = event.invocation, event.now_s
        if not invocation.buffer:
            return self._take(invocation, now_s, [])
        latest = self._buffers.get(invocation.buffer)
        if latest is not None and latest.is_later_than(invocation):
            self._taken_back.pop(invocation.id, None)
            return (_superseded(invocation.id, latest.run_id),)
        commands: list[Command] = []
        freed: list[Replica] = []
        place_s = invocation.arrived_at_s
        if latest is None or latest.run_id != invocation.run_id:
            if latest is not None and self._supersede(latest, invocation.run_id, commands, freed):
                earliest_s = invocation.began_at_s - MAX_HEAD_START_S
                place_s = min(place_s, max(latest.arrived_at_s, earliest_s))
            latest = _Buffer(invocation.run_id, invocation.began_at_s, arrived_at_s=place_s)
            self._buffers[invocation.buffer] = latest
            if len(self._buffers) > MAX_BUFFERS:
                self._buffers.popitem(last=False)
        elif invocation.id in latest.ids:  # the same call offered again
            place_s = min(place_s, latest.arrived_at_s)
        self._buffers.move_to_end(invocation.buffer)
        latest.ids.add(invocation.id)
        invocation = changed(invocation, arrived_at_s=place_s)
        return (*commands, *self._take(invocation, now_s, freed))

    def _supersede(
        self, older: _Buffer, newer: RunId, commands: list[Command], freed: list[Replica]
    ) -> bool:
        """End all calls of `older`'s run in favour of `newer`; True if there were any."""
        has_ended_any = False
        for id in sorted(older.ids):
            waiting, lease = self._waiting.get(id), self._leases.get(id)
            if waiting is not None:
                self._backlog.remove(waiting)
                commands.append(_superseded(id, newer))
            elif lease is not None:
                freed += self._release(id)
                self._taken_back[id] = lease.command.attempt
                commands.append(
                    Preempt(id, lease.command.attempt, lease.replica_id, replaced_by(newer), True)
                )
            has_ended_any |= waiting is not None or lease is not None
        return has_ended_any

    def _take(
        self, invocation: Invocation, now_s: float, freed: list[Replica]
    ) -> tuple[Command, ...]:
        """Queue `invocation` or lease it to a replica; replicas in `freed` have new room."""
        id = invocation.id
        lease = self._leases.get(id)
        if self._taken_back.get(id, invocation.attempt) < invocation.attempt:
            del self._taken_back[id]  # its ingress has seen the preemption
        if lease is not None:
            if invocation.attempt <= lease.running.invocation.attempt:
                return (lease.command,)  # the answer was lost: repeat it
            freed += self._release(id)
        known = self._waiting.get(id)
        if known is not None:
            # A late duplicate of an earlier attempt changes nothing.
            if invocation.attempt >= known.invocation.attempt:
                known.invocation, known.work = invocation, None
                if invocation.generated:
                    self._refusal.await_client(known, now_s)
                if known.bound_to is not None:
                    replica = self._replicas[known.bound_to]
                    replica.queued_s[id] = _alone_s(invocation, replica.profile)
                    replica.changed()
                known.queue.forget_rank(known)
                return self._fill_all(now_s)
            return ()
        freed += self._unadopt(id)
        waiting = Waiting(
            invocation, self._queue, joined_at_s=now_s, dispatched_before=self._dispatched
        )
        has_been_asked = not (self._waiting or freed) and self._may_place_at_once()
        if has_been_asked:
            command = self._place_at_once(waiting, now_s)
            if command is not None:
                return (command,)
        self._join(waiting)
        commands: tuple[Command, ...] = ()
        if not has_been_asked:
            commands = self._fill_all(now_s) if freed else self._fill_for(waiting, now_s)
        if id not in self._waiting or invocation.attempt > 1 or invocation.was_taken:
            # calls that resume after losing their replica or router were admitted before
            return commands
        why_not = self._refusal.why_not_queued(waiting, now_s)
        return (*commands, self._refusal.refuse(waiting, why_not)) if why_not else commands

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
        return self._fill_freed(self._unadopt(id) + self._release(id), event.now_s)

    def _end(self, event: InvocationEnded) -> tuple[Command, ...]:
        id = event.invocation_id
        freed = self._unadopt(id)
        lease = self._leases.get(id)
        # The call's end and its preemption may cross; then no next attempt will be offered.
        has_crossed = self._taken_back.get(id) == event.attempt and event.outcome == "done"
        if lease is not None and (lease.command.attempt == event.attempt or has_crossed):
            invocation = lease.running.invocation
            replica = self._replicas.get(lease.replica_id)
            if event.outcome == "done" and self._policies.corrects and replica is not None:
                self._see_pace(replica, lease.running, event.output_tokens)
            if event.prompt_tokens is not None and invocation.session:
                nodes = len(invocation.prefix)
                self._homes.count(invocation.session, nodes, event.prompt_tokens)
            if event.cached_tokens is not None:
                estimated = invocation.prompt_tokens
                counted = event.prompt_tokens or estimated
                self._picture.correct(
                    lease.replica_id,
                    estimated - lease.uncached_tokens,
                    lease.cache_age,
                    event.cached_tokens * estimated / counted,
                )
            freed += self._release(id, event.output_tokens)
        elif has_crossed and id in self._waiting:
            self._backlog.remove(self._waiting[id])
        if lease is None or id not in self._leases:
            self._taken_back.pop(id, None)
        return self._fill_freed(freed, event.now_s)

    def _report(self, event: ReplicaReported) -> tuple[Command, ...]:
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            replica = self._replicas[event.replica_id] = Replica(
                self._clock,
                self._picture,
                self._homes,
                self._homes.working_set(event.replica_id),
                event.replica_id,
                event.deployment,
                event.profile,
                event.max_running,
                event.standby,
                event.accepting,
                event.now_s,
                self._fleet.pace_of(event.profile),
                Queue(self._backlog.versions),
            )
        is_changed = replica.host_tokens != event.host_tokens
        if replica.pace.profile != event.profile:
            is_changed, replica.pace = True, self._fleet.pace_of(event.profile)
        replica.profile = replica.pace.corrected
        replica.max_running = event.max_running
        replica.standby = event.standby
        replica.step_tokens = event.step_tokens
        replica.host_tokens = event.host_tokens
        replica.mixes_prompts = event.mixes_prompts
        replica.accepting_work = event.accepting
        replica.seen_at_s = event.now_s
        if event.prefix_caching and (is_changed or not replica.has_prefix_cache):
            capacity_tokens = event.profile.kv_capacity_tokens + event.host_tokens
            self._picture.add(replica.id, capacity_tokens)
        elif not event.prefix_caching:
            self._picture.remove(replica.id)
        replica.has_prefix_cache = event.prefix_caching
        held = frozenset(event.held)
        for id, running in list(replica.leases.items()):
            if id not in held and event.now_s - running.at_s > LEASE_GRACE_S:
                self._release(id)
        # Calls leased to another replica since then belong to that one; adopt the rest.
        unknown = (id for id in held if id not in self._leases and id not in self._waiting)
        self._adopt(replica, frozenset(unknown))
        if not replica.accepting:
            self._unbind(replica)
        is_new_mix = self._place_replica(replica)
        if is_new_mix or (self._queue.waiting and not self._policies.late_binding):
            return self._fill_all(event.now_s)
        return self._fill_one(replica, event.now_s)

    def _lose(self, replica_id: ReplicaId) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        for id in replica.leases:
            self._release(id)
        replica.leases.clear()
        replica.wide = 0
        self._picture.remove(replica_id)
        self._homes.lose(replica_id)
        self._adopt(replica, frozenset())
        self._unbind(replica)
        replica.accepting_work = False
        self._place_replica(replica)

    def _unbind(self, replica: Replica) -> None:
        for waiting in list(replica.queue.waiting.values()):
            replica.queue.remove(waiting)
            waiting.bound_to = None
            self._queue.add(waiting)
        replica.queued_s.clear()
        replica.queued_tokens = 0
        replica.changed()

    def _change_policies(self, policies: Policies) -> None:
        had_turns = self._policies.by_turns
        self._policies = self._backlog.policies = policies
        if policies.by_turns and not had_turns:
            self._backlog.end_turns()
        elif not policies.by_turns:
            for waiting in list(self._backlog.parked.waiting.values()):
                self._backlog.give_turn(waiting)
        if not policies.reserve:
            self._saved = 0.0
        for replica in self._replicas.values():
            self._unbind(replica)
        self._queue.forget_ranks()

    def _note_first_token(self, event: FirstTokenSent) -> tuple[Command, ...]:
        lease = self._leases.get(event.invocation_id)
        if lease is None:
            return ()
        replica, running = self._replicas[lease.replica_id], lease.running
        if running.first_token_at_s is None:
            self._see_tokens(replica, running, 1, event.now_s)
        if self._policies.admission is ADMIT_ALWAYS:
            return ()  # no replica has new room
        return self._fill_one(replica, event.now_s)

    def _progress(self, event: ReplicaProgressed) -> tuple[Command, ...]:
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            return ()
        for id, tokens in event.tokens:
            running = replica.leases.get(id)
            if running is not None and tokens > running.tokens:
                self._see_tokens(replica, running, tokens, event.now_s)
        preempted = self._preempt(replica, event.now_s)
        if preempted:  # they may run on any replica
            return preempted + self._fill_all(event.now_s)
        return self._fill_one(replica, event.now_s)

    def _hear_cache(self, event: CacheChanged) -> None:
        self._picture.hear(event.replica_id, event.news)
        replica = self._replicas.get(event.replica_id)
        if event.news.cleared and replica is not None:  # its calls' prompts are computed again
            for running in replica.leases.values():
                call = running.invocation
                self._picture.use(replica.id, call.session, call.prefix)

    def _see_tokens(self, replica: Replica, running: Running, tokens: int, now_s: float) -> None:
        batch = min(replica.held, max(1, replica.max_running))
        if self._policies.corrects and running.first_token_at_s is not None:
            self._see_pace(replica, running, tokens)
        if running.first_token_at_s is None:
            running.first_token_at_s = now_s
            lease = self._leases[running.invocation.id]
            # The call's last step also gave the other streams a token.
            replica.prompts_done_s += max(0.0, lease.prompt_s - replica.profile.step_base_s)
            if lease.went_first and tokens == 1:
                prompt_tokens = running.invocation.prompt_tokens
                cached = prompt_tokens - lease.uncached_tokens
                predicted_s = replica.profile.first_token_s(prompt_tokens, batch, cached)
                late_s = now_s - running.at_s - predicted_s
                replica.dispatch_s = learnt_dispatch_s(replica.dispatch_s, late_s)
            replica.prompt_done(lease.uncached_tokens, lease.prompt_s)
        replica.context_tokens += tokens - running.tokens
        running.saw(tokens, now_s, batch, replica.profile)
        running.prompts_seen_s = replica.prompts_done_s
        replica.changed()

    def _see_pace(self, replica: Replica, running: Running, tokens: int) -> None:
        """Compare the time of `tokens` so far with the prediction, and learn the pace."""
        if running.first_token_at_s is None or tokens <= running.tokens:
            return
        batch = min(replica.held, max(1, replica.max_running))
        context_tokens = running.invocation.prompt_tokens + tokens
        step_s = replica.profile.decode_step_s(batch, context_tokens)
        steps_s = (tokens - running.tokens) * (step_s + running.pace_step_s) / 2
        prompts_s = replica.prompts_done_s - running.prompts_seen_s
        if prompts_s > MOST_PROMPTS * steps_s:
            return
        took_s = self._clock.now_s - running.seen_at_s
        if replica.pace.saw(took_s, steps_s + prompts_s):
            for other in self._replicas.values():
                if other.pace is replica.pace:
                    other.profile = replica.pace.corrected
            self._place_replica(replica)

    def _release(self, id: InvocationId, output_tokens: int = 0) -> list[Replica]:
        """End a lease; return its replica if that is still known.

        `output_tokens` as far as the caller knows: the tenant is charged for the tokens it
        received.
        """
        lease = self._leases.pop(id, None)
        if lease is not None:
            served = lease.running.invocation
            tokens = max(output_tokens, lease.running.tokens)
            paid = served.expected_tokens * served.calls
            self._shares.charge(served.tenant, served.weight, 0, tokens - paid)
        replica = self._replicas.get(lease.replica_id) if lease is not None else None
        if replica is None or lease is None:
            return []
        running = replica.leases.pop(id)
        replica.wide -= running.invocation.calls - 1
        if running.first_token_at_s is None:
            replica.prompt_done(lease.uncached_tokens, lease.prompt_s)
        replica.context_tokens -= running.context_tokens
        self._fleet.touch(replica)
        return [replica]

    def _unadopt(self, id: InvocationId) -> list[Replica]:
        if not self._adopters:
            return []
        freed = [self._replicas[replica_id] for replica_id in sorted(self._adopters.pop(id, ()))]
        for replica in freed:
            replica.adopted -= {id}
            self._fleet.touch(replica)
        return freed

    def _adopt(self, replica: Replica, ids: frozenset[InvocationId]) -> None:
        """Record `ids` as the replica's only invocations without a lease."""
        for id in replica.adopted - ids:
            self._adopters[id].discard(replica.id)
            if not self._adopters[id]:
                del self._adopters[id]
        for id in ids - replica.adopted:
            self._adopters.setdefault(id, set()).add(replica.id)
        replica.adopted = ids

    def _join(self, waiting: Waiting) -> None:
        """Add it to the queue."""
        self._backlog.add(waiting)
        self._refusal.joined(waiting, self._clock.now_s)

    def _place_replica(self, replica: Replica) -> bool:
        """Update the lists after a replica has changed; True when the pool's profiles changed."""
        is_new_mix = self._fleet.place(replica)
        if is_new_mix:
            self._queue.forget_ranks()
            for other in self._accepting:
                other.queue.forget_ranks()
        return is_new_mix

    # Decisions

    def _fill_for(self, waiting: Waiting, now_s: float) -> tuple[Command, ...]:
        """Place a new call; earlier calls could not be placed and no room was freed."""
        if waiting.queue is self._backlog.parked:
            return ()
        if not self._policies.late_binding:
            return self._fill_one(self._bind(waiting), now_s)
        if not self._open:
            return ()
        policies = self._policies
        is_cut = 0 < policies.window < len(self._queue)
        if policies.strict or is_cut or policies.mapping is not None:
            return self._fill(self._queue, self._open, now_s)
        self._queue.refresh(self._backlog.rank, now_s)
        assert waiting.rank is not None, "a new call has a rank"
        commands: list[Command] = []
        self._place(waiting, list(self._open), now_s, commands)
        return tuple(commands)

    def _fill_freed(self, freed: Sequence[Replica], now_s: float) -> tuple[Command, ...]:
        """A call has left `freed`: one replica, none, or several after a router's restart."""
        if len(freed) > 1:
            return self._fill_all(now_s)
        return self._fill_one(freed[0], now_s) if freed else ()

    def _fill_one(self, replica: Replica | None, now_s: float) -> tuple[Command, ...]:
        """One replica has changed: place calls on it."""
        if replica is None or not replica.is_open:
            return ()
        if self._policies.late_binding:
            return self._fill(self._queue, (replica,), now_s)
        return self._fill(replica.queue, (replica,), now_s)

    def _fill_all(self, now_s: float) -> tuple[Command, ...]:
        if self._policies.late_binding:
            return self._fill(self._queue, self._open, now_s)
        for waiting in list(self._queue.waiting.values()):
            self._bind(waiting)
        commands: tuple[Command, ...] = ()
        for replica in list(self._open):
            commands += self._fill(replica.queue, (replica,), now_s)
        return commands

    def _fill(
        self, queue: Queue | TenantQueues, replicas: Iterable[Replica], now_s: float
    ) -> tuple[Command, ...]:
        """Offer queued calls in order to `replicas` until none of them takes another."""
        if not queue.waiting or not self._fleet.profiles:
            return ()
        open_ = list(replicas)
        if not open_:
            return ()
        if self._policies.mapping is not None:
            return self._start_mapped(self._policies.mapping, queue, open_, now_s)
        queue.refresh(self._backlog.rank, now_s)
        commands: list[Command] = []
        if self._saved >= 1 and self._unbound:
            self._place_reserved(open_, now_s, commands)
            if not open_:
                return tuple(commands)
        passed_over: list[Entry] = []
        for entry in self._looked_at(queue, now_s):
            if self._policies.strict and passed_over and entry[0] > min(passed_over)[0]:
                passed_over.append(entry)
                break
            if not self._place(entry[5], open_, now_s, commands):
                passed_over.append(entry)
            if not open_:
                break
        for entry in passed_over:
            queue.push(entry)
        return tuple(commands)

    def _start_mapped(
        self,
        mapping: MappingPolicy,
        queue: Queue | TenantQueues,
        replicas: Sequence[Replica],
        now_s: float,
    ) -> tuple[Command, ...]:
        """Start on each of `replicas` the calls that the mapping policy assigns to it."""
        commands: list[Command] = []
        for replica in replicas:
            if not queue.waiting:
                break
            queue.refresh(self._backlog.rank, now_s)
            entries: list[Entry] = []
            while (entry := queue.pop(self._backlog.rank, now_s)) is not None:
                entries.append(entry)
            known = {e[3]: e[5] for e in entries}
            batch = mapping.start([w.invocation for w in known.values()], replica, now_s)
            started = [known.pop(id) for id in batch.ids]
            for entry in entries:
                if entry[3] in known:
                    queue.push(entry)
                    if entry[5].bound_to is None:
                        entry[5].held_because = batch.reason
            commands += [self._dispatch(w, replica, batch.reason, now_s) for w in started]
        return tuple(commands)

    def _looked_at(self, queue: Queue | TenantQueues, now_s: float) -> Iterator[Entry]:
        window = self._policies.window
        if not self._policies.shuffled:
            looked = 0
            while (not window or looked < window) and (
                entry := queue.pop(self._backlog.rank, now_s)
            ) is not None:
                looked += 1
                yield entry
            return
        entries: list[Entry] = []
        while (not window or len(entries) < window) and (
            entry := queue.pop(self._backlog.rank, now_s)
        ) is not None:
            entries.append(entry)
        entries.sort(key=lambda e: (e[0], e[5].invocation.draw))
        left = iter(entries)
        try:
            yield from left
        finally:
            for entry in left:
                queue.push(entry)

    def _may_place_at_once(self) -> bool:
        policies = self._policies
        by_call = policies.late_binding and not policies.strict and policies.mapping is None
        by_call = by_call and not policies.by_turns
        return by_call and bool(self._open)

    def _place_at_once(self, waiting: Waiting, now_s: float) -> Command | None:
        """Dispatch a new call without queueing it, when the queue is empty."""
        waiting.rank = self._backlog.rank(waiting, now_s)
        commands: list[Command] = []
        self._place(waiting, list(self._open), now_s, commands)
        return commands[0] if commands else None

    def _place(
        self, waiting: Waiting, open_: list[Replica], now_s: float, commands: list[Command]
    ) -> bool:
        """Dispatch `waiting` to one of `open_` if the policies agree; drop replicas that close."""
        invocation = waiting.invocation
        if waiting.bound_to is not None:
            replica, reason = open_[0], waiting.held_because
        else:
            is_uniform = len(self._fleet.profiles) == 1
            if invocation.session:
                self._backlog.hold_for(waiting, None)
                self._homes.forget_old(now_s)
            pool = PoolSnapshot(
                self.name,
                now_s,
                open_,
                self._dispatched,
                is_uniform,
                self._accepting,
                len(self._open),
                self._pressure.in_time(now_s, len(self._accepting)),
            )
            decision = self._policies.routing.route(invocation, pool)
            if isinstance(decision, Hold):
                waiting.held_because = decision.reason
                if decision.replica_id is not None:
                    self._backlog.hold_for(waiting, self._replicas[decision.replica_id])
                return False
            replica, reason = self._replicas[decision.replica_id], decision.reason
            assert replica in open_, f"routed to {replica.id}, which has no room"
        answer = self._policies.admission.admit(invocation, replica, now_s)
        if isinstance(answer, Admit):
            commands.append(self._dispatch(waiting, replica, reason, now_s))
            if not replica.is_open:
                open_.remove(replica)
            return True
        if waiting.bound_to is None:
            waiting.held_because = answer.reason
            if invocation.session:
                self._backlog.hold_for(waiting, replica)
        if answer.closes:
            open_.remove(replica)
        return False

    def _place_reserved(self, open_: list[Replica], now_s: float, commands: list[Command]) -> None:
        """Dispatch calls without an SLO from their reserved share, before all others."""
        waiting = next(iter(self._unbound.values()))
        if not open_ or waiting.queue is not self._queue:
            return
        if now_s - waiting.invocation.arrived_at_s < self._policies.reserve_after_s:
            return
        pool = PoolSnapshot(self.name, now_s, open_, self._dispatched)
        decision = self._policies.routing.route(waiting.invocation, pool)
        if isinstance(decision, Hold):
            return
        replica = self._replicas[decision.replica_id]
        answer = self._policies.admission.admit(waiting.invocation, replica, now_s)
        if isinstance(answer, Defer) and answer.closes:
            return
        self._saved -= 1
        reason = f"{self._policies.reserve:.0%} are for work without an SLO"
        commands.append(self._dispatch(waiting, replica, reason, now_s))
        if not replica.is_open:
            open_.remove(replica)

    def _bind(self, waiting: Waiting) -> Replica | None:
        """Early binding: add it to a replica's own queue."""
        invocation = waiting.invocation
        bound = len(self._waiting) - len(self._queue)
        if invocation.session:
            self._homes.forget_old(self._clock.now_s)
        pool = PoolSnapshot(
            self.name,
            self._clock.now_s,
            self._accepting,
            self._dispatched + bound,
            accepting=self._accepting,
        )
        decision = self._policies.routing.route(invocation, pool)
        waiting.held_because = decision.reason
        if isinstance(decision, Hold):
            return None
        replica = self._replicas[decision.replica_id]
        assert replica.accepting, f"bound to {replica.id}, which is closed"
        self._queue.remove(waiting)
        waiting.bound_to = replica.id
        replica.queue.add(waiting)
        replica.queued_s[invocation.id] = _alone_s(invocation, replica.profile)
        replica.queued_tokens += waiting.prompt_tokens
        replica.changed()
        return replica

    def _dispatch(self, waiting: Waiting, replica: Replica, reason: str, now_s: float) -> Dispatch:
        invocation, rank = waiting.invocation, waiting.rank
        assert replica.is_open, f"dispatch to {replica.id}, which has no room"
        assert rank is not None, "a dispatched call has a rank"
        profile, work, batch = replica.profile, waiting.work, replica.batch
        if batch > 1 or len(self._fleet.profiles) > 1 or work is None or invocation.session:
            work = work_alone(invocation, profile, batch)
        saved_s = 0.0
        tokens = invocation.prompt_tokens
        held = replica.cached_tokens(invocation) if invocation.prefix else 0
        cached = replica.usable_tokens(invocation) if invocation.prefix else 0
        prompt_s = profile.prompt_s(tokens, held, cached)
        if held and replica.host_tokens:
            prompt_s += profile.host_load_token_s * replica.loaded_tokens(invocation)
        if cached:
            saved_s = profile.prefill_s(tokens) - prompt_s
        command = Dispatch(
            invocation_id=invocation.id,
            attempt=invocation.attempt,
            replica_id=replica.id,
            deployment=replica.deployment,
            priority=rank.value,
            queue_s=now_s - invocation.arrived_at_s,
            slack_s=invocation.deadline_s - now_s,
            remaining_s=work.remaining_s - saved_s,
            reason=f"{rank.reason}; {reason}{waiting.why_it_waited(now_s, self._dispatched)}",
            predicted_queue_s=waiting.predicted_s,
            service_s=work.service_s - saved_s,
            cached_tokens=cached,
            home=self._home_of(invocation),
        )
        if self._waiting:
            if self._pressure.leave(invocation.id):
                self._pressure.begins(waiting.load_s, now_s)
            self._backlog.remove(waiting)
            self._refusal.dispatched(waiting, bool(self._waiting), now_s)
        else:  # it was never queued
            if now_s + command.remaining_s <= invocation.deadline_s < inf:
                self._pressure.begins(load_of(invocation, profile, replica.max_running), now_s)
            self._shares.passed(invocation.tenant)
        self._shares.charge(
            invocation.tenant,
            invocation.weight,
            invocation.prompt_tokens,
            invocation.expected_tokens * invocation.calls,
        )
        if self._unbound and invocation.deadline_s < inf:
            share = self._policies.reserve
            self._saved = min(1.0, self._saved + share / (1 - share))
        # Standby calls start when a batch slot frees; in an already free slot a call starts at
        # once.
        start_s = now_s + (replica.wait_s if replica.held >= replica.max_running else 0.0)
        running = Running(invocation, now_s, start_s + command.service_s)
        uncached_tokens = invocation.prompt_tokens - cached
        went_first = not replica.prefilling and replica.held < replica.max_running
        age = 0
        if cached:
            nodes = self._picture.cached_nodes(replica.id, invocation.prefix)
            age = self._picture.age_of(replica.id, invocation.prefix, nodes)
        self._leases[invocation.id] = Lease(
            replica.id, running, command, uncached_tokens, prompt_s, age, went_first
        )
        replica.leases[invocation.id] = running
        replica.wide += invocation.calls - 1
        replica.prompt_sent(invocation, uncached_tokens, prompt_s)
        if invocation.prefix and replica.has_prefix_cache:
            self._picture.use(replica.id, invocation.session, invocation.prefix)
        if invocation.session:
            context_tokens = invocation.prompt_tokens + invocation.expected_tokens
            self._homes.note(invocation.session, replica.id, context_tokens, now_s)
        self._fleet.touch(replica)
        self._dispatched += 1
        return command

    def _home_of(self, invocation: Invocation) -> ReplicaId:
        home = self._homes.of(invocation.session) if invocation.session else None
        return ReplicaId("") if home is None else home.replica_id

    def _preempt(self, replica: Replica, now_s: float) -> tuple[Command, ...]:
        policy = self._policies.preemption
        queue = self._queue if self._policies.late_binding else replica.queue
        if policy is None or not queue.waiting or not self._fleet.profiles:
            return ()
        queue.refresh(self._backlog.rank, now_s)
        head = Head(queue, self._backlog.rank, now_s)
        victims = policy.preempt(replica, head, now_s, self._next_place_s)
        head.put_back()
        return tuple(
            self._take_back(replica, id, reason)
            for id, reason in victims
            if replica.leases[id].invocation.resumable
        )

    def _next_place_s(self) -> float:
        """Seconds until the pool's next batch slot frees, judged by a sample of its replicas."""
        looked_at = self._accepting[:: max(1, len(self._accepting) // PLACES_LOOKED_AT)]
        return min([r.wait_s for r in looked_at], default=inf)

    def _take_back(self, replica: Replica, id: InvocationId, reason: str) -> Preempt:
        running = replica.leases[id]
        before = running.invocation
        self._release(id)
        self._taken_back[id] = before.attempt
        invocation = before.continued(before.attempt + 1, running.tokens)
        waiting = Waiting(
            invocation,
            self._queue,
            has_turn=True,
            joined_at_s=self._clock.now_s,
            dispatched_before=self._dispatched,
        )
        self._join(waiting)
        if not self._policies.late_binding:
            self._bind(waiting)
        return Preempt(id, before.attempt, replica.id, reason)


def _superseded(id: InvocationId, newer: RunId) -> Refuse:
    return Refuse(id, replaced_by(newer), 0.0, superseded=True)


def _alone_s(invocation: Invocation, profile: Profile) -> float:
    return profile.service_s(invocation.prompt_tokens, invocation.expected_tokens)


def _is_told_of(event: Event) -> Collection[InvocationId]:
    """The call whose fate `event` decides; it must not be refused now."""
    match event:
        case InvocationEnded() | InvocationWithdrawn():
            return (event.invocation_id,)
        case ReplicaReported():
            return event.held
        case _:
            return ()
