"""The driver in virtual time: pools with their orchestrators, replicas, and tasks that arrive.

It turns commands into future events exactly where the live actors perform them: `Dispatch` is a
request to a replica's engine, `Preempt` takes it back, `Refuse` ends the task. The objects that
decide are those of `cato.core` and `cato.policies`, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isnan
from typing import assert_never

from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReported,
)
from cato.core.ids import DeploymentName, InvocationId, PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.policies import Policies
from cato.core.prefix_cache import PrefixCache
from cato.core.profile import Profile
from cato.sim.kernel import Kernel
from cato.sim.replica import FactKind, SimReplica
from cato.sim.replica import Sequence as EngineSequence
from cato.sim.tasks import Outcome, SimTask

Recorder = Callable[[PoolName, Event], None]
# How often replicas tell the tokens of what runs, in decode steps; live ones do the same.
REPORT_STEPS = 20


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """One pool of a fleet: its replicas' profiles (one entry a replica) and how it decides.

    `cold_start_s`: from the order for a further replica to its first request. `dispatch_s`: from a
    lease until the call is at its engine, beside the profile's `latency_s`. `news_s`: until the
    router hears of a first token, of progress, or of an end; the user's stream does not pass there.
    `believed_slowness`: the times of the profiles that the router is told, as a multiple of the
    true ones.
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
    # Tokens of a block of the engines' prefix caches; 0: they have none.
    cache_block_tokens: int = 0
    # Most tokens of one prompt in a step beside other requests; 0: the whole budget.
    prompt_cap_tokens: int = 0
    # Blocks that leave a prefix cache go to the host's memory, as far as the profile's goes.
    host_memory: bool = False
    believed_slowness: float = 1.0


@dataclass(slots=True, eq=False)
class _Host:
    """A replica and how the pool knows it."""

    id: ReplicaId
    engine: SimReplica
    started_s: float
    ended_s: float = inf
    draining: bool = False
    scheduled_s: float = inf
    version: int = 0
    under_way: int = 0  # sent to it, and not there yet


