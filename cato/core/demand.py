"""Demand on each pool, measured from the events of its router.

A `PoolMeter` sits beside a pool's orchestrator and sees the same events. It reports plain values
that may cross a process. `pool_loads` combines the pools, because a call in one pool announces
calls in others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    ReplicaReported,
)
from cato.core.ids import DeploymentName, InvocationId, NodeId, PoolName, ReplicaId, TaskName
from cato.core.orchestrator import PoolPicture
from cato.core.profile import Profile
from cato.core.scaling import Arrivals, Finished, PoolLoad, ReplicaLoad
from cato.core.snapshot import Invocation
from cato.core.workflow import NodeKind, Workflow

# A call that neither waits nor runs for this long was lost with its ingress.
FORGET_AFTER_S = 1800.0
# Half-life of what earlier calls taught.
HALF_LIFE_S = 3600.0
# Calls of a kind needed before they announce others.
LEAST_CALLS = 5.0


class CallKind(NamedTuple):
    """A call of a task, by node."""

    task: TaskName
    node: NodeId


@dataclass(frozen=True, slots=True)
class FollowUps:
    """Expected work after one call of some kind, by pool, in replica-seconds.

    Work of a call that needs several others is shared among those, so that a sum over running calls
    counts it once. `begins`: calls of this kind need no other; `share` is then 1 over how many of
    those a run has, so that a run counts once.
    """

    work_s: Mapping[PoolName, float] = field(default_factory=dict)
    begins: bool = False
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """A pool's arrivals and ends since the last look, and its present load.

    `arrived` counts by kind; `unfinished` counts calls by kind; `queued_s` is the work of the
    queued ones.
    """

    now_s: float
    arrived: Mapping[CallKind, Arrivals]
    unfinished: Mapping[CallKind, int]
    queued: int
    running: int
    queued_s: float
    places: int
    ready: tuple[ReplicaLoad, ...]
    finished: tuple[Finished, ...]


def together(shards: Sequence[PoolDemand]) -> PoolDemand:
    """The demand on a whole pool, from the demands on its router shards."""
    if len(shards) == 1:
        return shards[0]
    arrived: dict[CallKind, Arrivals] = {}
    unfinished: Counter[CallKind] = Counter()
    for shard in shards:
        unfinished.update(shard.unfinished)
        for kind, more in shard.arrived.items():
            known = arrived.get(kind, Arrivals())
            arrived[kind] = Arrivals(known.count + more.count, known.work_s + more.work_s)
    with_replicas = [shard for shard in shards if shard.ready] or shards
    ready = {replica.id: replica for shard in shards for replica in shard.ready}
    return PoolDemand(
        max(shard.now_s for shard in shards),
        arrived,
        unfinished,
        sum(shard.queued for shard in shards),
        sum(shard.running for shard in shards),
        sum(shard.queued_s for shard in shards),
        with_replicas[0].places,
        tuple(ready[id] for id in sorted(ready)),
        tuple(call for shard in shards for call in shard.finished),
    )


@dataclass(slots=True)
class _Call:
    """`has_place`: a replica holds it, possibly one that drains; it is not queued."""

    invocation: Invocation
    offered_at_s: float
    work_s: float
    seen_at_s: float
    has_place: bool = False
    is_counted: bool = False  # among the finished


class PoolMeter:
    """Measures the demand on one pool. A call offered again after a loss is no new arrival.

    Where deployments differ, work is measured in replicas of their mean speed.
    """

    def __init__(self, profile: Profile, places: int) -> None:
        """Use `profile` and `places` until the first replica reports its own."""
        self._first = (profile, places)
        self._shapes: dict[DeploymentName, tuple[Profile, int]] = {}
        self._calls: dict[InvocationId, _Call] = {}
        self._arrived: dict[CallKind, Arrivals] = {}
        self._finished: list[Finished] = []
        self._idle_since_s: dict[ReplicaId, float] = {}

    def handle(self, event: Event) -> None:
        match event:
            case InvocationOffered():
                self._offer(event)
            case FirstTokenSent():
                call = self._calls.get(event.invocation_id)
                if call is not None and call.invocation.until_first_token:
                    self._finish(call, event.now_s)
            case InvocationEnded():
                self._end(event)
            case InvocationWithdrawn():
                call = self._calls.get(event.invocation_id)
                if call is not None and call.invocation.attempt <= event.attempt:
                    del self._calls[event.invocation_id]
            case ReplicaReported():
                self._shapes[event.deployment] = (event.profile, max(1, event.max_running))
            case _:
                pass

    def refused(self, id: InvocationId) -> None:
        """The pool refused the call: refusals are commands of the orchestrator, not events."""
        self._calls.pop(id, None)

    def look(self, picture: PoolPicture, leased: Collection[InvocationId]) -> PoolDemand:
        """Report what happened since the last look; `leased` are the calls that replicas hold.

        A call that has lost its lease continues in a draining replica, until it is offered again or
        ends.
        """
        arrived, self._arrived = self._arrived, {}
        finished, self._finished = self._finished, []
        unfinished: dict[CallKind, int] = {}
        queued_s = 0.0
        # A router that stood by: its replicas report the ends of their calls to another one.
        is_left = not picture.replicas and not picture.queued
        for id, call in list(self._calls.items()):
            if id in leased:
                call.has_place, call.seen_at_s = True, picture.now_s
            elif is_left or picture.now_s - call.seen_at_s > FORGET_AFTER_S:
                del self._calls[id]
                continue
            kind = _kind(call.invocation)
            unfinished[kind] = unfinished.get(kind, 0) + 1
            if not call.has_place:
                queued_s += call.work_s
        places = [n for _, n in self._all_shapes()]
        return PoolDemand(
            picture.now_s,
            arrived,
            unfinished,
            picture.queued,
            len(leased),
            queued_s,
            round(sum(places) / len(places)),
            self._ready(picture),
            tuple(finished),
        )

    def _offer(self, event: InvocationOffered) -> None:
        invocation = event.invocation
        known = self._calls.get(invocation.id)
        if known is not None:
            if invocation.attempt > known.invocation.attempt:
                known.has_place = False
            known.invocation, known.seen_at_s = invocation, event.now_s
            return
        # The first attempt was seen before a restart, or it ended with its replica. What an earlier
        # incarnation of the router was offered counts as arrived then.
        work_s = self._work_s(invocation)
        self._calls[invocation.id] = _Call(invocation, event.now_s, work_s, event.now_s)
        if invocation.attempt == 1 and not invocation.was_taken:
            kind = _kind(invocation)
            before = self._arrived.get(kind, Arrivals())
            self._arrived[kind] = Arrivals(before.count + 1, before.work_s + work_s)

    def _end(self, event: InvocationEnded) -> None:
        call = self._calls.get(event.invocation_id)
        # A late report of a replaced attempt; after a preemption the event's attempt is the higher.
        if call is None or event.attempt < call.invocation.attempt:
            return
        del self._calls[event.invocation_id]
        if event.outcome == "done":
            self._finish(call, event.now_s)

    def _finish(self, call: _Call, now_s: float) -> None:
        invocation = call.invocation
        if call.is_counted or invocation.deadline_s == inf:
            return
        call.is_counted = True
        self._finished.append(
            Finished(
                now_s - call.offered_at_s,
                min(invocation.own_s(profile) for profile, _ in self._all_shapes()),
                invocation.deadline_s - now_s,
                invocation.downstream_s,
            )
        )

    def _all_shapes(self) -> Collection[tuple[Profile, int]]:
        return self._shapes.values() or (self._first,)

    def _work_s(self, invocation: Invocation) -> float:
        """Replica-seconds on a replica of mean speed (the harmonic mean of the times)."""
        tokens = invocation.prompt_tokens, invocation.expected_tokens
        times = [p.service_s(*tokens, places) / places for p, places in self._all_shapes()]
        if min(times) <= 0:
            return 0.0
        return len(times) / sum(1 / t for t in times)

    def _ready(self, picture: PoolPicture) -> tuple[ReplicaLoad, ...]:
        now_s, since_s = picture.now_s, self._idle_since_s
        accepting = [r for r in picture.replicas if r.accepting]
        self._idle_since_s = {
            r.id: since_s.get(r.id, now_s) for r in accepting if r.held + r.queued == 0
        }
        return tuple(
            ReplicaLoad(r.id, r.held, now_s - self._idle_since_s.get(r.id, now_s))
            for r in accepting
        )


def _kind(invocation: Invocation) -> CallKind:
    return CallKind(invocation.task, invocation.node)


@dataclass(frozen=True, slots=True)
class Provision:
    """The provisioner's own data of a pool: bounds, pending orders and how long they take."""

    min_replicas: int
    max_replicas: int
    starting: int
    start_s: float


