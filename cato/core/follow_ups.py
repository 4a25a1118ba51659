"""Calls that follow other calls in a run, and the load that they announce to other pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from cato.core.demand import CallKind, PoolDemand
from cato.core.ids import NodeId, PoolName, TaskName
from cato.core.scaling import Arrivals, PoolLoad
from cato.core.workflow import NodeKind, Workflow

# Half-life of what earlier calls taught.
HALF_LIFE_S = 3600.0
# Calls of a kind needed before they announce others.
LEAST_CALLS = 5.0


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
