"""A drill in one process: the real ingress, executor and routers over simulated engines.

Only Ray is left out, so a thousand faults take minutes. Faults that need a cluster (killed
processes, Serve's controller) are drilled on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from cato.core.ids import ModelName, ReplicaId
from cato.core.tenancy import Access
from cato.core.topology import ModelSpec
from cato.lab.chaos import hostile_callers as chaos_hostile
from cato.lab.chaos.clients import Target
from cato.lab.chaos.local_pools import LocalPool, LocalPools, LocalRecords
from cato.lab.chaos.plan import LOAD_S, Fault, Plan
from cato.serve.access.control import AccessControl
from cato.serve.ingress.app import create_app
from cato.serve.loopback import served
from cato.serve.nodes.runner import NodeRunner
from cato.serve.service import TaskService
from cato.workflows.load import load_workflows

MODEL = "sim-drill"
TASK_MODEL = "cato-drill"
# A client of the task sets the length of the answer by its token limit.
WORKFLOW = """
name: drill
description: One answer whose text is known.
sla: {metric: METRIC, target: TARGETs, deadline: 10m}
inputs: {instruction: {type: str}}
nodes:
  answer:
    type: llm
    model: MODEL
    prompt: "{{ instruction }}"
    max_tokens: 4000
    extra: {ignore_eos: true}
stream: answer
output: answer
"""
BEAT_S = 0.5
MAX_BODY_BYTES = 1_000_000
JUMP_S = 3600.0
_POSSIBLE = frozenset(
    {
        Fault.ENGINE_CRASH,
        Fault.FAILED_START,
        Fault.REPLICA_KILL,
        Fault.REPLICA_PAUSE,
        Fault.ROUTER_KILL,
        Fault.CLOCK_JUMP,
    }
)


def write_workflow(plan: Plan, folder: Path) -> None:
    """Write the drill's workflow files to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    metric, target_s = ("ttft", 10.0) if plan.overload is None else ("e2e", plan.overload.slo_s)
    text = WORKFLOW.replace("MODEL", MODEL).replace("METRIC", metric)
    (folder / "drill.yaml").write_text(text.replace("TARGET", str(target_s)))
    if plan.hostile is not None:
        (folder / "inspect.yaml").write_text(chaos_hostile.WORKFLOW)


class LocalStage:
    """See `cato.lab.chaos.drill.Stage`."""

    def __init__(self, pool: LocalPool, url: str) -> None:
        self.target = Target(url, MODEL, TASK_MODEL, pool.seed)
        self.possible = _POSSIBLE
        self._pool = pool
        self._mending: set[asyncio.Task[None]] = set()
        self._broken: set[ReplicaId] = set()
        self._clock = asyncio.Lock()
        self._process = psutil.Process(os.getpid())

    async def victims(self, fault: Fault) -> Sequence[str]:
        return [id for id in self._pool.ready if id not in self._broken]

    async def strike(self, fault: Fault, victim: str, pause_s: float) -> None:
        id = ReplicaId(victim)
        match fault:
            case Fault.ENGINE_CRASH | Fault.FAILED_START:
                await self._pool.crash(id)
                failed = fault is Fault.FAILED_START
                self._mend(id, self._pool.revive_after(id, LOAD_S * (2 if failed else 1)))
            case Fault.REPLICA_KILL:
                await self._pool.kill(id)
                self._mend(id, self._pool.revive_after(id, LOAD_S))
            case Fault.REPLICA_PAUSE:
                self._mend(id, self._pool.pause(id, pause_s))
            case Fault.ROUTER_KILL:
                self._pool.restart_router()
            case Fault.CLOCK_JUMP:
                self._soon(self._jump(pause_s))
            case _:
                raise ValueError(f"{fault} is not possible in one process")

    def _mend(self, id: ReplicaId, mending: Coroutine[Any, Any, None]) -> None:
        self._broken.add(id)
        self._soon(mending).add_done_callback(lambda _: self._broken.discard(id))

    def _soon(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._mending.add(task)
        task.add_done_callback(self._mending.discard)
        return task

    async def _jump(self, for_s: float) -> None:
        """Set the wall clock an hour ahead, then back; jumps do not overlap."""
        async with self._clock:
            right = time.time
            with mock.patch("time.time", lambda: right() + JUMP_S):
                await asyncio.sleep(for_s)

    async def queued(self) -> int:
        return self._pool.orchestrator.picture(0.0).queued

    async def leaks(self) -> Sequence[str]:
        if self._broken:  # a dead engine does not report its requests
            return [f"{id} is not repaired yet" for id in sorted(self._broken)]
        picture = self._pool.orchestrator.picture(0.0)
        held = [f"{r.held} leases of {r.id}" for r in picture.replicas if r.held]
        if picture.queued:
            held.append(f"{picture.queued} invocations wait")
        if running := await self._pool.running():
            held.append(f"{running} requests in engines")
        return held

    def memory(self) -> dict[str, int]:
        return {"all in one": self._process.memory_info().rss}


@contextlib.asynccontextmanager
async def local_stage(plan: Plan) -> AsyncIterator[LocalStage]:
    """An ingress over one pool of simulated engines, as `plan` describes."""
    pool = LocalPool(
        ModelSpec(ModelName(MODEL), "simulated", "qwen"),
        replace(plan.profile(), load_s=0.0),
        replicas=plan.replicas,
        slots=plan.slots,
        policies=plan.policies,
    )
    with tempfile.TemporaryDirectory(prefix="cato-drill-") as folder:
        write_workflow(plan, Path(folder))
        async with LocalPools(pool) as pools:
            service = TaskService(
                load_workflows(Path(folder)),
                pools,
                NodeRunner({}),
                LocalRecords(pools),
                seed=plan.seed,
            )
            access = AccessControl()
            access.learn(Access())
            app = create_app(
                service,
                max_body_bytes=MAX_BODY_BYTES,
                ready=lambda: (True, ""),
                access=access,
            )
            beating = asyncio.create_task(_beat(pool))
            try:
                async with served(app) as url:
                    yield LocalStage(pool, url)
            finally:
                beating.cancel()
                await asyncio.wait([beating])


async def _beat(pool: LocalPool) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        pool.beat()
