"""The Serve deployment of an engine: starts, watches, feeds and stops one engine process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from cato.config.places import run_dir
from cato.control import actors
from cato.control.host_agent import zygote_socket_of
from cato.control.links import Generate, Told
from cato.core.errors import CatoError, EngineDeadError, EngineError, ReplicaLostError
from cato.core.events import ReplicaReported
from cato.core.ids import HostId, InvocationId, PoolName, ReplicaId
from cato.core.profile import Profile
from cato.core.residency import Resident
from cato.core.topology import DeploymentSpec, ModelSpec, TemplateFacts
from cato.engines.base import (
    Engine,
    EngineChunk,
    EngineRequest,
    EngineState,
)
from cato.engines.scripted.engine import ScriptedEngine
from cato.engines.simulated import SimulatedEngine
from cato.serve.engine_loader import new_engine
from cato.serve.engine_start import started
from cato.serve.held_calls import HeldCalls
from cato.serve.replica_link import ReplicaLink
from cato.telemetry import logs
from cato.telemetry.tracing import from_environment

log = logging.getLogger("cato.engine_replica")

# What is loaded seldom changes; a manager that was restarted knows all after so long.
RESIDENT_EVERY_S = 2.0
RESIDENT_POLL_S = 0.5
# A new engine is tried at once; one that keeps dying gives Serve a reason to move the replica.
RESTART_BACKOFF_S = (0.0, 1.0, 5.0, 15.0)


def _rank() -> int:
    """Of this replica among those of its deployment; Serve may change it when others go."""
    return int(serve.get_replica_context().rank.rank)


class EngineReplica:
    """One replica of a pool. The engine is its own process; this one never imports vLLM."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, pool: PoolName, model: ModelSpec, spec: DeploymentSpec, profile: Profile
    ) -> None:
        logs.set_up()
        context = serve.get_replica_context()
        self._id = ReplicaId(context.replica_id.unique_id)
        self._host = HostId(ray.get_runtime_context().get_node_id())
        self._pool, self._model, self._spec, self._profile = pool, model, spec, profile
        self._broken = ""
        self._eviction: Any = None
        self._calls = HeldCalls(self._id, self._tell)
        stop = self._calls.progress.stop
        self._link = ReplicaLink(
            self._id, pool, spec.name, _rank, stop, self._report, self._generate
        )
        self._restarts = 0
        self._lost = ""  # how the last engine ended, in a line
        self._resident: Resident | None = None  # as the manager was last told
        self._starts_to_fail = 0  # by order of a drill
        self._tasks: list[asyncio.Task[None]] = []  # none while the first engine starts
        self._is_draining = False
        self._engine = await self._started_engine()
        self._load_s = self._engine.facts.start_s
        if (tracing := from_environment()) is not None:
            tracing.loaded(self._model.name, self._id, self._load_s)
        loop = asyncio.get_running_loop()
        for task in (self._watch(), self._link.keep_forever(), self._tell_resident_forever()):
            self._tasks.append(loop.create_task(task))

    async def _started_engine(self) -> Engine:
        """A new engine that has answered once."""
        if self._starts_to_fail > 0:
            self._starts_to_fail -= 1
            raise EngineError("a drill lets this start fail", 503)
        python = self._spec.engine.python or sys.executable
        zygote_socket = partial(zygote_socket_of, self._host, python)
        return await started(
            await new_engine(self._spec, self._model, self._profile, str(run_dir()), zygote_socket)
        )

    async def generate(
        self, request: EngineRequest, cato: dict[str, Any]
    ) -> AsyncGenerator[EngineChunk, None]:
        """Tokens of one invocation; the first at once, then batched when many streams run.

        `cato` names the replica (for the request router), the invocation and its attempt.
        """
        if self._is_draining:
            raise ReplicaLostError(self._id, "it is shutting down", was_reached=False)
        id, attempt = InvocationId(cato["invocation"]), int(cato["attempt"])
        stream = self._calls.stream(self._engine, self._profile, request, id, attempt)
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    def _tell(self, told: Told) -> None:
        self._link.tell(told)

    def _generate(self, asked: Generate) -> AsyncGenerator[EngineChunk, None]:
        pin = {"invocation": asked.invocation_id, "attempt": asked.attempt}
        return self.generate(asked.request, pin)

    async def check_health(self) -> None:
        """Serve's health check: fails when the engine cannot be brought back."""
        if self._broken:
            raise EngineDeadError(self._broken)
        if any(task.done() for task in self._tasks):  # they run for as long as the replica
            raise EngineDeadError("nobody watches the engine any more")

    async def load(self, cato: dict[str, Any] | None = None) -> dict[str, object]:
        """What the engine itself says it holds, and its process; `cato` may name the replica."""
        load = await self._engine.load()
        return {
            "replica": self._id,
            "state": self._engine.state.value,
            "running": load.running,
            "waiting": load.waiting,
            "kv_cache_usage": load.kv_cache_usage,
            "held": len(self._calls.attempts),
            "restarts": self._restarts,
            "pid": self._engine.pid,
            "socket": getattr(self._engine, "socket", None),
            "kv_capacity_tokens": self._engine.facts.kv_capacity_tokens,
            "block_tokens": self._engine.facts.block_tokens,
            "host_tokens": self._engine.facts.host_tokens,
        }

    async def template(self, cato: dict[str, Any]) -> TemplateFacts | None:
        """What the engine's chat template makes of conversations; `cato` names the replica."""
        return self._engine.facts.template

    async def process_id(self, cato: dict[str, Any]) -> int:
        """Of the replica that `cato` names, on its host."""
        return os.getpid()

    async def engine_process_id(self, cato: dict[str, Any]) -> int | None:
        """Of the engine; None while it has no process. Asks the engine nothing: it may hang."""
        return self._engine.pid

    async def crash_engine(self, cato: dict[str, Any]) -> None:
        """For drills: kill the engine; it comes back like any that died.

        Its next `cato["failed_starts"]` starts fail too.
        """
        self._starts_to_fail = int(cato.get("failed_starts", 0))
        if isinstance(self._engine, SimulatedEngine | ScriptedEngine):
            await self._engine.kill()
        elif self._engine.pid is not None:
            os.kill(self._engine.pid, signal.SIGKILL)

    async def shutdown(self) -> None:
        """Take no more, and end when nothing is held: Serve does not count what links carry."""
        self._is_draining = True
        self._link.report()
        await self._calls.is_idle.wait()
        for task in self._tasks:
            task.cancel()
        self._link.close()
        if self._eviction is not None:
            self._eviction.remove.remote(self._id)
        if self._tasks:  # an engine that never got ready was stopped by its own start
            await self._engine.stop()

    async def __del__(self) -> None:
        # Serve awaits this when it stops the replica.
        await self.shutdown()

    # Engine's life

    async def _watch(self) -> None:
        while True:
            why = await self._engine.wait_dead()
            log.error("engine of %s died: %s", self._id, why)
            self._lost = why.partition("; last lines of ")[0]
            self._link.report()
            await self._restart(why)
            self._link.report()

    async def _restart(self, why: str) -> None:
        for delay_s in RESTART_BACKOFF_S:
            await asyncio.sleep(delay_s)
            try:
                await self._engine.stop()
                self._engine = await self._started_engine()
            except Exception as error:
                # A full disk, a folder or a host agent that is away: whatever it is may pass.
                why = str(error) or type(error).__name__
                is_ours = isinstance(error, CatoError)
                log.error("engine of %s did not come back: %s", self._id, why, exc_info=not is_ours)
            else:
                self._restarts += 1
                self._broken = ""
                return
        self._broken = f"engine did not come back after {len(RESTART_BACKOFF_S)} tries: {why}"

    # Reports

    def _report(self) -> ReplicaReported:
        """What the pool's router must know of it."""
        facts, state = self._engine.facts, self._engine.state
        is_ready = state is EngineState.READY
        return ReplicaReported(
            now_s=0.0,
            replica_id=self._id,
            deployment=self._spec.name,
            profile=replace(
                self._profile,
                context_tokens=facts.context_tokens or self._profile.context_tokens,
                max_running=facts.max_running,
                kv_capacity_tokens=facts.kv_capacity_tokens or self._profile.kv_capacity_tokens,
            ),
            max_running=facts.max_running,
            standby=self._spec.standby,
            accepting=is_ready and not self._is_draining,
            held=tuple(self._calls.attempts),
            # An engine that died has lost what it had cached.
            prefix_caching=self._spec.engine.prefix_caching and is_ready,
            step_tokens=self._spec.engine.max_num_batched_tokens or 0,
            host_tokens=facts.host_tokens_by(self._profile),
        )

    async def _tell_resident_forever(self) -> None:
        """What is loaded, to the Eviction Manager: every change, and all again to a new one."""
        told_s = -RESIDENT_EVERY_S
        while True:
            resident, now_s = self._resident_now(), time.monotonic()
            if resident != self._resident or now_s - told_s >= RESIDENT_EVERY_S:
                try:
                    if self._eviction is None:
                        self._eviction = actors.get(actors.EVICTION_MANAGER)
                    self._eviction.report.remote(resident)
                except (ValueError, RayError) as error:
                    log.info("%s: the Eviction Manager was not told: %s", self._id, error)
                else:
                    self._resident, told_s = resident, now_s
            await asyncio.sleep(RESIDENT_POLL_S)

    def _resident_now(self) -> Resident:
        return Resident(
            replica_id=self._id,
            pool=self._pool,
            deployment=self._spec.name,
            model=self._model.name,
            host=self._host,
            accelerator=self._spec.accelerator,
            cards=self._spec.cards,
            state=self._engine.state.value,
            load_s=self._load_s,
            pid=self._engine.pid,
            restarts=self._restarts,
            lost=self._lost,
        )