class SimPool:
    """A pool in virtual time."""

    def __init__(self, fleet: Fleet, setup: PoolSetup) -> None:
        self.setup = setup
        self.orchestrator = PoolOrchestrator(setup.name, setup.policies)
        self.hosts: dict[ReplicaId, _Host] = {}
        self.retired: list[_Host] = []
        self.preempted = 0
        self._fleet = fleet
        self._kernel = fleet.kernel
        self._made = 0
        self._ordered = 0
        self._starts: list[int] = []  # orders whose replicas are not ready yet, oldest first
        self._leases: dict[InvocationId, tuple[_Host, int]] = {}

    # Replicas

    def add_replica(self, profile: Profile) -> None:
        """One more, ready now."""
        setup = self.setup
        self._made += 1
        id = ReplicaId(f"{setup.name}-{self._made:04d}")
        engine = SimReplica(
            profile,
            setup.max_running or profile.max_running,
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
        )
        if profile.fetch_token_s:
            engine.fetchable = partial(self._fetchable, id)
        self.hosts[id] = _Host(id, engine, self._kernel.now_s)
        self._report(self.hosts[id])

    def _fetchable(self, id: ReplicaId, sequence: EngineSequence) -> int:
        """Tokens of a prompt on the replica beside `id` that has most of it."""
        caches = [h.engine.cache for h in self.hosts.values() if h.id != id]
        tokens = sequence.prompt_tokens
        held = (c.cached_tokens(sequence.blocks, tokens) for c in caches if c is not None)
        return max(held, default=0)

    @property
    def starting(self) -> int:
        """Replicas that are ordered and not ready yet."""
        return len(self._starts)

    @property
    def leased(self) -> Collection[InvocationId]:
        """What the replicas have been given and not finished."""
        return self._leases.keys()

    def start_replica(self, profile: Profile) -> None:
        """One more, ready after the cold start."""
        self._ordered += 1
        order = self._ordered
        self._starts.append(order)

        def ready() -> None:
            if order in self._starts:
                self._starts.remove(order)
                self.add_replica(profile)

        self._kernel.at(self._kernel.now_s + self.setup.cold_start_s, ready)

    def cancel_start(self) -> None:
        """Take back the latest order whose replica is not ready yet."""
        self._starts.pop()

    def drain_replica(self, id: ReplicaId) -> None:
        """It finishes what it has, then goes."""
        host = self.hosts[id]
        host.draining = True
        self._report(host)
        self._retire_if_empty(host)

    def lose_replica(self, id: ReplicaId) -> None:
        """It dies; what it ran is offered again, with the tokens that were sent."""
        host = self.hosts.pop(id)
        host.ended_s = self._kernel.now_s
        host.version += 1
        self.retired.append(host)
        lost = [i for i, (h, _) in self._leases.items() if h is host]
        for invocation_id in lost:
            del self._leases[invocation_id]
        self._fleet.progress(host.engine)
        self.handle(ReplicaLost(self._kernel.now_s, id, "died"))
        for invocation_id in lost:
            self._fleet.note_taken_back(invocation_id)
            self._fleet.offer_again(self, invocation_id)

    def _report(self, host: _Host) -> None:
        engine, profile = host.engine, host.engine.profile
        if self.setup.believed_slowness != 1.0:
            profile = profile.slowed(self.setup.believed_slowness)
        self.handle(
            ReplicaReported(
                self._kernel.now_s,
                host.id,
                DeploymentName(self.setup.name),
                profile,
                engine.max_running,
                0,
                not host.draining,
                tuple(i for i, (h, _) in self._leases.items() if h is host),
                prefix_caching=engine.cache is not None,
                step_tokens=engine.chunk_tokens or 0,
                host_tokens=profile.host_capacity_tokens if self.setup.host_memory else 0,
            )
        )

    def _retire_if_empty(self, host: _Host) -> None:
        is_empty = host.engine.held == 0 and host.under_way == 0
        if host.draining and is_empty and host.id in self.hosts:
            del self.hosts[host.id]
            host.ended_s = self._kernel.now_s
            self.retired.append(host)
            self.handle(ReplicaLost(self._kernel.now_s, host.id, "drained"))

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
                pass  # it has ended, and the router will hear of it
            case Preempt():
                host, _ = self._leases.pop(command.invocation_id)
                if command.superseded or self.setup.news_s:  # more was sent than is known
                    self._fleet.progress(host.engine)
                if not command.superseded:
                    self.preempted += 1
                host.engine.cancel(self._kernel.now_s, command.invocation_id)
                self._schedule(host)
                self._fleet.note_taken_back(command.invocation_id)
                if command.superseded:
                    self._fleet.refused(command.invocation_id)
            case Refuse():
                self._fleet.refused(command.invocation_id)
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
        if not self._fleet.wants(id):
            return  # it has ended, or its client has left, and the router will hear of it
        host = self.hosts[command.replica_id]
        self._leases[id] = (host, command.attempt)
        sequence = self._fleet.sequence(id, command)
        latency_s = host.engine.profile.latency_s + self.setup.dispatch_s
        if latency_s == 0.0:
            self._deliver(host, sequence)
            return
        host.under_way += 1
        self._kernel.at(now_s + latency_s, self._arrive, host, command.attempt, sequence)

    def _arrive(self, host: _Host, attempt: int, sequence: EngineSequence) -> None:
        host.under_way -= 1
        if self._leases.get(sequence.id) == (host, attempt):
            self._deliver(host, sequence)
        else:  # taken back on its way
            self._retire_if_empty(host)

    def _deliver(self, host: _Host, sequence: EngineSequence) -> None:
        engine, now_s = host.engine, self._kernel.now_s
        is_idle = engine.is_idle
        engine.submit(now_s, sequence)
        if is_idle:  # nothing to wait for: it starts at once
            engine.go_on(now_s)
        self._schedule(host)

    def _tell(self, event: Event, lease: tuple[_Host, int] | None = None) -> None:
        """The router hears of it at `event.now_s`; of a `lease`, only while that is the latest."""
        if self.setup.news_s == 0.0:
            self.handle(event)
        else:
            self._kernel.at(event.now_s, self._hear, event, lease)

    def _hear(self, event: Event, lease: tuple[_Host, int] | None) -> None:
        if isinstance(event, FirstTokenSent) and lease is not None:
            latest = self._leases.get(event.invocation_id, lease)
            if latest != lease:
                return
        self.handle(event)

    def _schedule(self, host: _Host) -> None:
        wake_s = host.engine.wake_s
        if wake_s == host.scheduled_s or wake_s == inf:
            return
        host.scheduled_s = wake_s
        host.version += 1
        self._kernel.at(wake_s, self._wake, host, host.version)

    def _wake(self, host: _Host, version: int) -> None:
        if version != host.version:
            return
        engine, now_s = host.engine, self._kernel.now_s
        told_s = now_s + self.setup.news_s
        host.scheduled_s = inf
        facts, is_due = engine.wake(now_s)
        for kind, sequence in facts:
            id = sequence.id
            lease = self._leases.get(id)
            if lease is None or lease[0] is not host:
                continue  # taken back in the meantime
            if kind is FactKind.FIRST_TOKEN:
                self._fleet.first_token(id)
                self._tell(FirstTokenSent(told_s, id), lease)
            else:
                del self._leases[id]
                tokens = sequence.generated - self._fleet.call_ended(id, sequence.cached_tokens)
                cached = None if engine.cache is None else sequence.cached_tokens
                ended = InvocationEnded(told_s, id, lease[1], tokens, "done", cached)
                self._tell(ended)
                self._fleet.go_on(id)
        if is_due:
            self._tell(ReplicaProgressed(told_s, host.id, self._fleet.progress(engine)))
        engine.go_on(now_s)
        if engine.wake_s < inf:
            self._schedule(host)
        if host.draining:
            self._retire_if_empty(host)


