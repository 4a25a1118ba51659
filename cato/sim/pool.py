"""A pool in virtual time: its orchestrator's commands become future events of its replicas.

`Dispatch` sends a request to a replica's engine, `Preempt` takes it back, `Refuse` ends the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, assert_never

from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.events import (
    REPORT_STEPS,
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationWithdrawn,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReported,
)
from cato.core.ids import DeploymentName, InvocationId, PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.policies import Policies
from cato.core.pool.prefill import DueDateRule
from cato.core.prefix_cache import PrefixCache
from cato.core.profile import Profile
from cato.sim.calls import Call
from cato.sim.replica import FactKind, SimReplica
from cato.sim.steps import Sequence

if TYPE_CHECKING:
    from cato.sim.fleet import Fleet

Recorder = Callable[[PoolName, Event], None]


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """One pool of a fleet: its replicas' profiles (one entry per replica) and its policies.

    `cold_start_s`: from ordering a replica to its first request. `dispatch_s`: from a lease until
    the call reaches its engine, in addition to the profile's `latency_s`. `news_s`: delay until the
    router learns of a first token, progress or an end; the user's stream is not delayed.
    `believed_slowness`: the router is given the profiles' times multiplied by this factor.
    """

    name: PoolName
    profiles: tuple[Profile, ...]
    policies: Policies
    max_running: int | None = None  # None: the profile's
    chunk_tokens: int | None = None
    report_steps: int = REPORT_STEPS
    prefill_together: bool = True
    cold_start_s: float = 0.0
    dispatch_s: float = 0.0
    news_s: float = 0.0
    # Tokens per block of the engines' prefix caches; 0: no prefix cache.
    cache_block_tokens: int = 0
    # Maximum tokens of one prompt per step while other requests run; 0: the whole budget.
    prompt_cap_tokens: int = 0
    # Engines order prompts by due date, with at most this time for them per step; 0: by arrival.
    prefill_step_s: float = 0.0
    # Blocks evicted from a prefix cache move to host memory, as far as the profile allows.
    host_memory: bool = False
    believed_slowness: float = 1.0


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica and the pool's state of it."""

    id: ReplicaId
    engine: SimReplica
    started_s: float
    ended_s: float = inf
    draining: bool = False
    scheduled_s: float = inf
    version: int = 0
    under_way: int = 0  # sent, not yet arrived


# The replica that runs a call or will receive it, with the attempt.
_Lease = tuple[_Replica, int, Call]


