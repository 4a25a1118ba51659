"""Data of the status page and `cato top` at one instant."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from cato.core.ids import PoolName
from cato.core.orchestrator import PoolPicture
from cato.core.residency import Resident
from cato.core.slots import FAILING, SharedPoolPicture, SlotPicture
from cato.core.snapshot import ReplicaSnapshot
from cato.telemetry.decisions import LEFT, LOAD, LOST, Decided, PoolDecisions, slack_now
from cato.telemetry.recent import Lately, RecentOverview, RunLine, TaskHistory, TenantLine
from cato.telemetry.recent_sessions import RecentSessions

SHOWN_DECISIONS = 60
# How long a lost replica stays in the list.
GONE_SHOWN_S = 300.0

# Status of a replica in lists: one of these, or the state of its engine.
READY, NOT_READY, GONE = "ready", "not ready", "gone"


@dataclass(frozen=True, slots=True)
class ReplicaOverview:
    """One replica. `held` of its `slots` batch slots are taken; `standby` more calls may queue
    in front of its engine.

    `wait_s` is the expected queueing delay of a new call. `note`: why it is gone, or how its last
    engine was lost. `sessions` have their home there, with contexts of `working_set_tokens`. Its KV
    cache holds `kv_tokens`, host memory another `host_tokens`.
    """

    id: str
    deployment: str
    state: str
    model: str = ""
    accelerator: str = ""
    cards: int = 0
    held: int = 0
    slots: int = 0
    standby: int = 0
    prefilling: int = 0
    wait_s: float = 0.0
    restarts: int = 0
    note: str = ""
    sessions: int = 0
    working_set_tokens: int = 0
    kv_tokens: int = 0
    host_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolOverview:
    """One pool now. Slacks cover the dispatches of the last minute; None without any."""

    name: PoolName
    queued: int
    dispatched: int
    refused: int
    slack_median_s: float | None
    slack_least_s: float | None
    replicas: tuple[ReplicaOverview, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentOverview:
    """A deployment's actual and target numbers of replicas, and the reason."""

    name: str
    pool: str
    min: int
    max: int
    wanted: int
    running: int
    starting: int
    policy: str
    reason: str
    problem: str


@dataclass(frozen=True, slots=True)
class FleetState:
    """The answers of the control actors; `missing` names those that did not answer. `warnings` tell
    what is wrong with the latest deployment file or `user_config`; tenants see only the first line
    of each."""

    decisions: Mapping[PoolName, PoolDecisions] = field(default_factory=dict)
    residents: tuple[Resident, ...] = ()
    deployments: tuple[DeploymentOverview, ...] = ()
    shared_pools: tuple[SharedPoolPicture, ...] = ()
    missing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Overview:
    """`missing` names the parts of the control plane that did not answer. `problem` says what is
    wrong with the workflow files; the last good ones stay in use. `warnings` are those of the
    fleet, and name SLAs that are tighter than the measured baselines of their tasks.
    """

    now_s: float
    pools: tuple[PoolOverview, ...]
    deployments: tuple[DeploymentOverview, ...]
    tasks: tuple[TaskHistory, ...]
    runs: tuple[RunLine, ...]
    decisions: tuple[Decided, ...]
    missing: tuple[str, ...] = ()
    problem: str = ""
    sessions: RecentSessions = field(default_factory=RecentSessions)
    warnings: tuple[str, ...] = ()
    lately: Lately = field(default_factory=Lately)
    tenants: tuple[TenantLine, ...] = ()


