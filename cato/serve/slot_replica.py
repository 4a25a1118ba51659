"""The Serve deployment of the slots of a shared pool: each replica is one slot."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError

from cato.config.places import run_dir
from cato.control import actors
from cato.control.host_agent import zygote_socket_of
from cato.control.links import Told
from cato.control.staged import Staged
from cato.core.errors import CatoError, EngineError
from cato.core.eviction import CopyId
from cato.core.ids import HostId, InvocationId, ModelName, PoolName, ReplicaId
from cato.core.slots import SlotOrder, SlotReport, StopCalls
from cato.core.topology import SharedPoolSpec
from cato.engines.base import EngineChunk, EngineRequest
from cato.serve.card_slot import CardSlot, KeeperGoneError
from cato.serve.engine_loader import EngineLoader

T = TypeVar("T")


class EvictionManagerKeeper:
    """The Eviction Manager as a slot of `pool` reaches it."""

    def __init__(self, pool: PoolName) -> None:
        self._pool = pool
        self._manager: Any = None

    async def attend(self, report: SlotReport) -> SlotOrder | StopCalls | None:
        order: SlotOrder | StopCalls | None = await self._ask("attend", report)
        return order

    async def report(self, report: SlotReport) -> None:
        await self._ask("report_slot", report)

    async def tell(self, slot: ReplicaId, model: ModelName, told: tuple[Told, ...]) -> None:
        await self._ask("tell", slot, model, told)

    async def leave(self, slot: ReplicaId) -> None:
        await self._ask("leave", slot)

    async def measured(self, slot: ReplicaId, copy_id: CopyId, found: Staged | CatoError) -> None:
        await self._ask("measured", slot, copy_id, found)

    async def _ask(self, method: str, *args: object) -> Any:
        try:
            if self._manager is None:
                self._manager = actors.get(actors.EVICTION_MANAGER)
            return await getattr(self._manager, method).remote(self._pool, *args)
        except (ValueError, RayError) as error:
            self._manager = None
            raise KeeperGoneError(repr(error)) from error


async def _zygote_socket(host: HostId, python: str) -> str:
    """Raise `EngineError` when there is none: Ray's own errors cannot be told to the manager."""
    try:
        return await zygote_socket_of(host, python)
    except RayError as error:
        cause = getattr(error, "cause", None)
        raise EngineError(str(cause or error)) from error


class SlotReplica:
    """One slot of a shared pool; holds no model until it is ordered to."""

    async def __init__(self, pool: SharedPoolSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        id = ReplicaId(serve.get_replica_context().replica_id.unique_id)
        host = HostId(ray.get_runtime_context().get_node_id())
        python = pool.slots.engine.python or sys.executable
        zygote_socket = partial(_zygote_socket, host, python)
        loader = EngineLoader(pool.slots, str(run_dir()), zygote_socket)
        self._slot = CardSlot(id, host, EvictionManagerKeeper(pool.name), loader)
        self._attending = asyncio.get_running_loop().create_task(self._slot.attend_forever())

    async def generate(
        self, request: EngineRequest, cato: dict[str, Any]
    ) -> AsyncGenerator[EngineChunk, None]:
        """Tokens of one invocation; `cato` names the model, the slot, the invocation and its
        attempt."""
        chunks = self._slot.generate(
            ModelName(cato["model"]),
            request,
            InvocationId(cato["invocation"]),
            int(cato["attempt"]),
        )
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def check_health(self) -> None:
        """Fails when the slot takes no orders any more; Serve then replaces it."""
        if self._attending.done():
            self._attending.result()

    async def __del__(self) -> None:
        # Serve awaits this when it stops the replica.
        self._attending.cancel()
        await self._slot.shutdown()