def pool_loads(
    demands: Mapping[PoolName, PoolDemand],
    provisions: Mapping[PoolName, Provision],
    follow_ups: Mapping[CallKind, FollowUps],
) -> dict[PoolName, PoolLoad]:
    """The load that each pool's policy sees.

    A kind unknown to `follow_ups` starts a run of its own and is followed by nothing.
    """
    unknown = FollowUps(begins=True)
    begun = dict.fromkeys(demands, (0.0, 0.0))
    coming_s = dict.fromkeys(demands, 0.0)
    for pool, demand in demands.items():
        for kind, arrivals in demand.arrived.items():
            after = follow_ups.get(kind, unknown)
            if not after.begins:
                continue
            for name, (runs, work_s) in begun.items():
                implied_s = arrivals.count * after.work_s.get(name, 0.0)
                implied_s += arrivals.work_s if name == pool else 0.0
                if implied_s > 0:
                    begun[name] = (runs + arrivals.count * after.share, work_s + implied_s)
        for kind, count in demand.unfinished.items():
            for name, work_s in follow_ups.get(kind, unknown).work_s.items():
                if name in coming_s:
                    coming_s[name] += count * work_s
    loads = {}
    for name, demand in demands.items():
        provision = provisions[name]
        own = demand.arrived.values()
        loads[name] = PoolLoad(
            demand.now_s,
            provision.min_replicas,
            provision.max_replicas,
            demand.ready,
            provision.starting,
            provision.start_s,
            demand.places,
            demand.queued,
            demand.running,
            demand.queued_s,
            coming_s[name],
            Arrivals(sum(a.count for a in own), sum(a.work_s for a in own)),
            Arrivals(*begun[name]),
            demand.finished,
        )
    return loads