class SimPool:
    """A pool in virtual time."""

    def __init__(self, fleet: Fleet, setup: PoolSetup) -> None:
        self.setup = setup
        self.orchestrator = PoolOrchestrator(setup.name, setup.policies)
        self.replicas: dict[ReplicaId, _Replica] = {}
        self.retired: list[_Replica] = []
        self.preempted = 0
        self._fleet = fleet
        self._kernel = fleet.kernel
        self._made = 0
        self._ordered = 0
        self._starts: list[int] = []  # replicas ordered and not ready, oldest first
        self._leases: dict[InvocationId, _Lease] = {}

    # Replicas

    def add_replica(self, profile: Profile) -> None:
        """One more replica, ready now."""
        self._made += 1
        id = ReplicaId(f"{self.setup.name}-{self._made:04d}")
        self._report(self._open(id, profile))

    def _open(self, id: ReplicaId, profile: Profile, max_running: int | None = None) -> _Replica:
        """Register a ready replica; `max_running` replaces the pool's."""
        setup = self.setup
        engine = SimReplica(
            profile,
            max_running or setup.max_running or profile.max_running,
            setup.chunk_tokens,
            setup.report_steps,
            setup.prefill_together,
            PrefixCache(
                profile.kv_capacity_tokens,
                setup.cache_block_tokens,
                profile.host_capacity_tokens if setup.host_memory else 0,
            )
            if setup.cache_block_tokens
            else None,
            setup.prompt_cap_tokens,
            rule=DueDateRule(setup.prefill_step_s) if setup.prefill_step_s else None,
        )
        if profile.fetch_token_s:
            engine.fetchable = partial(self._fetchable, id)
        replica = self.replicas[id] = _Replica(id, engine, self._kernel.now_s)
        return replica

    def _fetchable(self, id: ReplicaId, sequence: Sequence) -> int:
        """Tokens of a prompt on the replica, other than `id`, that holds most of it."""
        caches = [r.engine.cache for r in self.replicas.values() if r.id != id]
        tokens = sequence.prompt_tokens
        held = (c.cached_tokens(sequence.blocks, tokens) for c in caches if c is not None)
        return max(held, default=0)

    @property
    def starting(self) -> int:
        """Number of replicas ordered and not ready yet."""
        return len(self._starts)

    @property
    def leased(self) -> Collection[InvocationId]:
        """Invocations given to replicas and not finished."""
        return self._leases.keys()

    def start_replica(self, profile: Profile) -> None:
        """One more replica, ready after the cold start."""
        self._ordered += 1
        order = self._ordered
        self._starts.append(order)

        def ready() -> None:
            if order in self._starts:
                self._starts.remove(order)
                self.add_replica(profile)

        self._kernel.at(self._kernel.now_s + self.setup.cold_start_s, ready)

    def cancel_start(self) -> None:
        """Cancel the latest order whose replica is not ready yet."""
        self._starts.pop()

    def drain_replica(self, id: ReplicaId) -> None:
        """The replica finishes its requests, then leaves."""
        replica = self.replicas[id]
        replica.draining = True
        self._report(replica)
        self._retire_if_empty(replica)

    def lose_replica(self, id: ReplicaId) -> None:
        """The replica dies; its calls are offered again, with the tokens that were sent."""
        replica = self.replicas.pop(id)
        replica.ended_s = self._kernel.now_s
        replica.version += 1
        self.retired.append(replica)
        lost = [call for r, _, call in self._leases.values() if r is replica]
        for call in lost:
            del self._leases[call.id]
        self._progress(replica.engine)
        self.handle(ReplicaLost(self._kernel.now_s, id, "died"))
        for call in lost:
            call.taken_back(self._kernel.now_s)
            self._fleet.offer_again(call)

    def _report(self, replica: _Replica) -> None:
        engine, profile = replica.engine, replica.engine.profile
        if self.setup.believed_slowness != 1.0:
            profile = profile.slowed(self.setup.believed_slowness)
        self.handle(
            ReplicaReported(
                self._kernel.now_s,
                replica.id,
                DeploymentName(self.setup.name),
                profile,
                engine.max_running,
                0,
                not replica.draining,
                tuple(id for id, lease in self._leases.items() if lease[0] is replica),
                prefix_caching=engine.cache is not None,
                step_tokens=engine.chunk_tokens or 0,
                host_tokens=profile.host_capacity_tokens if self.setup.host_memory else 0,
                mixes_prompts=bool(engine.prompt_cap_tokens or engine.rule),
            )
        )

    def _retire_if_empty(self, replica: _Replica) -> None:
        is_empty = replica.engine.held == 0 and replica.under_way == 0
        if replica.draining and is_empty and replica.id in self.replicas:
            del self.replicas[replica.id]
            replica.ended_s = self._kernel.now_s
            self.retired.append(replica)
            self.handle(ReplicaLost(self._kernel.now_s, replica.id, "drained"))

    def cost_s(self, now_s: float) -> tuple[float, float]:
        """Replica seconds spent computing, and replica seconds provisioned."""
        busy_s = provisioned_s = 0.0
        for replica in (*self.replicas.values(), *self.retired):
            until_s = min(replica.ended_s, now_s)
            busy_s += replica.engine.busy_until_s(until_s)
            provisioned_s += until_s - replica.started_s
        return busy_s, provisioned_s

    # Events and commands

    def handle(self, event: Event) -> None:
        if self._fleet.recorder is not None:
            self._fleet.recorder(self.setup.name, event)
        for command in self.orchestrator.handle(event):
            self.perform(command)

    def perform(self, command: Command) -> None:
        match command:
            case Dispatch():
                self._dispatch(command)
            case Preempt(invocation_id=id) if id not in self._leases:
                pass  # it has ended; the router will be told
            case Preempt():
                replica, _, call = self._leases.pop(command.invocation_id)
                self._progress(replica.engine)  # more was sent than is known
                if not command.superseded:
                    self.preempted += 1
                replica.engine.cancel(self._kernel.now_s, command.invocation_id)
                self._schedule(replica)
                call.taken_back(self._kernel.now_s)
                if command.superseded:
                    self._fleet.refused(command.invocation_id)
            case Refuse():
                self._fleet.refused(command.invocation_id, command.retry_after_s)
            case _:
                assert_never(command)

    def cancel(self, id: InvocationId, attempt: int, reason: str) -> None:
        """The client left."""
        lease = self._leases.pop(id, None)
        if lease is not None:
            lease[0].engine.cancel(self._kernel.now_s, id)
            self._schedule(lease[0])
        self.handle(InvocationWithdrawn(self._kernel.now_s, id, attempt, reason))

    def _dispatch(self, command: Dispatch) -> None:
        id, now_s = command.invocation_id, self._kernel.now_s
        call = self._fleet.calls.get(id)
        if call is None:
            return  # it has ended or its client left; the router will be told
        replica = self.replicas[command.replica_id]
        self._leases[id] = (replica, command.attempt, call)
        sequence = call.sent(command, now_s)
        latency_s = replica.engine.profile.latency_s + self.setup.dispatch_s
        if latency_s == 0.0:
            self._deliver(replica, sequence)
            return
        replica.under_way += 1
        self._kernel.at(now_s + latency_s, self._arrive, replica, command.attempt, sequence)

    def _arrive(self, replica: _Replica, attempt: int, sequence: Sequence) -> None:
        replica.under_way -= 1
        lease = self._leases.get(sequence.id)
        if lease is not None and lease[0] is replica and lease[1] == attempt:
            self._deliver(replica, sequence)
        else:  # taken back before it arrived
            self._retire_if_empty(replica)

    def _deliver(self, replica: _Replica, sequence: Sequence) -> None:
        engine, now_s = replica.engine, self._kernel.now_s
        is_idle = engine.is_idle
        engine.submit(now_s, sequence)
        if is_idle:  # no step to wait for: start at once
            engine.go_on(now_s)
        self._schedule(replica)

    def _progress(self, engine: SimReplica) -> tuple[tuple[InvocationId, int], ...]:
        """Tokens of the current attempts."""
        calls = self._fleet.calls
        report = []
        for id, tokens in engine.tokens(self._kernel.now_s):
            call = calls.get(id)
            if call is not None:
                call.tokens = tokens
                if call.is_paced:
                    call.run.progressed(call, tokens)
                report.append((id, tokens - call.generated))
        return tuple(report)

    def _tell(self, event: Event, lease: _Lease | None = None) -> None:
        """Tell the router at `event.now_s`; with a `lease`, only while it is the latest one."""
        if self.setup.news_s == 0.0:
            self.handle(event)
        else:
            self._kernel.at(event.now_s, self._hear, event, lease)

    def _hear(self, event: Event, lease: _Lease | None) -> None:
        if isinstance(event, FirstTokenSent) and lease is not None:
            latest = self._leases.get(event.invocation_id, lease)
            if latest != lease:
                return
        self.handle(event)

    def _schedule(self, replica: _Replica) -> None:
        wake_s = replica.engine.wake_s
        if wake_s == replica.scheduled_s or wake_s == inf:
            return
        replica.scheduled_s = wake_s
        replica.version += 1
        self._kernel.at(wake_s, self._wake, replica, replica.version)

    def _wake(self, replica: _Replica, version: int) -> None:
        if version != replica.version:
            return
        engine, now_s = replica.engine, self._kernel.now_s
        told_s = now_s + self.setup.news_s
        replica.scheduled_s = inf
        facts, is_due = engine.wake(now_s)
        for kind, sequence in facts:
            id = sequence.id
            lease = self._leases.get(id)
            if lease is None or lease[0] is not replica:
                continue  # taken back in the meantime
            if kind is FactKind.FIRST_TOKEN:
                lease[2].first_token()
                self._tell(FirstTokenSent(told_s, id), lease)
            else:
                del self._leases[id]
                call = lease[2]
                call.ended(sequence.cached_tokens, now_s)
                tokens = sequence.generated - call.generated
                cached = None if engine.cache is None else sequence.cached_tokens
                self._tell(InvocationEnded(told_s, id, lease[1], tokens, "done", cached))
                if self._fleet.calls.pop(id, None) is not None:
                    call.run.go_on(call)
        if is_due:
            self._tell(ReplicaProgressed(told_s, replica.id, self._progress(engine)))
        engine.go_on(now_s)
        if engine.wake_s < inf:
            self._schedule(replica)
        if replica.draining:
            self._retire_if_empty(replica)