def overview(
    pictures: Iterable[PoolPicture],
    fleet: FleetState,
    recent: RecentOverview,
    *,
    tenant: str | None,
    now_s: float | None = None,
) -> Overview:
    """Combine what `tenant` may see (None: everything) at `now_s`, seconds since the epoch.

    All tenants see the fleet; runs, and decisions about them, only their own.
    """
    now_s = time.time() if now_s is None else now_s
    decisions = fleet.decisions
    by_replica: dict[str, Resident] = {r.replica_id: r for r in fleet.residents}
    seen = [
        d
        for pool in decisions.values()
        for d in pool.newest
        if d.kind in (LOST, LEFT, LOAD) or tenant in (None, d.tenant)
    ]
    return Overview(
        now_s,
        (
            *(
                _pool(p, decisions.get(p.name, PoolDecisions()).newest, by_replica, now_s)
                for p in sorted(pictures, key=attrgetter("name"))
            ),
            *(
                _shared_pool(p, decisions.get(p.name, PoolDecisions()).newest, by_replica, now_s)
                for p in fleet.shared_pools
            ),
        ),
        fleet.deployments,
        recent.tasks,
        recent.runs,
        tuple(sorted(seen, key=attrgetter("at_s"), reverse=True)[:SHOWN_DECISIONS]),
        fleet.missing,
        warnings=tuple(w if tenant is None else w.partition("\n")[0] for w in fleet.warnings),
        sessions=recent.sessions,
        lately=recent.lately,
        tenants=recent.tenants,
    )


def _pool(
    picture: PoolPicture,
    decided: tuple[Decided, ...],
    residents: Mapping[str, Resident],
    now_s: float,
) -> PoolOverview:
    replicas = [_replica(r, residents.get(r.id)) for r in picture.replicas]
    known = {r.id for r in picture.replicas}
    latest = {d.replica: d for d in decided if d.kind in (LOST, LEFT)}
    gone = [
        ReplicaOverview(d.replica, "", GONE, note=d.reason)
        for d in latest.values()
        if d.kind == LOST and d.replica not in known and now_s - d.at_s <= GONE_SHOWN_S
    ]
    median_s, least_s = slack_now(decided, now_s) or (None, None)
    return PoolOverview(
        picture.name,
        picture.queued,
        picture.dispatched,
        picture.refused,
        median_s,
        least_s,
        (*replicas, *gone),
    )


def _replica(replica: ReplicaSnapshot, resident: Resident | None) -> ReplicaOverview:
    found = ReplicaOverview(
        replica.id,
        replica.deployment,
        READY if replica.accepting else NOT_READY,
        held=replica.held,
        slots=replica.max_running,
        standby=replica.standby,
        prefilling=replica.prefilling,
        wait_s=replica.wait_s,
        sessions=replica.sessions,
        working_set_tokens=replica.working_set_tokens,
        kv_tokens=replica.profile.kv_capacity_tokens,
        host_tokens=replica.host_tokens,
    )
    if resident is None:
        return found
    return replace(
        found,
        state=READY if replica.accepting else resident.state,
        model=resident.model,
        accelerator=resident.accelerator,
        cards=resident.cards,
        restarts=resident.restarts,
        note=resident.lost,
    )


def _shared_pool(
    picture: SharedPoolPicture,
    decided: tuple[Decided, ...],
    residents: Mapping[str, Resident],
    now_s: float,
) -> PoolOverview:
    """The pool's replicas are slots, each with the model that it holds now."""
    counts = picture.counts
    hits = ""
    if counts.served:
        hits = f"{100 * counts.hits / counts.served:.0f} % found their model loaded; "
    slots = tuple(_slot(s, residents.get(s.slot)) for s in picture.slots)
    note = f"{hits}{counts.loads} loads, {counts.evictions} evictions, {counts.failures} failures"
    median_s, least_s = slack_now(decided, now_s) or (None, None)
    return PoolOverview(
        picture.name, picture.queued, counts.served, counts.refused, median_s, least_s, slots, note
    )


def _slot(slot: SlotPicture, resident: Resident | None) -> ReplicaOverview:
    found = ReplicaOverview(
        slot.slot,
        slot.deployment,
        slot.state.value,
        slot.model or "",
        held=slot.running,
        note=FAILING if slot.is_failing else "",
    )
    if resident is None:  # the slot is empty
        return found
    return replace(
        found,
        accelerator=resident.accelerator,
        cards=resident.cards,
    )