CallsBefore = dict[NodeId, tuple[NodeId, ...]]
"""The LLM nodes of a workflow in topological order, each with the LLM nodes that it waits for."""


def calls_before(workflow: Workflow) -> CallsBefore:
    """The order of a workflow's LLM calls; nodes of other kinds are skipped."""
    nearest: dict[NodeId, tuple[NodeId, ...]] = {}
    is_call = {n.id: n.kind is NodeKind.LLM for n in workflow.nodes}
    for node in workflow.nodes:
        through = [(need,) if is_call[need] else nearest[need] for need in node.needs]
        nearest[node.id] = tuple(dict.fromkeys(id for ids in through for id in ids))
    return {id: before for id, before in nearest.items() if is_call[id]}


@dataclass(slots=True)
class _Seen:
    """Arrivals of one kind, decayed over time; `pool` is where the last one went."""

    pool: PoolName
    count: float = 0.0
    work_s: float = 0.0


class CallBook:
    """Learns from arrivals how many calls follow each call of a task, and their work.

    Rare conditions, loops and fan-outs are thus announced with the frequency observed.
    """

    def __init__(self) -> None:
        self._seen: dict[CallKind, _Seen] = {}
        self._now_s = -inf

    def learn(self, now_s: float, demands: Mapping[PoolName, PoolDemand]) -> None:
        kept = 0.5 ** ((now_s - self._now_s) / HALF_LIFE_S)
        self._now_s = now_s
        for seen in self._seen.values():
            seen.count *= kept
            seen.work_s *= kept
        for pool, demand in demands.items():
            for kind, arrivals in demand.arrived.items():
                seen = self._seen.setdefault(kind, _Seen(pool))
                seen.pool = pool
                seen.count += arrivals.count
                seen.work_s += arrivals.work_s

    def follow_ups(self, tasks: Mapping[TaskName, CallsBefore]) -> dict[CallKind, FollowUps]:
        """Expected calls after a call of each kind of `tasks`; nothing until a few calls were seen.

        Each call announces the calls right after it, n(later)/n(this) of them on average, and what
        these announce in turn. A call that waits for several is shared among them. The later rounds
        of a loop are announced with its first.
        """
        table: dict[CallKind, FollowUps] = {}
        for task, calls in tasks.items():
            after: dict[NodeId, dict[PoolName, float]] = {id: {} for id in calls}
            for id in reversed(calls):
                for need in calls[id]:
                    self._announce(task, need, after[need], id, after[id], 1 / len(calls[id]))
            first = sum(not before for before in calls.values())
            for id, before in calls.items():
                share = 1.0 if before else 1 / first
                table[CallKind(task, id)] = FollowUps(after[id], not before, share)
        return table

    def _announce(
        self,
        task: TaskName,
        need: NodeId,
        after_need: dict[PoolName, float],
        id: NodeId,
        after: Mapping[PoolName, float],
        share: float,
    ) -> None:
        """Add to `after_need` what a call of `need` announces through the later call `id`."""
        earlier, later = self._seen.get(CallKind(task, need)), self._seen.get(CallKind(task, id))
        if earlier is None or later is None or earlier.count < LEAST_CALLS or later.count <= 0:
            return
        calls = share * later.count / earlier.count
        implied = {**after, later.pool: after.get(later.pool, 0.0) + later.work_s / later.count}
        for pool, work_s in implied.items():
            after_need[pool] = after_need.get(pool, 0.0) + calls * work_s
