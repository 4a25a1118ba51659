"""Ray Serve deployment of engines: each Serve replica is a `Replica` with an engine process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from cato.config.places import run_dir
from cato.control import actors
from cato.control.host_agent import zygote_socket_of
from cato.control.memory import spare_collector
from cato.control.messages import Generate
from cato.control.staged import Staged
from cato.core.errors import CatoError, EngineDeadError, EngineError
from cato.core.eviction import CopyId
from cato.core.ids import HostId, InvocationId, PoolName, ReplicaId
from cato.core.profile import Profile
from cato.core.residency import Resident
from cato.core.topology import DeploymentSpec, ModelSpec, TemplateFacts
from cato.engines.base import Engine, EngineChunk, EngineRequest
from cato.engines.scripted.engine import ScriptedEngine
from cato.engines.simulated import SimulatedEngine
from cato.serve.engine_loader import EngineLoader, new_engine
from cato.serve.engine_start import started
from cato.serve.ordered_models import KeeperGoneError, OrderedModels
from cato.serve.own_model import OwnModel
from cato.serve.replica import Replica
from cato.serve.replica_link import ReplicaLink
from cato.serve.resident_news import ResidentNews
from cato.telemetry import logs
from cato.telemetry.tracing import from_environment


def _rank() -> int:
    """This replica's rank in its deployment; Serve may change it when other replicas go."""
    return int(serve.get_replica_context().rank.rank)


