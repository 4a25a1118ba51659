"""Whole pools in one process, without Ray: real orchestrators and simulated engines.

For tests of all that stands above the pools. Nothing is pretended but the network: leases come
from `PoolOrchestrator`, tokens from `SimulatedEngine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from cato.core.administration import AuditEntry, Change
from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.errors import (
    CapacityError,
    EngineDeadError,
    ReplicaLostError,
    StartingError,
    SupersededError,
    UnknownNameError,
)
from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReported,
    Ticked,
)
from cato.core.ids import DeploymentName, InvocationId, NodeId, PoolName, ReplicaId, TaskName
from cato.core.length import LengthBelief
from cato.core.orchestrator import PoolOrchestrator
from cato.core.profile import Profile
from cato.core.receipt import NodeReceipt, SlaReceipt
from cato.core.rollout import Rollout
from cato.core.rollout_book import RolloutBook, RolloutOrder, action_of
from cato.core.runs import NodeEstimate
from cato.core.snapshot import Invocation
from cato.core.tenancy import (
    LAST_DAY,
    Access,
    ApiKey,
    CardTime,
    Tenant,
    TurnUsage,
    Usage,
    turn_usage,
)
from cato.core.topology import EngineSpec, ModelSpec, PoolPolicies
from cato.engines.base import PREEMPTED, Engine, EngineChunk, EngineRequest, EngineState
from cato.engines.simulated import SimulatedEngine
from cato.estimators.dag_match import StageShare
from cato.policies.registry import policies_of
from cato.serve.access.control import AccessControl
from cato.serve.pools import PoolInfo, pool_named
from cato.store.errors import StoreUnavailableError
from cato.store.store import MetadataStore
from cato.telemetry.decisions import DecisionBook
from cato.telemetry.metrics import RunMetrics, render_fleet
from cato.telemetry.overview import FleetState, Overview, overview
from cato.telemetry.recent import RecentRuns

# Tokens of a stream between two reports of progress.
PROGRESS_TOKENS = 5
# The newest are kept: drills go on for hours.
MAX_RECEIPTS = 1_000


class LocalPool:
    """One pool: `replicas` simulated engines that keep the timings of `profile`."""

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
        spec = EngineSpec(kind="simulated", max_num_seqs=slots, seed=seed)
        self.engines: dict[ReplicaId, Engine] = {
            ReplicaId(f"{model.name}#{i}"): SimulatedEngine(profile, spec, model.name)
            for i in range(replicas)
        }
        self._slots = slots
        self._caches_prefixes = prefix_caching
        self._orchestrator = PoolOrchestrator(
            self.name, policies_of(policies or PoolPolicies(), profile)
        )
        self.decisions = DecisionBook(self.name)
        self._leases: dict[InvocationId, asyncio.Future[Dispatch]] = {}
        self._tokens: dict[InvocationId, int] = {}
        self._taken_back: dict[InvocationId, int] = {}
        self._ready: set[ReplicaId] = set()
        self._policies = policies or PoolPolicies()
        self._held: dict[ReplicaId, set[InvocationId]] = {id: set() for id in self.engines}
        self._offered: dict[InvocationId, Invocation] = {}
        self._stands_still: dict[ReplicaId, asyncio.Event] = {}

    @property
    def orchestrator(self) -> PoolOrchestrator:
        return self._orchestrator

    @property
    def info(self) -> PoolInfo:
        queued = self._orchestrator.picture(time.monotonic()).queued_per_place
        simulated = any(engine.facts.simulated for engine in self.engines.values())
        return PoolInfo(self.name, self.model, self.profile, simulated, len(self._ready), queued)

    async def running(self) -> int:
        """Requests that the engines hold, running or waiting."""
        loads = [await self.engines[id].load() for id in self._ready]
        return sum(load.running + load.waiting for load in loads)

    def add(self, engine: Engine) -> ReplicaId:
        """One more replica before the start, with an engine of any kind."""
        id = ReplicaId(f"{self.model.name}#{len(self.engines)}")
        self.engines[id], self._held[id] = engine, set()
        return id

    async def start(self) -> None:
        for id in self.engines:
            await self.revive(id)

    async def revive(self, id: ReplicaId) -> None:
        """Start the engine of a replica, and let the router know of it."""
        await self.engines[id].start()
        self._ready.add(id)
        self._report(id)

    async def revive_after(self, id: ReplicaId, down_s: float) -> None:
        await asyncio.sleep(down_s)
        await self.revive(id)

    @property
    def ready(self) -> Sequence[ReplicaId]:
        """Replicas whose engines answer."""
        return [id for id in sorted(self._ready) if self.engines[id].state is EngineState.READY]

    def beat(self) -> None:
        """What the replicas of a cluster report, and its router checks, twice a second."""
        for id in self._ready - self._stands_still.keys():
            self._report(id)
        self._handle(Ticked(time.monotonic()))

    def _report(self, id: ReplicaId) -> None:
        is_ready, facts = self.engines[id].state is EngineState.READY, self.engines[id].facts
        capacity_tokens = facts.kv_capacity_tokens or self.profile.kv_capacity_tokens
        self._handle(
            ReplicaReported(
                now_s=time.monotonic(),
                replica_id=id,
                deployment=DeploymentName(f"{self.model.name}-local"),
                profile=replace(self.profile, kv_capacity_tokens=capacity_tokens),
                max_running=self._slots,
                standby=0,
                accepting=is_ready,
                held=tuple(self._held[id]),
                prefix_caching=is_ready and self._caches_prefixes,
            )
        )

    async def stop(self) -> None:
        for engine in self.engines.values():
            await engine.stop()

    async def kill(self, id: ReplicaId) -> None:
        """Let a replica die with its engine."""
        self._lose(id, "killed")
        await self._simulated(id).kill()

    async def crash(self, id: ReplicaId) -> None:
        """Let the engine of a replica die; the replica says so at once."""
        await self._simulated(id).kill()
        self._report(id)

    def _simulated(self, id: ReplicaId) -> SimulatedEngine:
        engine = self.engines[id]
        assert isinstance(engine, SimulatedEngine), f"the engine of {id} is a real one"
        return engine

    async def pause(self, id: ReplicaId, pause_s: float) -> None:
        """Let a replica stand still: it sends no tokens and no reports."""
        goes_on = self._stands_still[id] = asyncio.Event()
        try:
            await asyncio.sleep(pause_s)
        finally:
            del self._stands_still[id]
            goes_on.set()

    def restart_router(self) -> None:
        """A router that knows nothing: replicas report to it, and what waits is offered again."""
        self._orchestrator = PoolOrchestrator(self.name, policies_of(self._policies, self.profile))
        self._taken_back.clear()
        for id in self._ready - self._stands_still.keys():
            self._report(id)
        for invocation in list(self._offered.values()):
            self._handle(InvocationOffered(time.monotonic(), invocation))

    def vanish(self, id: ReplicaId) -> None:
        """Let a replica be gone before its router hears of it."""
        self._ready.discard(id)

    async def lease(self, invocation: Invocation) -> Dispatch:
        now_s = time.monotonic()
        lease: asyncio.Future[Dispatch] = asyncio.get_running_loop().create_future()
        self._leases[invocation.id] = lease
        offered = invocation.on_clock(now_s)
        self._offered[invocation.id] = offered
        try:
            self._handle(InvocationOffered(now_s, offered))
            return await lease
        except asyncio.CancelledError:
            why = "the run was cancelled"
            self._handle(
                InvocationWithdrawn(time.monotonic(), invocation.id, invocation.attempt, why)
            )
            raise
        finally:
            self._leases.pop(invocation.id, None)
            self._offered.pop(invocation.id, None)

    async def stream(
        self, lease: Dispatch, request: EngineRequest
    ) -> AsyncGenerator[EngineChunk, None]:
        id, tokens, told, outcome = lease.invocation_id, 0, 0, "cancelled"
        counts: tuple[int, ...] = ()
        engine, held = self.engines[lease.replica_id], self._held[lease.replica_id]
        held.add(id)
        if not request.stream:
            # A whole answer shows no first token: as in a replica, it is expected after a while.
            delay_s = self.profile.first_token_s(0, len(held))
            asyncio.get_running_loop().call_later(delay_s, self._note_expected, held, id)
        try:
            if lease.replica_id not in self._ready or engine.state is not EngineState.READY:
                raise ReplicaLostError(lease.replica_id, "it is gone", was_reached=False)
            async with contextlib.aclosing(engine.generate(request)) as chunks:
                async for chunk in chunks:
                    if (goes_on := self._stands_still.get(lease.replica_id)) is not None:
                        await goes_on.wait()
                    if tokens == 0 and chunk.output_tokens > 0:
                        self._handle(FirstTokenSent(time.monotonic(), id))
                    tokens = self._tokens[id] = chunk.output_tokens
                    if chunk.cached_tokens >= 0 and chunk.prompt_tokens > 0:
                        counts = chunk.cached_tokens, chunk.prompt_tokens
                    if tokens - told >= PROGRESS_TOKENS:
                        told = tokens
                        self._report_progress(lease.replica_id)
                    if self._taken_back.get(id) == lease.attempt and chunk.finish_reason is None:
                        outcome = PREEMPTED
                        yield replace(chunk, finish_reason=PREEMPTED)
                        return
                    yield chunk
            outcome = "done"
        except (EngineDeadError, ReplicaLostError) as error:
            outcome = "failed"
            if engine.state is EngineState.READY and lease.replica_id in self._ready:
                self._handle(ReplicaLost(time.monotonic(), lease.replica_id, str(error)))
            else:
                self._lose(lease.replica_id, str(error))
            raise
        finally:
            held.discard(id)
            self._tokens.pop(id, None)
            if outcome != PREEMPTED:
                self._taken_back.pop(id, None)
                now_s = time.monotonic()
                self._handle(InvocationEnded(now_s, id, lease.attempt, tokens, outcome, *counts))

    def _note_expected(self, held: set[InvocationId], id: InvocationId) -> None:
        if id in held:
            self._handle(FirstTokenSent(time.monotonic(), id))

    def _report_progress(self, replica: ReplicaId) -> None:
        """The orchestrator picks out those that run there."""
        self._handle(ReplicaProgressed(time.monotonic(), replica, tuple(self._tokens.items())))

    def _lose(self, id: ReplicaId, reason: str) -> None:
        self._ready.discard(id)
        self._handle(ReplicaLost(time.monotonic(), id, reason))

    def _handle(self, event: Event) -> None:
        commands = self._orchestrator.handle(event)
        self.decisions.note(time.time(), event, commands, self._orchestrator)
        for command in commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        if isinstance(command, Preempt):
            self._taken_back[command.invocation_id] = command.attempt
            return
        lease = self._leases.get(command.invocation_id)
        if lease is None or lease.done():
            return
        match command:
            case Dispatch():
                lease.set_result(command)
            case Refuse(reason=reason, superseded=True):
                lease.set_exception(SupersededError(reason))
            case Refuse(reason=reason, retry_after_s=retry_after_s):
                lease.set_exception(CapacityError(self.name, reason, retry_after_s))


class LocalPools:
    """Several pools, as the executor reaches them. Use it as an async context manager."""

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
    """Receipts and metrics in memory; learns nothing. All outputs are believed to be `belief`.

    Keys and tenants are administered in `store`, and `access` is told.
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
        # Baselines by task: what a Profiler would have measured.
        self.measured: dict[TaskName, Mapping[NodeId, NodeEstimate]] = {}

    def record(self, receipt: SlaReceipt, usage: Sequence[Usage] = ()) -> None:
        self.book.record(receipt)
        if receipt.is_shadow:
            return
        self.receipts[receipt.tenant, receipt.request_id] = receipt
        if len(self.receipts) > MAX_RECEIPTS:
            self.receipts.popitem(last=False)
        self._metrics.record(receipt)
        self._recent.record(receipt, time.time())
        for used in usage:
            known = self._usage.get(used.name)
            self._usage[used.name] = used if known is None else known.plus(used)

    def estimates(self, task: TaskName) -> Mapping[NodeId, NodeEstimate]:
        return self.measured.get(task, {})

    def length(
        self, task: TaskName, node: NodeId, model: str, prompt_tokens: int, max_tokens: int
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
        return self._kept().access(datetime.now(UTC).strftime("%Y-%m"))

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
        if self._store is not None:
            self._store.log_rollout(by, action_of(order), before, rollout)
        return rollout

    async def overview(self, tenant: str | None) -> Overview:
        assert self._pools is not None, "an overview is of pools"
        return self._pools.overview(self._recent, tenant)

    async def metrics(self) -> bytes:
        pools = self._pools.metrics() if self._pools is not None else b""
        return self._metrics.render() + pools