@dataclass(slots=True)
class _Call:
    """A node of a task that has started: its state between events."""

    outcome: Outcome
    index: int
    offered_at_s: float
    waits_since_s: float
    generated: int = 0  # in earlier attempts
    tokens: int = 0  # in all attempts, as last told
    attempt: int = 1
    dispatched_s: float = 0.0


@dataclass(slots=True)
class _Progress:
    """What of a task is still to do."""

    outcome: Outcome
    missing: list[int]  # per node: needs that are not done
    left: int
    served_s: float = 0.0


class Fleet:
    """Pools and the tasks that run on them."""

    def __init__(
        self,
        setups: Sequence[PoolSetup],
        recorder: Recorder | None = None,
        on_end: Callable[[Outcome], None] | None = None,
    ) -> None:
        """`on_end` is told of every task that has ended, was refused, or lost its client."""
        self.kernel = Kernel()
        self.recorder = recorder
        self._on_end = on_end
        self.outcomes: list[Outcome] = []
        self._runs: dict[str, _Progress] = {}
        self._calls: dict[InvocationId, _Call] = {}
        self.pools = {s.name: SimPool(self, s) for s in setups}
        for pool in self.pools.values():
            for profile in pool.setup.profiles:
                pool.add_replica(profile)

    def run(self, tasks: Sequence[SimTask], until_s: float = inf) -> list[Outcome]:
        """Let `tasks` (in order of arrival) arrive and run; returns their outcomes, in order."""
        arrivals = iter(tasks)

        def arrive(task: SimTask) -> None:
            upcoming = next(arrivals, None)
            if upcoming is not None:
                self.kernel.at(upcoming.arrived_at_s, arrive, upcoming)
            self.begin(task)

        first = next(arrivals, None)
        if first is not None:
            self.kernel.at(first.arrived_at_s, arrive, first)
        self.kernel.run(until_s)
        return self.outcomes

    @property
    def unfinished(self) -> int:
        """Tasks that have arrived and neither ended nor failed."""
        return len(self._runs)

    def begin(self, task: SimTask) -> Outcome:
        """The task arrives now."""
        outcome = Outcome(task)
        self.outcomes.append(outcome)
        self._runs[task.id] = _Progress(
            outcome, [len(n.needs) for n in task.nodes], len(task.nodes)
        )
        if task.patience_s < inf:
            self.kernel.at(task.arrived_at_s + task.patience_s, self._lose_patience, outcome)
        for index, node in enumerate(task.nodes):
            if not node.needs:
                self._start(outcome, index)
        return outcome

    def _start(self, outcome: Outcome, index: int) -> None:
        before_s = outcome.task.nodes[index].before_s
        if before_s > 0:
            self.kernel.at(self.kernel.now_s + before_s, self._offer, outcome, index)
        else:
            self._offer(outcome, index)

    def _offer(self, outcome: Outcome, index: int) -> None:
        task, now_s = outcome.task, self.kernel.now_s
        run = self._runs.get(task.id)
        if run is None:
            return  # refused or cancelled meanwhile
        invocation = task.invocation(index, now_s, run.served_s)
        self._calls[invocation.id] = _Call(outcome, index, now_s, now_s)
        self.pools[task.nodes[index].pool].handle(InvocationOffered(now_s, invocation))

    def offer_again(self, pool: SimPool, id: InvocationId) -> None:
        """After the loss of a replica: a new attempt that goes on where the stream broke off."""
        call = self._calls[id]
        run = self._runs[call.outcome.task.id]
        call.attempt += 1
        first = call.outcome.task.invocation(call.index, call.offered_at_s, run.served_s)
        again = first.continued(call.attempt, call.generated)
        pool.handle(InvocationOffered(self.kernel.now_s, again))

    # What pools tell

    def wants(self, id: InvocationId) -> bool:
        """Whether the call has neither ended nor been given up."""
        return id in self._calls

    def sequence(self, id: InvocationId, command: Dispatch) -> EngineSequence:
        call = self._calls[id]
        call.attempt = command.attempt
        node = call.outcome.task.nodes[call.index]
        call.dispatched_s = self.kernel.now_s
        call.outcome.queue_s += self.kernel.now_s - call.waits_since_s
        return EngineSequence(
            id,
            node.prompt_tokens,
            node.output_tokens,
            command.priority,
            call.generated,
            node.blocks,
            call.outcome.task.session,
            self.pools[node.pool].setup.policies.retain_s if node.calls_tool else 0.0,
        )

    def progress(self, engine: SimReplica) -> tuple[tuple[InvocationId, int], ...]:
        """Tokens of the present attempts."""
        calls, now_s = self._calls, self.kernel.now_s
        report = []
        for id, tokens in engine.tokens(now_s):
            call = calls.get(id)
            if call is not None:
                call.tokens = tokens
                outcome = call.outcome
                if outcome.is_streaming(call.index):
                    outcome.sent.append((now_s, tokens))
                report.append((id, tokens - call.generated))
        return tuple(report)

    def note_taken_back(self, id: InvocationId) -> None:
        call = self._calls[id]
        call.generated = max(call.generated, call.tokens)
        call.waits_since_s = self.kernel.now_s

    def first_token(self, id: InvocationId) -> None:
        """Of this attempt; the user has seen that of the first one."""
        call = self._calls[id]
        call.tokens = max(call.tokens, call.generated + 1)
        is_streamed = call.index == len(call.outcome.task.nodes) - 1
        if is_streamed and isnan(call.outcome.first_token_at_s):
            call.outcome.first_token_at_s = self.kernel.now_s
        elif call.outcome.is_streaming(call.index):
            call.outcome.sent.append((self.kernel.now_s, call.tokens))

    def call_ended(self, id: InvocationId, cached_tokens: int) -> int:
        """The tokens that its earlier attempts generated."""
        call = self._calls[id]
        call.outcome.cached_tokens += cached_tokens
        run = self._runs[call.outcome.task.id]
        run.served_s += self.kernel.now_s - call.dispatched_s
        return call.generated

    def go_on(self, id: InvocationId) -> None:
        """A call has ended: start what waited for it, or end the task."""
        call = self._calls.pop(id)
        outcome = call.outcome
        run = self._runs[outcome.task.id]
        run.left -= 1
        if run.left == 0:
            outcome.ended_at_s = self.kernel.now_s
            del self._runs[outcome.task.id]
            if self._on_end is not None:
                self._on_end(outcome)
            return
        for index, node in enumerate(outcome.task.nodes):
            if call.index in node.needs:
                run.missing[index] -= 1
                if run.missing[index] == 0:
                    self._start(outcome, index)

    def refused(self, id: InvocationId) -> None:
        """One call refused: the task fails; its other calls are withdrawn."""
        call = self._calls.pop(id, None)
        if call is None:
            return  # it has ended, or its task has failed, before the router heard of it
        task = call.outcome.task
        call.outcome.refused = True
        call.outcome.lost_tokens = call.generated
        self._runs.pop(task.id, None)
        others = [
            (self.pools[task.nodes[c.index].pool], other, c.attempt)
            for other, c in self._calls.items()
            if c.outcome is call.outcome
        ]
        # Those that wait first: they must not get the places of those that run.
        for pool, other, attempt in sorted(others, key=lambda o: o[1] in o[0].leased):
            del self._calls[other]
            pool.cancel(other, attempt, "its task failed")
        if self._on_end is not None:
            self._on_end(call.outcome)

    def _lose_patience(self, outcome: Outcome) -> None:
        task_id = outcome.task.id
        if task_id in self._runs and isnan(outcome.first_token_at_s):
            self.leave(task_id)
            if self._on_end is not None:
                self._on_end(outcome)

    def leave(self, task_id: str) -> None:
        """The client of a task gives up: it ends unfinished. Harmless when it has ended."""
        if self._runs.pop(task_id, None) is None:
            return
        mine = [(id, c) for id, c in self._calls.items() if c.outcome.task.id == task_id]
        for id, call in mine:
            del self._calls[id]
            pool = self.pools[call.outcome.task.nodes[call.index].pool]
            pool.cancel(id, call.attempt, "the client left")

    # What it cost

    def utilization(self) -> float:
        """Busy replica time / provisioned replica time, over all pools."""
        now_s = self.kernel.now_s
        busy_s = provisioned_s = 0.0
        for pool in self.pools.values():
            for host in (*pool.hosts.values(), *pool.retired):
                until_s = min(host.ended_s, now_s)
                busy_s += host.engine.busy_until_s(until_s)
                provisioned_s += until_s - host.started_s
        return busy_s / provisioned_s if provisioned_s > 0 else 0.0
