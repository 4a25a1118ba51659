"""The books of one pool, and the only door through which they change."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
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
    has_first_token: bool = False


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
                answer = self._offer(event)
                if answer:
                    return answer
            case InvocationEnded():
                lease = self._leases.get(event.invocation_id)
                if lease is not None and lease.command.attempt == event.attempt:
                    self._release(event.invocation_id)
                self._unadopt(event.invocation_id)
            case InvocationWithdrawn():
                self._waiting.pop(event.invocation_id, None)
                self._release(event.invocation_id)
            case FirstTokenSent():
                self._note_first_token(event)
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
        replicas = tuple(self._snapshot(r, now_s) for r in self._in_order())
        return PoolPicture(
            self.name, now_s, len(self._waiting), self._dispatched, self._refused, replicas
        )

    def why_waiting(self, invocation_id: InvocationId) -> str:
        """The reason why an invocation was last held; empty when it is not waiting."""
        waiting = self._waiting.get(invocation_id)
        return waiting.held_because if waiting else ""

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
            known.invocation = invocation
            return ()
        if len(self._waiting) >= self._policies.max_queued:
            self._refused += 1
            retry_after_s = max(MIN_RETRY_AFTER_S, self._backlog_s(event.now_s))
            reason = f"{len(self._waiting)} invocations wait, the bound of pool {self.name!r}"
            return (Refuse(invocation.id, reason, retry_after_s),)
        self._waiting[invocation.id] = _Waiting(invocation)
        return ()

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
        for waiting in self._waiting.values():
            if waiting.bound_to == replica_id:
                waiting.bound_to = None

    def _note_first_token(self, event: FirstTokenSent) -> None:
        lease = self._leases.get(event.invocation_id)
        if lease is None:
            return
        replica = self._replicas[lease.replica_id]
        steps = max(0, lease.invocation.expected_tokens - 1)
        step_s = replica.profile.decode_step_s(replica.held, lease.invocation.prompt_tokens)
        fresh = replace(lease, has_first_token=True, expected_end_s=event.now_s + steps * step_s)
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
        if not self._waiting or not any(r.accepting for r in self._replicas.values()):
            return ()
        return self._pump_late(now_s) if self._policies.late_binding else self._pump_early(now_s)

    def _pump_late(self, now_s: float) -> tuple[Command, ...]:
        open_ = {r.id: self._snapshot(r, now_s) for r in self._in_order()}
        open_ = {id: r for id, r in open_.items() if r.has_room}
        commands: list[Command] = []
        for waiting, rank in self._queue(now_s) if open_ else ():
            pool = PoolSnapshot(self.name, now_s, tuple(open_.values()), self._dispatched)
            decision = self._policies.routing.route(waiting.invocation, pool)
            match decision:
                case Hold(reason):
                    waiting.held_because = reason
                case Route(replica_id, reason):
                    assert replica_id in open_, f"routed to {replica_id}, which has no room"
                    commands.append(self._dispatch(waiting, replica_id, rank, reason, now_s))
                    fresh = self._snapshot(self._replicas[replica_id], now_s)
                    if fresh.has_room:
                        open_[replica_id] = fresh
                    else:
                        del open_[replica_id]
                case _:
                    assert_never(decision)
            if not open_:
                break
        return tuple(commands)

    def _pump_early(self, now_s: float) -> tuple[Command, ...]:
        for waiting in self._waiting.values():
            if waiting.bound_to is None:
                self._bind(waiting, now_s)
        commands: list[Command] = []
        for waiting, rank in self._queue(now_s):
            if waiting.bound_to is None:
                continue
            if self._snapshot(self._replicas[waiting.bound_to], now_s).has_room:
                commands.append(
                    self._dispatch(waiting, waiting.bound_to, rank, waiting.held_because, now_s)
                )
        return tuple(commands)

    def _bind(self, waiting: _Waiting, now_s: float) -> None:
        snapshots = (self._snapshot(r, now_s) for r in self._in_order())
        accepting = tuple(s for s in snapshots if s.accepting)
        bound = sum(w.bound_to is not None for w in self._waiting.values())
        pool = PoolSnapshot(self.name, now_s, accepting, self._dispatched + bound)
        decision = self._policies.routing.route(waiting.invocation, pool)
        waiting.held_because = decision.reason
        if isinstance(decision, Route):
            assert decision.replica_id in self._replicas, f"routed to {decision.replica_id}"
            waiting.bound_to = decision.replica_id

    def _queue(self, now_s: float) -> list[tuple[_Waiting, Rank]]:
        """What waits, in the order of the policy; slack is judged anew at every decision."""
        profiles = [r.profile for r in self._replicas.values() if r.accepting]
        ranked = [
            (
                w,
                self._policies.ordering.rank(
                    w.invocation, min(w.invocation.remaining_s(p) for p in profiles), now_s
                ),
            )
            for w in self._waiting.values()
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

    def _in_order(self) -> list[_Replica]:
        return [self._replicas[id] for id in sorted(self._replicas)]

    def _snapshot(self, replica: _Replica, now_s: float) -> ReplicaSnapshot:
        queued: list[float] = []
        if not self._policies.late_binding:
            queued = [
                replica.profile.service_s(w.invocation.prompt_tokens, w.invocation.expected_tokens)
                for w in self._waiting.values()
                if w.bound_to == replica.id
            ]
        wait_s = 0.0
        if queued or replica.held >= replica.max_running:
            running = [max(0.0, x.expected_end_s - now_s) for x in replica.leases.values()]
            running += [0.0] * len(replica.adopted)
            wait_s = expected_wait_s(running, queued, replica.max_running)
        return ReplicaSnapshot(
            id=replica.id,
            deployment=replica.deployment,
            profile=replica.profile,
            held=replica.held,
            max_running=replica.max_running,
            standby=replica.standby,
            queued=len(queued),
            wait_s=wait_s,
            accepting=replica.accepting and replica.max_running > 0,
        )

    def _backlog_s(self, now_s: float) -> float:
        """Expected time until the queue of now has been served; 0 when nothing can serve it."""
        slots = [(r.max_running, r.profile) for r in self._replicas.values() if r.accepting]
        total = sum(n for n, _ in slots)
        if total == 0:
            return 0.0
        profile = slots[0][1]
        work_s = sum(
            profile.service_s(w.invocation.prompt_tokens, w.invocation.expected_tokens)
            for w in self._waiting.values()
        )
        return work_s / total
