"""Which queued calls start now, and on which replica. Asks the pool's policies."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import inf

from cato.core.commands import Command, Dispatch
from cato.core.decision import Admit, Defer, Hold
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.core.policies import MappingPolicy
from cato.core.pool.backlog import Backlog, load_of, work_alone
from cato.core.pool.leases import Leases
from cato.core.pool.pressure import LateShare
from cato.core.pool.queue import Entry, Queue, Waiting
from cato.core.pool.refusal import Refusal
from cato.core.pool.replica import Replica
from cato.core.pool.replicas import Replicas
from cato.core.pool.tenant_queues import TenantQueues
from cato.core.snapshot import Invocation, PoolSnapshot


class Dispatcher:
    """Fills replicas from the queues. A command is in effect when it is returned."""

    __slots__ = (
        "_accepting", "_backlog", "_late_share", "_leases", "_open", "_pool", "_pressure", "_queue",
        "_refusal", "_replicas", "_unbound", "dispatched", "saved",
    )  # fmt: skip

    def __init__(
        self, pool: PoolName, backlog: Backlog, replicas: Replicas, leases: Leases, refusal: Refusal
    ) -> None:
        self._pool = pool
        self._backlog = backlog
        self._queue = backlog.queue
        self._unbound = backlog.unbound
        self._pressure = backlog.pressure
        self._late_share = LateShare()
        self._replicas = replicas
        self._open = replicas.open
        self._accepting = replicas.accepting
        self._leases = leases
        self._refusal = refusal
        self.dispatched = 0
        # Credit of calls without an SLO towards their reserved share, in dispatches.
        self.saved = 0.0

    def waiting(self, invocation: Invocation, has_turn: bool = False) -> Waiting:
        """A call that is about to join the pool."""
        return Waiting(
            invocation,
            self._queue,
            has_turn=has_turn,
            joined_at_s=self._replicas.clock.now_s,
            dispatched_before=self.dispatched,
        )

    def fill_for(self, waiting: Waiting, now_s: float) -> tuple[Command, ...]:
        """Place a new call; earlier calls could not be placed and no room was freed."""
        if waiting.queue is self._backlog.parked:
            return ()
        policies = self._backlog.policies
        if not policies.late_binding:
            return self.fill_one(self.bind(waiting), now_s)
        if not self._open:
            return ()
        is_cut = 0 < policies.window < len(self._queue)
        if policies.strict or is_cut or policies.mapping is not None:
            return self._fill(self._queue, self._open, now_s)
        self._backlog.refresh(self._queue, now_s)
        assert waiting.rank is not None, "a new call has a rank"
        commands: list[Command] = []
        self._place(waiting, list(self._open), now_s, commands)
        return tuple(commands)

    def fill_freed(self, freed: Sequence[Replica], now_s: float) -> tuple[Command, ...]:
        """A call has left `freed`: one replica, none, or several after a router's restart."""
        if len(freed) > 1:
            return self.fill_all(now_s)
        return self.fill_one(freed[0], now_s) if freed else ()

    def fill_one(self, replica: Replica | None, now_s: float) -> tuple[Command, ...]:
        """One replica has changed: place calls on it."""
        if replica is None or not replica.is_open:
            return ()
        if self._backlog.policies.late_binding:
            return self._fill(self._queue, (replica,), now_s)
        return self._fill(replica.queue, (replica,), now_s)

    def fill_all(self, now_s: float, last: Collection[InvocationId] = ()) -> tuple[Command, ...]:
        """Place queued calls on all replicas; those in `last` after all others."""
        if self._backlog.policies.late_binding:
            return self._fill(self._queue, self._open, now_s, last)
        for waiting in list(self._queue.waiting.values()):
            self.bind(waiting)
        commands: tuple[Command, ...] = ()
        for replica in list(self._open):
            commands += self._fill(replica.queue, (replica,), now_s, last)
        return commands

    def _fill(
        self,
        queue: Queue | TenantQueues,
        replicas: Iterable[Replica],
        now_s: float,
        last: Collection[InvocationId] = (),
    ) -> tuple[Command, ...]:
        """Offer queued calls in order to `replicas` until none of them takes another."""
        if not queue.waiting or not self._replicas.profiles:
            return ()
        open_ = list(replicas)
        if not open_:
            return ()
        policies = self._backlog.policies
        if policies.mapping is not None:
            return self._start_mapped(policies.mapping, queue, open_, now_s)
        self._backlog.refresh(queue, now_s)
        commands: list[Command] = []
        if self.saved >= 1 and self._unbound and not last:
            self._place_reserved(open_, now_s, commands)
            if not open_:
                return tuple(commands)
        passed_over: list[Entry] = []
        for entry in self._looked_at(queue, now_s, last):
            if policies.strict and passed_over and entry[0] > min(passed_over)[0]:
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
            self._backlog.refresh(queue, now_s)
            entries = list(self._walk(queue, len(queue), now_s))
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

    def _looked_at(
        self, queue: Queue | TenantQueues, now_s: float, last: Collection[InvocationId]
    ) -> Iterator[Entry]:
        """The calls that the policies look at, in their order; those in `last` at the end."""
        policies = self._backlog.policies
        entries = self._walk(queue, policies.window or len(queue), now_s)
        if policies.shuffled:
            entries = _shuffled(entries, queue)
        return _others_first(entries, last, queue) if last else entries

    def _walk(self, queue: Queue | TenantQueues, most: int, now_s: float) -> Iterator[Entry]:
        """Take the first `most` calls out of the queue's order."""
        for _ in range(most):
            entry = queue.pop(self._backlog.rank, now_s)
            if entry is None:
                return
            yield entry

    def may_place_at_once(self) -> bool:
        policies = self._backlog.policies
        by_call = policies.late_binding and not policies.strict and policies.mapping is None
        by_call = by_call and not policies.by_turns
        return by_call and bool(self._open)

    def place_at_once(self, waiting: Waiting, now_s: float) -> Command | None:
        """Dispatch a new call without queueing it, when the queue is empty."""
        waiting.rank = self._backlog.rank(waiting, now_s)
        commands: list[Command] = []
        self._place(waiting, list(self._open), now_s, commands)
        return commands[0] if commands else None

    def _place(
        self, waiting: Waiting, open_: list[Replica], now_s: float, commands: list[Command]
    ) -> bool:
        """Dispatch `waiting` to one of `open_` if the policies agree; drop replicas that close."""
        if waiting.bound_to is not None:
            replica, reason = open_[0], waiting.held_because
        else:
            route = self._route(waiting, open_, now_s)
            if route is None:
                return False
            replica, reason = route
        answer = self._backlog.policies.admission.admit(waiting.invocation, replica, now_s)
        if isinstance(answer, Admit):
            commands.append(self._dispatch(waiting, replica, reason, now_s))
            if not replica.is_open and replica in open_:
                open_.remove(replica)
            return True
        if waiting.bound_to is None:
            waiting.held_because = answer.reason
            if waiting.invocation.session:
                self._backlog.hold_for(waiting, replica)
        if answer.closes and replica in open_:
            open_.remove(replica)
        return False

    def _route(
        self, waiting: Waiting, open_: list[Replica], now_s: float
    ) -> tuple[Replica, str] | None:
        """The replica of `open_` that the routing policy chooses, and why; None if it holds."""
        invocation, replicas, late_share_s = waiting.invocation, self._replicas, inf
        if invocation.session:
            self._backlog.hold_for(waiting, None)
            replicas.homes.forget_old(now_s)
            late = replicas.share_late(now_s)
            late_share_s = self._late_share.left_s(now_s, len(self._accepting), late)
        pool = PoolSnapshot(
            self._pool,
            now_s,
            open_,
            self.dispatched,
            len(replicas.profiles) == 1,
            self._accepting,
            len(self._open),
            self._pressure.in_time(now_s, len(self._accepting)),
            late_share_s,
        )
        decision = self._backlog.policies.routing.route(invocation, pool)
        if isinstance(decision, Hold):
            waiting.held_because = decision.reason
            if decision.replica_id is None:
                return None
            awaited = replicas.known[decision.replica_id]
            if awaited.is_open and awaited not in open_:  # it could have had its room before
                return awaited, decision.reason
            self._backlog.hold_for(waiting, awaited)
            return None
        replica = replicas.known[decision.replica_id]
        assert replica in open_, f"routed to {replica.id}, which has no room"
        return replica, decision.reason

    def _place_reserved(self, open_: list[Replica], now_s: float, commands: list[Command]) -> None:
        """Dispatch calls without an SLO from their reserved share, before all others."""
        policies, waiting = self._backlog.policies, next(iter(self._unbound.values()))
        if not open_ or waiting.queue is not self._queue:
            return
        if now_s - waiting.invocation.arrived_at_s < policies.reserve_after_s:
            return
        pool = PoolSnapshot(self._pool, now_s, open_, self.dispatched)
        decision = policies.routing.route(waiting.invocation, pool)
        if isinstance(decision, Hold):
            return
        replica = self._replicas.known[decision.replica_id]
        answer = policies.admission.admit(waiting.invocation, replica, now_s)
        if isinstance(answer, Defer) and answer.closes:
            return
        self.saved -= 1
        reason = f"{policies.reserve:.0%} are for work without an SLO"
        commands.append(self._dispatch(waiting, replica, reason, now_s))
        if not replica.is_open:
            open_.remove(replica)

    def bind(self, waiting: Waiting) -> Replica | None:
        """Early binding: add it to a replica's own queue."""
        invocation, now_s = waiting.invocation, self._replicas.clock.now_s
        bound = len(self._backlog.waiting) - len(self._queue)
        if invocation.session:
            self._replicas.homes.forget_old(now_s)
        pool = PoolSnapshot(
            self._pool, now_s, self._accepting, self.dispatched + bound, accepting=self._accepting
        )
        decision = self._backlog.policies.routing.route(invocation, pool)
        waiting.held_because = decision.reason
        if isinstance(decision, Hold):
            return None
        replica = self._replicas.known[decision.replica_id]
        assert replica.accepting, f"bound to {replica.id}, which is closed"
        self._backlog.bind(waiting, replica)
        return replica

    def leaves(self, replica: Replica) -> None:
        """It takes no more calls: its sessions compute their contexts again elsewhere."""
        sessions = replica.sessions
        if sessions and replica.has_prefix_cache:
            each_s = replica.profile.prefill_s(replica.working_set_tokens // sessions)
            replica.lost_s = sessions * each_s
            self._late_share.lost(replica.lost_s)

    def returns(self, replica: Replica) -> None:
        """It takes calls again, and still has its cache."""
        self._late_share.lost(-replica.lost_s)
        replica.lost_s = 0.0

    def _dispatch(self, waiting: Waiting, replica: Replica, reason: str, now_s: float) -> Dispatch:
        assert replica.is_open, f"dispatch to {replica.id}, which has no room"
        invocation, backlog = waiting.invocation, self._backlog
        command, prompt_s = self._command(waiting, replica, reason, now_s)
        is_late = now_s + command.remaining_s > invocation.deadline_s
        if backlog.waiting:
            in_time = self._pressure.leave(invocation.id)
            if in_time:
                self._pressure.begins(waiting.load_s, now_s)
            backlog.remove(waiting)
            if in_time and invocation.is_paced_rest:
                self._pressure.goes_on(now_s)
            self._refusal.dispatched(waiting, bool(backlog.waiting), now_s)
        else:  # it was never queued
            if not is_late and invocation.deadline_s < inf:
                self._pressure.begins(_load_s(invocation, replica, command), now_s)
            backlog.shares.passed(invocation.tenant)
        if is_late and invocation.session:
            load_s = _load_s(invocation, replica, command)
            late = self._replicas.share_late(now_s)
            self._late_share.begins(load_s, now_s, len(self._accepting), late)
        if self._unbound and invocation.deadline_s < inf:
            share = backlog.policies.reserve
            self.saved = min(1.0, self.saved + share / (1 - share))
        waited_s = waiting.waited_s + now_s - waiting.joined_at_s
        self._leases.add(invocation, replica, command, prompt_s, waited_s)
        self.dispatched += 1
        return command

    def _command(
        self, waiting: Waiting, replica: Replica, reason: str, now_s: float
    ) -> tuple[Dispatch, float]:
        """The command, and the seconds that the call's prompt is expected to take."""
        invocation, rank = waiting.invocation, waiting.rank
        assert rank is not None, "a dispatched call has a rank"
        profile, work, batch = replica.profile, waiting.work, replica.batch
        if batch > 1 or len(self._replicas.profiles) > 1 or work is None or invocation.session:
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
        home = self._replicas.homes.of(invocation.session) if invocation.session else None
        command = Dispatch(
            invocation_id=invocation.id,
            attempt=invocation.attempt,
            replica_id=replica.id,
            deployment=replica.deployment,
            priority=rank.priority,
            queue_s=now_s - invocation.arrived_at_s,
            slack_s=invocation.deadline_s - now_s,
            remaining_s=work.remaining_s - saved_s,
            reason=f"{rank.reason}; {reason}{waiting.why_it_waited(now_s, self.dispatched)}",
            predicted_queue_s=waiting.predicted_s,
            service_s=work.service_s - saved_s,
            cached_tokens=cached,
            home=ReplicaId("") if home is None else home.replica_id,
        )
        return command, prompt_s


def _load_s(invocation: Invocation, replica: Replica, command: Dispatch) -> float:
    return load_of(invocation, replica.profile, replica.max_running, command.cached_tokens)


def _others_first(
    entries: Iterator[Entry], last: Collection[InvocationId], queue: Queue | TenantQueues
) -> Iterator[Entry]:
    """`entries`, those in `last` at the end; what of these is not taken returns to the queue."""
    left: deque[Entry] = deque()
    try:
        for entry in entries:
            if entry[3] in last:
                left.append(entry)
            else:
                yield entry
        while left:
            yield left.popleft()
    finally:
        for entry in left:
            queue.push(entry)


def _shuffled(entries: Iterator[Entry], queue: Queue | TenantQueues) -> Iterator[Entry]:
    """`entries`, those of equal rank by draw; entries that are not taken return to the queue."""
    left = iter(sorted(entries, key=lambda e: (e[0], e[5].invocation.draw)))
    try:
        yield from left
    finally:
        for entry in left:
            queue.push(entry)
