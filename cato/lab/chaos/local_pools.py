"""Whole pools in one process, without Ray: real orchestrators and simulated engines.

For tests of the layers above the pools. Only the network is faked: leases come from
`PoolOrchestrator`, tokens from `SimulatedEngine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cato.control.leases import Leases
from cato.control.messages import Generate, Left, Stop, Told
from cato.core.administration import AuditEntry, Change
from cato.core.commands import Dispatch, Preempt
from cato.core.errors import EngineDeadError, ReplicaLostError, StartingError, UnknownNameError
from cato.core.estimates import ByModel
from cato.core.events import Event, InvocationOffered, ReplicaLost, StreamLost, Ticked
from cato.core.ids import DeploymentName, InvocationId, NodeId, PoolName, ReplicaId, TaskName
from cato.core.length import LengthBelief
from cato.core.orchestrator import PoolOrchestrator
from cato.core.profile import Profile
from cato.core.receipt import NodeReceipt, SlaReceipt
from cato.core.rollout import Rollout
from cato.core.rollout_book import RolloutBook, RolloutOrder, action_of
from cato.core.slots import SlotReport
from cato.core.snapshot import Invocation
from cato.core.tenancy import (
    LAST_DAY,
    Access,
    ApiKey,
    CardTime,
    Tenant,
    TurnUsage,
    Usage,
    add_usage,
    turn_usage,
)
from cato.core.topology import DeploymentSpec, EngineSpec, ModelSpec, PoolPolicies
from cato.engines.base import Engine, EngineChunk, EngineRequest, EngineState
from cato.engines.simulated import SimulatedEngine
from cato.estimators.dag_match import StageShare
from cato.policies.registry import policies_of
from cato.serve.access.control import AccessControl
from cato.serve.own_model import OwnModel
from cato.serve.pools import PoolInfo, pool_named
from cato.serve.replica import Replica, Report
from cato.store.errors import StoreUnavailableError
from cato.store.keys import month_of
from cato.store.store import MetadataStore
from cato.telemetry.decisions import DecisionBook
from cato.telemetry.metrics import render_fleet
from cato.telemetry.overview import FleetState, Overview, overview
from cato.telemetry.recent import RecentRuns
from cato.telemetry.run_metrics import RunMetrics

# Only the newest are kept: drills run for hours.
MAX_RECEIPTS = 1_000


class LocalReplica:
    """A replica with its engine, whose process may be dead or paused."""

    def __init__(
        self,
        id: ReplicaId,
        model: ModelSpec,
        spec: DeploymentSpec,
        profile: Profile,
        engine: Engine,
        tell: Callable[[Told | Report], None],
    ) -> None:
        self.id, self.engine, self._tell = id, engine, tell
        self._holding = OwnModel(model, spec, profile, self._started)
        self.replica = Replica(id, self._holding, self._told)
        self.is_there = False
        self._kept: list[Told | Report] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def _started(self) -> Engine:
        await self.engine.start()
        return self.engine

    async def revive(self) -> None:
        """Start the engine and tell the router."""
        await self._holding.start()
        self.is_there = True
        self.replica.report()

    @property
    def answers(self) -> bool:
        return self.is_there and self.engine.state is EngineState.READY

    async def stand_still(self, pause_s: float) -> None:
        """Send no tokens and no reports for that time."""
        self.goes_on.clear()
        try:
            await asyncio.sleep(pause_s)
        finally:
            self.goes_on.set()
            kept, self._kept = self._kept, []
            for told in kept:
                self._told(told)

    def _told(self, told: Told | Report) -> None:
        if not self.goes_on.is_set():
            self._kept.append(told)
        elif self.is_there:
            self._tell(told)


class LocalPool:
    """One pool of `replicas` simulated engines with the timings of `profile`."""

    def __init__(
        self,
        model: ModelSpec,
        profile: Profile,
        *,
        replicas: int = 1,
        slots: int = 8,
        policies: PoolPolicies | None = None,
        seed: int = 0,
        prefix_caching: bool = False,
    ) -> None:
        self.name = PoolName(f"{model.name}-pool")
        self.model = model
        self.profile = profile
        self.seed = seed
        engine = EngineSpec(kind="simulated", max_num_seqs=slots, seed=seed)
        told = replace(engine, prefix_caching=prefix_caching)
        self._spec = DeploymentSpec(DeploymentName(f"{model.name}-local"), "cpu", told, standby=0)
        self.replicas: dict[ReplicaId, LocalReplica] = {}
        for _ in range(replicas):
            self.add(SimulatedEngine(profile, engine, model.name))
        self._policies = policies or PoolPolicies()
        self._orchestrator = PoolOrchestrator(self.name, policies_of(self._policies, profile))
        self.decisions = DecisionBook(self.name)
        self._leases = Leases(self.name, self._handle)
        self._offered: dict[InvocationId, Invocation] = {}

    @property
    def orchestrator(self) -> PoolOrchestrator:
        return self._orchestrator

    @property
    def info(self) -> PoolInfo:
        queued = self._orchestrator.picture(time.monotonic()).queued_per_place
        replicas = self.replicas.values()
        simulated = any(r.engine.facts.simulated for r in replicas)
        ready = sum(r.is_there for r in replicas)
        return PoolInfo(self.name, self.model, self.profile, simulated, ready, queued)

    async def running(self) -> int:
        """Number of requests in the engines, running or waiting."""
        loads = [await r.engine.load() for r in self.replicas.values() if r.is_there]
        return sum(load.running + load.waiting for load in loads)

    def add(self, engine: Engine) -> ReplicaId:
        """Add a replica before the start, with any kind of engine."""
        id = ReplicaId(f"{self.model.name}#{len(self.replicas)}")
        self.replicas[id] = LocalReplica(
            id, self.model, self._spec, self.profile, engine, self._told
        )
        return id

    async def start(self) -> None:
        for replica in self.replicas.values():
            await replica.revive()

    async def revive(self, id: ReplicaId) -> None:
        """See `LocalReplica.revive`."""
        await self.replicas[id].revive()

    async def revive_after(self, id: ReplicaId, down_s: float) -> None:
        await asyncio.sleep(down_s)
        await self.revive(id)

    @property
    def ready(self) -> Sequence[ReplicaId]:
        """Replicas whose engines answer."""
        return [id for id in sorted(self.replicas) if self.replicas[id].answers]

    def beat(self) -> None:
        """Replicas report and the router checks them, as in a cluster, twice a second."""
        self._report_all()
        self._handle(Ticked(time.monotonic()))

    def _report_all(self) -> None:
        for replica in self.replicas.values():
            if replica.is_there and replica.goes_on.is_set():
                replica.replica.report()

    async def stop(self) -> None:
        for replica in self.replicas.values():
            await replica.engine.stop()

    async def kill(self, id: ReplicaId) -> None:
        """Kill a replica with its engine."""
        self._lose(id, "killed")
        await self._simulated(id).kill()

    async def crash(self, id: ReplicaId) -> None:
        """Kill the engine of a replica; the replica reports it at once."""
        await self._simulated(id).kill()
        self.replicas[id].replica.report()

    def _simulated(self, id: ReplicaId) -> SimulatedEngine:
        engine = self.replicas[id].engine
        assert isinstance(engine, SimulatedEngine), f"the engine of {id} is a real one"
        return engine

    async def pause(self, id: ReplicaId, pause_s: float) -> None:
        """Pause a replica: it sends no tokens and no reports."""
        await self.replicas[id].stand_still(pause_s)

    def restart_router(self) -> None:
        """Replace the router: replicas report to it, and waiting calls are offered again."""
        self._orchestrator = PoolOrchestrator(self.name, policies_of(self._policies, self.profile))
        for replica in self.replicas.values():
            if replica.is_there and replica.goes_on.is_set():
                replica.replica.introduce()
        for invocation in list(self._offered.values()):
            self._handle(InvocationOffered(time.monotonic(), invocation))

    def vanish(self, id: ReplicaId) -> None:
        """Remove a replica before its router learns of it."""
        self.replicas[id].is_there = False

    async def lease(self, invocation: Invocation) -> Dispatch:
        self._offered[invocation.id] = invocation.on_clock(time.monotonic())
        try:
            return await self._leases.offer(invocation)
        finally:
            self._offered.pop(invocation.id, None)

    async def stream(
        self, lease: Dispatch, request: EngineRequest
    ) -> AsyncGenerator[EngineChunk, None]:
        replica = self.replicas[lease.replica_id]
        asked = Generate(request, lease.invocation_id, lease.attempt)
        try:
            if not replica.is_there:
                raise ReplicaLostError(lease.replica_id, "it is gone", was_reached=False)
            async with contextlib.aclosing(replica.replica.generate(asked)) as chunks:
                async for chunk in chunks:
                    await replica.goes_on.wait()
                    yield chunk
        except (EngineDeadError, ReplicaLostError) as error:
            if replica.answers:
                id, attempt = lease.invocation_id, lease.attempt
                lost = StreamLost(time.monotonic(), lease.replica_id, id, attempt, str(error))
                self._handle(lost)
            else:
                self._lose(lease.replica_id, str(error))
            raise

    def _lose(self, id: ReplicaId, reason: str) -> None:
        self.replicas[id].is_there = False
        self._handle(ReplicaLost(time.monotonic(), id, reason))

    def _told(self, told: Told | Report) -> None:
        assert not isinstance(told, SlotReport | Left), "the replicas have one model"
        self._handle(replace(told, now_s=time.monotonic()))

    def _handle(self, event: Event) -> None:
        commands = self._orchestrator.handle(event)
        self.decisions.note(time.time(), event, commands, self._orchestrator)
        for command in commands:
            match command:
                case Preempt(id, attempt, replica):
                    self.replicas[replica].replica.note(Stop(id, attempt))
                case _:
                    self._leases.answer(command)


class LocalPools:
    """Several pools with the executor's interface. Use it as an async context manager."""

    def __init__(self, *pools: LocalPool) -> None:
        self._pools = {pool.name: pool for pool in pools}

    async def __aenter__(self) -> LocalPools:
        for pool in self._pools.values():
            await pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for pool in self._pools.values():
            await pool.stop()

    def all(self) -> Sequence[PoolInfo]:
        return [pool.info for pool in self._pools.values()]

    def pool_of(self, model: str) -> PoolInfo:
        pool = pool_named(self.all(), model)
        if pool is not None:
            return pool
        if not self._pools:
            raise StartingError("no pool is known yet")
        known = (name for p in self._pools.values() for name in p.model.names)
        raise UnknownNameError("model", model, tuple(known))

    async def lease(self, pool: PoolName, invocation: Invocation) -> Dispatch:
        return await self._pools[pool].lease(invocation)

    def stream(
        self, pool: PoolName, lease: Dispatch, request: EngineRequest
    ) -> AsyncGenerator[EngineChunk, None]:
        return self._pools[pool].stream(lease, request)

    def overview(self, recent: RecentRuns, tenant: str | None) -> Overview:
        now_s = time.monotonic()
        return overview(
            [p.orchestrator.picture(now_s) for p in self._pools.values()],
            self._fleet_state(),
            recent.overview(tenant, time.time()),
            tenant=tenant,
        )

    def metrics(self) -> bytes:
        now_s = time.monotonic()
        pictures = [p.orchestrator.picture(now_s) for p in self._pools.values()]
        return render_fleet(pictures, self._fleet_state())

    def _fleet_state(self) -> FleetState:
        return FleetState({p.name: p.decisions.all() for p in self._pools.values()})


