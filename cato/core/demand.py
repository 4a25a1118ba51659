"""Demand on each pool, measured from the events of its router.

A `PoolMeter` sits beside a pool's orchestrator and sees the same events. It reports plain values
that may cross a process. A call in one pool announces calls in others: see `cato.core.follow_ups`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from cato.core.ids import DeploymentName, InvocationId, NodeId, ReplicaId, TaskName
from cato.core.orchestrator import PoolPicture
from cato.core.profile import Profile
from cato.core.scaling import Arrivals, Finished, ReplicaLoad
from cato.core.snapshot import Invocation

# A call that neither waits nor runs for this long was lost with its ingress.
FORGET_AFTER_S = 1800.0


class CallKind(NamedTuple):
    """A call of a task, by node."""

    task: TaskName
    node: NodeId


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

    def since(self, untold: PoolDemand) -> PoolDemand:
        """This demand plus the arrivals and ends of an earlier one that nobody has used."""
        arrived = _added((untold.arrived, self.arrived))
        return replace(self, arrived=arrived, finished=untold.finished + self.finished)


def _added(parts: Iterable[Mapping[CallKind, Arrivals]]) -> dict[CallKind, Arrivals]:
    added: dict[CallKind, Arrivals] = {}
    for part in parts:
        for kind, more in part.items():
            added[kind] = added.get(kind, Arrivals()) + more
    return added


def together(shards: Sequence[PoolDemand]) -> PoolDemand:
    """The demand on a whole pool, from the demands on its router shards."""
    if len(shards) == 1:
        return shards[0]
    unfinished: Counter[CallKind] = Counter()
    for shard in shards:
        unfinished.update(shard.unfinished)
    with_replicas = [shard for shard in shards if shard.ready] or shards
    ready = {replica.id: replica for shard in shards for replica in shard.ready}
    return PoolDemand(
        max(shard.now_s for shard in shards),
        _added(shard.arrived for shard in shards),
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
