"""The books of one pool, and the only door through which they change."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from cato.core.commands import Command, Dispatch, Refuse
from cato.core.decision import Hold, Rank, Route
from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    PoliciesChanged,
    ReplicaLost,
    ReplicaReported,
    Ticked,
)
from cato.core.ids import DeploymentName, InvocationId, PoolName, ReplicaId
from cato.core.policies import Policies
from cato.core.profile import Profile
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaSnapshot

# A lease that its replica does not name this long after the dispatch was never taken up: the
# message from ingress to replica takes milliseconds, a first connection a second at worst.
LEASE_GRACE_S = 3.0
# Replicas report every 0.5 s; a busy host may be late a few times.
SILENCE_S = 5.0
MIN_RETRY_AFTER_S = 1.0


def expected_wait_s(running_s: Iterable[float], queued_s: Iterable[float], slots: int) -> float:
    """Expected queueing time of a newcomer behind `queued_s`, with `running_s` still to run.

    Walks the queue (CATO, Algorithm 1: "wait"): each queued service time goes to the slot that
    frees first. All values in seconds. A replica without slots never takes it.
    """
    if slots < 1:
        return float("inf")
    free_at = sorted(running_s)[-slots:]
    free_at = [0.0] * (slots - len(free_at)) + free_at
    heapq.heapify(free_at)
    for service_s in queued_s:
        heapq.heapreplace(free_at, free_at[0] + service_s)
    return free_at[0]


@dataclass(frozen=True, slots=True)
class Lease:
    invocation: Invocation
    replica_id: ReplicaId
    at_s: float
    expected_end_s: float
    command: Dispatch


@dataclass(slots=True)
class _Replica:
    id: ReplicaId
    deployment: DeploymentName
    profile: Profile
    max_running: int
    standby: int
    accepting: bool
    seen_at_s: float
    leases: dict[InvocationId, Lease] = field(default_factory=dict)
    # Held according to the replica but unknown here: leased before a restart of the router.
    adopted: frozenset[InvocationId] = frozenset()

    @property
    def held(self) -> int:
        return len(self.leases) + len(self.adopted)

    @property
    def accepts_work(self) -> bool:
        return self.accepting and self.max_running > 0

    @property
    def has_room(self) -> bool:
        """The same claim as `ReplicaSnapshot.has_room`, without the price of a snapshot."""
        return self.accepts_work and self.held < self.max_running + self.standby


@dataclass(slots=True)
class _Waiting:
    invocation: Invocation
    bound_to: ReplicaId | None = None
    held_because: str = ""


@dataclass(frozen=True, slots=True)
class PoolPicture:
    """What an operator sees of a pool."""

    name: PoolName
    now_s: float
    queued: int
    dispatched: int
    refused: int
    replicas: tuple[ReplicaSnapshot, ...]


class PoolOrchestrator:
    """Queue, leases and replicas of one pool.

    `handle` is deterministic: the same events give the same commands. Late binding keeps an
    invocation in the pool's queue until a replica has room; early binding gives it to a
    replica's own queue on arrival.
    """

    def __init__(self, name: PoolName, policies: Policies) -> None:
        self.name = name
        self._policies = policies
        self._waiting: dict[InvocationId, _Waiting] = {}
        self._leases: dict[InvocationId, Lease] = {}
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._dispatched = 0
        self._refused = 0

    def handle(self, event: Event) -> tuple[Command, ...]:
        match event:
            case InvocationOffered():
                return self._offer(event)
            case InvocationEnded():
                lease = self._leases.get(event.invocation_id)
                if lease is not None and lease.command.attempt == event.attempt:
                    self._release(event.invocation_id)
                self._unadopt(event.invocation_id)
            case InvocationWithdrawn():
                self._waiting.pop(event.invocation_id, None)
                self._release(event.invocation_id)
                self._unadopt(event.invocation_id)
            case FirstTokenSent():
                self._note_first_token(event)
                return ()  # nothing was freed
            case ReplicaReported():
                self._report(event)
            case ReplicaLost():
                self._lose(event.replica_id)
            case PoliciesChanged():
                self._policies = event.policies
                for waiting in self._waiting.values():
                    waiting.bound_to = None
            case Ticked():
                for replica in list(self._replicas.values()):
                    if event.now_s - replica.seen_at_s > SILENCE_S:
                        self._lose(replica.id)
            case _:
                assert_never(event)
        return self._pump(event.now_s)

    def picture(self, now_s: float) -> PoolPicture:
        queued_s = self._bound_work_s()
        replicas = tuple(
            self._snapshot(r, now_s, queued_s.get(r.id, ()))
            for r in _by_id(self._replicas.values())
        )
        return PoolPicture(
            self.name, now_s, len(self._waiting), self._dispatched, self._refused, replicas
        )

    def why_waiting(self, invocation_id: InvocationId) -> str:
        """The reason why an invocation waits; empty when it does not."""
        waiting = self._waiting.get(invocation_id)
        if waiting is None:
            return ""
        if waiting.bound_to is not None:
            return f"in the queue of {waiting.bound_to}: {waiting.held_because}"
        if not any(r.has_room for r in self._replicas.values()):
            return f"none of {len(self._replicas)} replicas has room"
        return waiting.held_because

    # Events

    def _offer(self, event: InvocationOffered) -> tuple[Command, ...]:
        invocation = event.invocation
        lease = self._leases.get(invocation.id)
        if lease is not None:
            if invocation.attempt <= lease.invocation.attempt:
                return (lease.command,)  # the answer was lost on its way: say it again
            self._release(invocation.id)
        known = self._waiting.get(invocation.id)
        if known is not None:
            # A late copy of an earlier attempt says nothing new.
            if invocation.attempt >= known.invocation.attempt:
                known.invocation = invocation
            return ()
        self._waiting[invocation.id] = _Waiting(invocation)
        self._unadopt(invocation.id)
        commands = self._pump(event.now_s)
        if invocation.id not in self._waiting or invocation.attempt > 1:
            return commands  # what goes on after a lost replica was admitted before
        if len(self._waiting) > self._policies.max_queued:
            del self._waiting[invocation.id]
            self._refused += 1
            retry_after_s = max(MIN_RETRY_AFTER_S, self._backlog_s())
            reason = f"{len(self._waiting)} invocations wait, the bound of pool {self.name!r}"
            return (*commands, Refuse(invocation.id, reason, retry_after_s))
        return commands

    def _report(self, event: ReplicaReported) -> None:
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            replica = _Replica(
                event.replica_id,
                event.deployment,
                event.profile,
                event.max_running,
                event.standby,
                event.accepting,
                event.now_s,
            )
            self._replicas[event.replica_id] = replica
        replica.profile = event.profile
        replica.max_running = event.max_running
        replica.standby = event.standby
        replica.accepting = event.accepting
        replica.seen_at_s = event.now_s
        if not replica.accepts_work:
            self._unbind(replica.id)
        held = frozenset(event.held)
        for id, lease in list(replica.leases.items()):
            if id not in held and event.now_s - lease.at_s > LEASE_GRACE_S:
                self._release(id)
        # What this router leased elsewhere since is the other replica's; the rest is adopted.
        replica.adopted = frozenset(
            id for id in held if id not in self._leases and id not in self._waiting
        )

    def _lose(self, replica_id: ReplicaId) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        for id in list(replica.leases):
            del self._leases[id]
        self._unbind(replica_id)

    def _unbind(self, replica_id: ReplicaId) -> None:
        for waiting in self._waiting.values():
            if waiting.bound_to == replica_id:
                waiting.bound_to = None

    def _note_first_token(self, event: FirstTokenSent) -> None:
        lease = self._leases.get(event.invocation_id)
        if lease is None:
            return
        replica = self._replicas[lease.replica_id]
        steps = max(0, lease.invocation.expected_tokens - 1)
        batch = min(replica.held, max(1, replica.max_running))
        step_s = replica.profile.decode_step_s(batch, lease.invocation.prompt_tokens)
        fresh = replace(lease, expected_end_s=event.now_s + steps * step_s)
        self._leases[event.invocation_id] = replica.leases[event.invocation_id] = fresh

    def _release(self, id: InvocationId) -> None:
        lease = self._leases.pop(id, None)
        if lease is not None and lease.replica_id in self._replicas:
            self._replicas[lease.replica_id].leases.pop(id, None)

    def _unadopt(self, id: InvocationId) -> None:
        for replica in self._replicas.values():
            if id in replica.adopted:
                replica.adopted -= {id}

    # Decisions

    def _pump(self, now_s: float) -> tuple[Command, ...]:
        if not self._waiting:
            return ()
        return self._pump_late(now_s) if self._policies.late_binding else self._pump_early(now_s)

    def _pump_late(self, now_s: float) -> tuple[Command, ...]:
        # Most events of a busy pool free nothing: they must not cost a look at the whole queue.
        with_room = [r for r in self._replicas.values() if r.has_room]
        if not with_room:
            return ()
        open_ = {r.id: self._snapshot(r, now_s) for r in _by_id(with_room)}
        commands: list[Command] = []
        for waiting, rank in self._queue(self._waiting.values(), now_s):
            pool = PoolSnapshot(self.name, now_s, tuple(open_.values()), self._dispatched)
            decision = self._policies.routing.route(waiting.invocation, pool)
            match decision:
                case Hold(reason):
                    waiting.held_because = reason
                case Route(replica_id, reason):
                    assert replica_id in open_, f"routed to {replica_id}, which has no room"
                    commands.append(self._dispatch(waiting, replica_id, rank, reason, now_s))
                    replica = self._replicas[replica_id]
                    if replica.has_room:
                        open_[replica_id] = self._snapshot(replica, now_s)
                    else:
                        del open_[replica_id]
                case _:
                    assert_never(decision)
            if not open_:
                break
        return tuple(commands)

    def _pump_early(self, now_s: float) -> tuple[Command, ...]:
        self._bind_all(now_s)
        commands: list[Command] = []
        for waiting, rank in self._queue(self._startable(), now_s):
            if waiting.bound_to is not None and self._replicas[waiting.bound_to].has_room:
                commands.append(
                    self._dispatch(waiting, waiting.bound_to, rank, waiting.held_because, now_s)
                )
        return tuple(commands)

    def _bind_all(self, now_s: float) -> None:
        """Early binding: every invocation without a replica is given one, in order of arrival."""
        unbound = [w for w in self._waiting.values() if w.bound_to is None]
        if not unbound:
            return
        queued_s = self._bound_work_s()
        open_ = {
            r.id: self._snapshot(r, now_s, queued_s.get(r.id, ()))
            for r in _by_id(self._replicas.values())
            if r.accepts_work
        }
        bound = len(self._waiting) - len(unbound)
        for waiting in unbound:
            pool = PoolSnapshot(self.name, now_s, tuple(open_.values()), self._dispatched + bound)
            decision = self._policies.routing.route(waiting.invocation, pool)
            waiting.held_because = decision.reason
            if isinstance(decision, Hold):
                continue
            assert decision.replica_id in open_, f"bound to {decision.replica_id}, which is closed"
            replica = self._replicas[decision.replica_id]
            waiting.bound_to = replica.id
            bound += 1
            work_s = queued_s.setdefault(replica.id, [])
            work_s.append(_alone_s(waiting.invocation, replica.profile))
            open_[replica.id] = self._snapshot(replica, now_s, work_s)

    def _startable(self) -> list[_Waiting]:
        """What waits in the queue of a replica that has room."""
        return [
            w
            for w in self._waiting.values()
            if w.bound_to is not None and self._replicas[w.bound_to].has_room
        ]

    def _queue(self, waiting: Iterable[_Waiting], now_s: float) -> list[tuple[_Waiting, Rank]]:
        """`waiting` in the order of the policy; slack is judged anew at every decision."""
        profiles = tuple(
            dict.fromkeys(r.profile for r in self._replicas.values() if r.accepts_work)
        )
        ranked = [
            (
                w,
                self._policies.ordering.rank(
                    w.invocation, min(w.invocation.remaining_s(p) for p in profiles), now_s
                ),
            )
            for w in waiting
        ]
        ranked.sort(key=lambda x: (x[1].value, x[0].invocation.arrived_at_s, x[0].invocation.id))
        return ranked

    def _dispatch(
        self, waiting: _Waiting, replica_id: ReplicaId, rank: Rank, reason: str, now_s: float
    ) -> Dispatch:
        invocation = waiting.invocation
        replica = self._replicas[replica_id]
        snapshot = self._snapshot(replica, now_s)
        assert snapshot.has_room, f"dispatch to {replica_id}, which has no room"
        service_s = replica.profile.service_s(
            invocation.prompt_tokens, invocation.expected_tokens, snapshot.batch
        )
        command = Dispatch(
            invocation_id=invocation.id,
            attempt=invocation.attempt,
            replica_id=replica_id,
            deployment=replica.deployment,
            priority=rank.value,
            queue_s=now_s - invocation.arrived_at_s,
            slack_s=invocation.deadline_s - now_s,
            remaining_s=invocation.remaining_s(replica.profile, snapshot.batch),
            reason=f"{rank.reason}; {reason}",
        )
        lease = Lease(invocation, replica_id, now_s, now_s + snapshot.wait_s + service_s, command)
        del self._waiting[invocation.id]
        self._leases[invocation.id] = replica.leases[invocation.id] = lease
        self._dispatched += 1
        return command

    # Pictures

    def _snapshot(
        self, replica: _Replica, now_s: float, queued_s: Sequence[float] = ()
    ) -> ReplicaSnapshot:
        wait_s = 0.0
        if queued_s or replica.held >= replica.max_running:
            running = [max(0.0, x.expected_end_s - now_s) for x in replica.leases.values()]
            running += [0.0] * len(replica.adopted)
            wait_s = expected_wait_s(running, queued_s, replica.max_running)
        return ReplicaSnapshot(
            id=replica.id,
            deployment=replica.deployment,
            profile=replica.profile,
            held=replica.held,
            max_running=replica.max_running,
            standby=replica.standby,
            queued=len(queued_s),
            wait_s=wait_s,
            accepting=replica.accepts_work,
        )

    def _bound_work_s(self) -> dict[ReplicaId, list[float]]:
        """Service times of what waits in the replicas' own queues (early binding only)."""
        work_s: dict[ReplicaId, list[float]] = {}
        for waiting in self._waiting.values():
            if waiting.bound_to is not None:
                profile = self._replicas[waiting.bound_to].profile
                work_s.setdefault(waiting.bound_to, []).append(
                    _alone_s(waiting.invocation, profile)
                )
        return work_s

    def _backlog_s(self) -> float:
        """Expected time until the queue of now has been served; 0 when nothing can serve it."""
        serving = [r for r in self._replicas.values() if r.accepts_work]
        if not serving:
            return 0.0
        work_s = sum(_alone_s(w.invocation, serving[0].profile) for w in self._waiting.values())
        return work_s / sum(r.max_running for r in serving)


def _by_id(replicas: Iterable[_Replica]) -> list[_Replica]:
    return sorted(replicas, key=lambda r: r.id)


def _alone_s(invocation: Invocation, profile: Profile) -> float:
    return profile.service_s(invocation.prompt_tokens, invocation.expected_tokens)