class LocalRecords:
    """Receipts and metrics in memory; learns nothing. The belief of all outputs is `belief`.

    Keys and tenants are administered in `store`, and `access` is notified.
    """

    def __init__(
        self,
        pools: LocalPools | None = None,
        belief: LengthBelief | None = None,
        *,
        store: MetadataStore | None = None,
        access: AccessControl | None = None,
    ) -> None:
        self._belief = belief
        self._store = store
        self._access = access
        self.card_times: list[CardTime] = []
        self.receipts: OrderedDict[tuple[str, str], SlaReceipt] = OrderedDict()
        self._pools = pools
        self._metrics = RunMetrics()
        self._recent = RecentRuns()
        self._usage: dict[tuple[str, ...], Usage] = {}
        self.book = RolloutBook()
        # Baselines by task, as a Profiler would have measured them.
        self.measured: dict[TaskName, ByModel] = {}

    def record(self, receipt: SlaReceipt, usage: Sequence[Usage] = ()) -> None:
        self.book.record(receipt)
        if receipt.is_shadow:
            return
        self.receipts[receipt.tenant, receipt.request_id] = receipt
        if len(self.receipts) > MAX_RECEIPTS:
            self.receipts.popitem(last=False)
        self._metrics.record(receipt)
        self._recent.record(receipt, time.time())
        add_usage(self._usage, usage)

    def estimates(self, task: TaskName) -> ByModel:
        return self.measured.get(task, {})

    def length(
        self,
        task: TaskName,
        node: NodeId,
        model: str,
        features: tuple[float, ...],
        max_tokens: int,
    ) -> LengthBelief | None:
        return self._belief

    def stage_share(self, task: TaskName, executions: Iterable[NodeReceipt]) -> StageShare | None:
        return None

    async def receipt(self, request_id: str, tenant: str | None) -> Mapping[str, object] | None:
        for (whose, id), receipt in reversed(self.receipts.items()):
            if id == request_id and tenant in (None, whose):
                return receipt.as_dict()
        return None

    async def usage(
        self, tenant: str | None, since: str = "", until: str = LAST_DAY
    ) -> Sequence[Usage]:
        found = (u for _, u in sorted(self._usage.items()) if tenant in (None, u.tenant))
        return [u for u in found if since <= u.day <= until]

    async def card_time(self, since: str, until: str) -> Sequence[CardTime]:
        return [c for c in self.card_times if since <= c.day <= until]

    async def access(self) -> Access:
        return self._kept().access(month_of(time.time()))

    async def administer(
        self, change: Change, by: str, within: str | None
    ) -> ApiKey | Tenant | None:
        done = self._kept().administer(change, by, within)
        if self._access is not None:
            self._access.learn(await self.access())
        return done

    async def audit(
        self, tenant: str | None, limit: int, below: int | None
    ) -> Sequence[AuditEntry]:
        return self._kept().audit(tenant, limit, below)

    def _kept(self) -> MetadataStore:
        if self._store is None:
            raise StoreUnavailableError("", "there is none")
        return self._store

    async def turns(self, session: str, tenant: str | None) -> Sequence[TurnUsage]:
        kept = (r for r in self.receipts.values() if r.session == session)
        return [turn_usage(r.as_dict()) for r in kept if tenant in (None, r.tenant)]

    def rollouts(self) -> Mapping[str, Rollout]:
        self.book.judge(time.time())
        return self.book.all

    async def order_rollout(self, order: RolloutOrder, by: str) -> Rollout:
        before = self.book.all.get(order.name)
        rollout = self.book.order(order, time.time())
        if self._store is not None and rollout is not before:
            self._store.log_rollout(by, action_of(order), before, rollout)
        return rollout

    async def overview(self, tenant: str | None) -> Overview:
        assert self._pools is not None, "an overview is of pools"
        return self._pools.overview(self._recent, tenant)

    async def metrics(self) -> bytes:
        pools = self._pools.metrics() if self._pools is not None else b""
        return self._metrics.render() + pools