class EngineReplica:
    """One replica of a pool. The engine is a separate process; this one never imports vLLM.

    With `may_change` it starts empty and holds the models that the Eviction Manager orders.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        pool: PoolName,
        models: tuple[ModelSpec, ...],
        spec: DeploymentSpec,
        profile: Profile,
        *,
        may_change: bool = False,
    ) -> None:
        logs.set_up()
        context = serve.get_replica_context()
        self._id = ReplicaId(context.replica_id.unique_id)
        self._host = HostId(ray.get_runtime_context().get_node_id())
        self._pool, self._spec, self._profile = pool, spec, profile
        self._starts_to_fail = 0  # set by a drill
        self._tasks: list[asyncio.Task[None]] = []  # empty while the first engine starts
        self._own: OwnModel | None = None
        self._residents: ResidentNews | None = None
        self._link = ReplicaLink(pool, spec.name, _rank, is_shared=may_change)
        if may_change:
            loader = EngineLoader(spec, str(run_dir()), self._zygote_socket)
            self._holding: OwnModel | OrderedModels = OrderedModels(
                self._host, spec.name, loader, partial(_tell_measured, pool, self._id)
            )
            self._replica = Replica(self._id, self._holding, self._link.tell)
        else:
            (self._model,) = models
            self._holding = self._own = OwnModel(self._model, spec, profile, self._started_engine)
            self._replica = Replica(self._id, self._holding, self._link.tell)
            await self._begin(self._own)
        loop = asyncio.get_running_loop()
        for task in (self._holding.keep_forever(), self._link.keep_forever(self._replica)):
            self._tasks.append(loop.create_task(task))
        spare_collector()

    async def _begin(self, own: OwnModel) -> None:
        """Start the engine of a single-model pool."""
        engine = await own.start()
        self._load_s = engine.facts.start_s
        if (tracing := from_environment()) is not None:
            tracing.loaded(self._model.name, self._id, self._load_s)
        self._residents = ResidentNews(partial(self._resident, own))
        telling = self._residents.tell_forever()
        self._tasks.append(asyncio.get_running_loop().create_task(telling))

    async def _started_engine(self) -> Engine:
        """A new engine that has answered once."""
        if self._starts_to_fail > 0:
            self._starts_to_fail -= 1
            raise EngineError("a drill makes this start fail", 503)
        folder = str(run_dir())
        return await started(
            await new_engine(self._spec, self._model, self._profile, folder, self._zygote_socket)
        )

    async def _zygote_socket(self) -> str:
        """Raise `EngineError` when there is none: links cannot carry Ray's errors."""
        try:
            return await zygote_socket_of(self._host, self._spec.engine)
        except RayError as error:
            cause = getattr(error, "cause", None)
            raise EngineError(str(cause or error)) from error

    async def generate(
        self, request: EngineRequest, cato: dict[str, Any]
    ) -> AsyncGenerator[EngineChunk, None]:
        """As `Replica.generate`, for ingresses without a link. `cato` names the replica (for the
        request router), the invocation, its attempt and, in shared pools, the model."""
        id, attempt = InvocationId(cato["invocation"]), int(cato["attempt"])
        asked = Generate(request, id, attempt, cato.get("model", ""))
        async with contextlib.aclosing(self._replica.generate(asked)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def check_health(self) -> None:
        """Serve's health check: fails when the engine cannot be brought back."""
        if self._own is not None and self._own.broken:
            raise EngineDeadError(self._own.broken)
        if any(task.done() for task in self._tasks):  # they run until the replica ends
            raise EngineDeadError("the task that watches the engine has ended")

    async def load(self, cato: dict[str, Any] | None = None) -> dict[str, object]:
        """The engine's load as it reports it, and its process; `cato` may name the replica."""
        engine = self._replica.engine
        if engine is None:
            return {"replica": self._id, "state": "empty"}
        load = await engine.load()
        return {
            "replica": self._id,
            "state": engine.state.value,
            "running": load.running,
            "waiting": load.waiting,
            "kv_cache_usage": load.kv_cache_usage,
            "held": len(self._replica.calls.attempts),
            "restarts": 0 if self._own is None else self._own.restarts,
            "pid": engine.pid,
            "socket": getattr(engine, "socket", None),
            "kv_capacity_tokens": engine.facts.kv_capacity_tokens,
            "block_tokens": engine.facts.block_tokens,
            "host_tokens": engine.facts.host_tokens,
            "frames": self._link.frames,
        }

    async def template(self, cato: dict[str, Any]) -> TemplateFacts | None:
        """Facts about the engine's chat template; `cato` names the replica."""
        return None if self._replica.engine is None else self._replica.engine.facts.template

    async def process_id(self, cato: dict[str, Any]) -> int:
        """Process id, on its host, of the replica that `cato` names."""
        return os.getpid()

    async def engine_process_id(self, cato: dict[str, Any]) -> int | None:
        """Process id of the engine; None without one. Does not call the engine: it may hang."""
        return None if self._replica.engine is None else self._replica.engine.pid

    async def crash_engine(self, cato: dict[str, Any]) -> None:
        """For drills: kill the engine; it is restarted like any that died.

        In a single-model pool its next `cato["failed_starts"]` starts fail too.
        """
        self._starts_to_fail = int(cato.get("failed_starts", 0))
        engine = self._replica.engine
        if isinstance(engine, SimulatedEngine | ScriptedEngine):
            await engine.kill()
        elif engine is not None and engine.pid is not None:
            os.kill(engine.pid, signal.SIGKILL)

    async def __del__(self) -> None:
        # Serve awaits this when it stops the replica; it does not count the calls on links.
        if self._tasks:  # an engine that never became ready was stopped by its start
            await self._replica.drain()
        for task in self._tasks:
            task.cancel()
        self._link.close()
        if self._residents is not None:
            self._residents.close()
        await self._holding.stop()

    def _resident(self, own: OwnModel) -> Resident:
        engine = self._replica.engine
        assert engine is not None, "it was started"
        return Resident(
            replica_id=self._id,
            pool=self._pool,
            deployment=self._spec.name,
            model=self._model.name,
            host=self._host,
            accelerator=self._spec.accelerator,
            cards=self._spec.cards,
            state=engine.state.value,
            load_s=self._load_s,
            pid=engine.pid,
            restarts=own.restarts,
            lost=own.lost,
        )


async def _tell_measured(
    pool: PoolName, slot: ReplicaId, copy_id: CopyId, found: Staged | CatoError
) -> None:
    """Send a measurement to the Eviction Manager; rare, so an actor call is fine."""
    try:
        await actors.get(actors.EVICTION_MANAGER).measured.remote(pool, slot, copy_id, found)
    except (ValueError, RayError) as error:
        raise KeeperGoneError(repr(error)) from error
