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

from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.errors import (
    CapacityError,
    EngineDeadError,
    ReplicaLostError,
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
)
from cato.core.ids import DeploymentName, InvocationId, NodeId, PoolName, ReplicaId, TaskName
from cato.core.length import LengthBelief
from cato.core.orchestrator import PoolOrchestrator
from cato.core.profile import Profile
from cato.core.receipt import NodeReceipt, SlaReceipt
from cato.core.runs import NodeEstimate
from cato.core.snapshot import Invocation
from cato.core.tenancy import Usage
from cato.core.topology import EngineSpec, ModelSpec, PoolPolicies
from cato.engines.base import PREEMPTED, EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.estimators.dag_match import StageShare
from cato.policies.registry import policies_of
from cato.serve.pools import PoolInfo
from cato.telemetry.metrics import RunMetrics, render_pools

# Tokens of a stream between two reports of progress.
PROGRESS_TOKENS = 5


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
    ) -> None:
        self.name = PoolName(f"{model.name}-pool")
        self.model = model
        self.profile = profile
        spec = EngineSpec(kind="simulated", max_num_seqs=slots, seed=seed)
        self.engines = {
            ReplicaId(f"{model.name}#{i}"): SimulatedEngine(profile, spec, model.name)
            for i in range(replicas)
        }
        self._slots = slots
        self._orchestrator = PoolOrchestrator(
            self.name, policies_of(policies or PoolPolicies(), profile)
        )
        self._leases: dict[InvocationId, asyncio.Future[Dispatch]] = {}
        self._tokens: dict[InvocationId, int] = {}
        self._taken_back: dict[InvocationId, int] = {}
        self._ready: set[ReplicaId] = set()

    @property
    def orchestrator(self) -> PoolOrchestrator:
        return self._orchestrator

    @property
    def info(self) -> PoolInfo:
        return PoolInfo(self.name, self.model, self.profile, True, len(self._ready))

    async def running(self) -> int:
        """Requests that the engines hold, running or waiting."""
        loads = [await self.engines[id].load() for id in self._ready]
        return sum(load.running + load.waiting for load in loads)

    async def start(self) -> None:
        for id, engine in self.engines.items():
            await engine.start()
            self._ready.add(id)
            self._handle(
                ReplicaReported(
                    now_s=time.monotonic(),
                    replica_id=id,
                    deployment=DeploymentName(f"{self.model.name}-local"),
                    profile=self.profile,
                    max_running=self._slots,
                    standby=0,
                    accepting=True,
                    held=(),
                )
            )

    async def stop(self) -> None:
        for engine in self.engines.values():
            await engine.stop()

    async def kill(self, id: ReplicaId) -> None:
        """Let a replica die with its engine."""
        self._lose(id, "killed")
        await self.engines[id].kill()

    async def lease(self, invocation: Invocation) -> Dispatch:
        now_s = time.monotonic()
        lease: asyncio.Future[Dispatch] = asyncio.get_running_loop().create_future()
        self._leases[invocation.id] = lease
        offered = replace(
            invocation,
            arrived_at_s=now_s + invocation.arrived_at_s,
            deadline_s=now_s + invocation.deadline_s,
        )
        try:
            self._handle(InvocationOffered(now_s, offered))
            return await lease
        except asyncio.CancelledError:
            self.withdraw(invocation.id, "the run was cancelled")
            raise
        finally:
            self._leases.pop(invocation.id, None)

    def withdraw(self, id: InvocationId, reason: str) -> None:
        self._handle(InvocationWithdrawn(time.monotonic(), id, reason))

    async def stream(
        self, lease: Dispatch, request: EngineRequest
    ) -> AsyncGenerator[EngineChunk, None]:
        id, tokens, told, outcome = lease.invocation_id, 0, 0, "cancelled"
        try:
            if lease.replica_id not in self._ready:
                raise ReplicaLostError(lease.replica_id, "it is gone")
            engine = self.engines[lease.replica_id]
            async with contextlib.aclosing(engine.generate(request)) as chunks:
                async for chunk in chunks:
                    if tokens == 0 and chunk.output_tokens > 0:
                        self._handle(FirstTokenSent(time.monotonic(), id))
                    tokens = self._tokens[id] = chunk.output_tokens
                    if tokens - told >= PROGRESS_TOKENS:
                        told = tokens
                        self._report_progress(lease.replica_id)
                    if self._taken_back.get(id) == lease.attempt and chunk.finish_reason is None:
                        outcome = PREEMPTED
                        yield replace(chunk, finish_reason=PREEMPTED)
                        return
                    yield chunk
            outcome = "done"
        except EngineDeadError as error:
            outcome = "failed"
            self._lose(lease.replica_id, str(error))
            raise
        finally:
            self._tokens.pop(id, None)
            if outcome != PREEMPTED:
                self._taken_back.pop(id, None)
                ended = InvocationEnded(time.monotonic(), id, lease.attempt, tokens, outcome)
                self._handle(ended)

    def _report_progress(self, replica: ReplicaId) -> None:
        """The orchestrator picks out those that run there."""
        self._handle(ReplicaProgressed(time.monotonic(), replica, tuple(self._tokens.items())))

    def _lose(self, id: ReplicaId, reason: str) -> None:
        self._ready.discard(id)
        self._handle(ReplicaLost(time.monotonic(), id, reason))

    def _handle(self, event: Event) -> None:
        for command in self._orchestrator.handle(event):
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
        for pool in self._pools.values():
            if model == pool.model.name or model in pool.model.aliases:
                return pool.info
        known = (name for p in self._pools.values() for name in (p.model.name, *p.model.aliases))
        raise UnknownNameError("model", model, tuple(known))

    async def lease(self, pool: PoolName, invocation: Invocation) -> Dispatch:
        return await self._pools[pool].lease(invocation)

    def stream(
        self, pool: PoolName, lease: Dispatch, request: EngineRequest
    ) -> AsyncGenerator[EngineChunk, None]:
        return self._pools[pool].stream(lease, request)

    def withdraw(self, pool: PoolName, invocation_id: InvocationId, reason: str) -> None:
        self._pools[pool].withdraw(invocation_id, reason)

    def metrics(self) -> bytes:
        now_s = time.monotonic()
        return render_pools([p.orchestrator.picture(now_s) for p in self._pools.values()])


