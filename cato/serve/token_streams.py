"""Token streams from leased replicas to an ingress: over a link, else through Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException

from cato.control import actors
from cato.control.links import Dial, ReplicaLinks, open_link
from cato.control.messages import Generate
from cato.core.commands import Dispatch
from cato.core.errors import CatoError, LinkCallError, LinkError, ReplicaLostError
from cato.engines.base import EngineChunk, EngineRequest
from cato.serve.cancelled import is_this_task_cancelled
from cato.wire.link.codec import CodecError
from cato.wire.link.endpoints import Address

log = logging.getLogger("cato.pools")


class TokenStreams:
    """The token streams of one ingress replica."""

    def __init__(self, dial: Dial = open_link) -> None:
        self._links = ReplicaLinks(dial)
        self._handles: dict[str, Any] = {}

    async def reach(self, lease: Dispatch, address: Address | None, secret: bytes) -> Dispatch:
        """Connect to the leased replica; if that fails, say so in the returned lease's reason."""
        try:
            if address is None:
                raise LinkError(f"replica {lease.replica_id}", "it has not sent its address")
            await self._links.reach(lease.replica_id, address, secret)
        except LinkError as error:
            return replace(lease, reason=f"{lease.reason}; through Serve's handle: {error}")
        return lease

    async def stream(
        self, lease: Dispatch, request: EngineRequest, model: str = ""
    ) -> AsyncGenerator[EngineChunk, None]:
        """As `Pools.stream`. `model`: the one that a replica of a shared pool must hold."""
        try:
            link = self._links.get(lease.replica_id)
            chunks: AsyncGenerator[EngineChunk, None]
            if link is not None:
                asked = Generate(request, lease.invocation_id, lease.attempt, model)
                try:
                    async with contextlib.aclosing(link.call(asked)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                    return
                except CodecError as error:  # nothing was sent
                    log.info("invocation %s through Serve's handle: %s", lease.invocation_id, error)
            async with contextlib.aclosing(self._through_serve(lease, request, model)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_this_task_cancelled():
                raise  # the client left; otherwise the replica's side was cancelled
            translated = _translated(error, lease)
            if translated is error:
                raise
            raise translated from error

    def handle(self, deployment: str) -> Any:
        """The Serve handle of `deployment`."""
        if deployment not in self._handles:
            handle = serve.get_deployment_handle(deployment, app_name=actors.ENGINES_APP)
            self._handles[deployment] = handle.options(stream=True)
        return self._handles[deployment]

    async def _through_serve(
        self, lease: Dispatch, request: EngineRequest, model: str
    ) -> AsyncGenerator[EngineChunk, None]:
        pin = {
            "replica": lease.replica_id,
            "invocation": lease.invocation_id,
            "attempt": lease.attempt,
            "model": model,
        }
        response = self.handle(lease.deployment).generate.remote(request, cato=pin)
        try:
            async for chunk in response:
                yield chunk
        finally:
            response.cancel()  # leaving a stream early does not cancel it


def _translated(error: BaseException, lease: Dispatch) -> BaseException:
    """The replica's own `CatoError` without Ray's wrapping; `ReplicaLostError` for anything else.

    A dying replica can raise many errors: Ray's, Serve's, and those of their parts, such as gRPC.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, LinkError | LinkCallError):
        return ReplicaLostError(lease.replica_id, cause.problem)
    if isinstance(cause, CatoError):
        return cause
    if not isinstance(error, RayActorError | RayServeException | asyncio.CancelledError):
        log.error("invocation %s: its stream broke", lease.invocation_id, exc_info=error)
    return ReplicaLostError(lease.replica_id, f"its stream broke ({type(error).__name__})")