class LocalRecords:
    """Receipts and metrics in memory; learns nothing. All outputs are believed to be `belief`."""

    def __init__(self, pools: LocalPools | None = None, belief: LengthBelief | None = None) -> None:
        self._belief = belief
        self.receipts: OrderedDict[str, SlaReceipt] = OrderedDict()
        self._pools = pools
        self._metrics = RunMetrics()
        self._usage: dict[tuple[str, ...], Usage] = {}

    def record(self, receipt: SlaReceipt, usage: Sequence[Usage] = ()) -> None:
        self.receipts[receipt.request_id] = receipt
        self._metrics.record(receipt)
        for used in usage:
            known = self._usage.get(used.name)
            self._usage[used.name] = used if known is None else known.plus(used)

    def estimates(self, task: TaskName) -> Mapping[NodeId, NodeEstimate]:
        return {}

    def length(
        self, task: TaskName, node: NodeId, model: str, prompt_tokens: int, max_tokens: int
    ) -> LengthBelief | None:
        return self._belief

    def stage_share(self, task: TaskName, executions: Iterable[NodeReceipt]) -> StageShare | None:
        return None

    async def receipt(self, request_id: str) -> Mapping[str, object] | None:
        receipt = self.receipts.get(request_id)
        return None if receipt is None else receipt.as_dict()

    async def usage(self, tenant: str | None) -> Sequence[Usage]:
        return [u for _, u in sorted(self._usage.items()) if tenant in (None, u.tenant)]

    async def metrics(self) -> bytes:
        pools = self._pools.metrics() if self._pools is not None else b""
        return self._metrics.render() + pools
