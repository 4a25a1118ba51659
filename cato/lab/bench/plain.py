"""The plain Serve application that CATO is compared with.

A hand-written OpenAI server on Ray Serve: a FastAPI ingress, a handle, and a deployment that relays
the engine's stream; Serve's default router, no queue, no SLA. Annotations are not postponed:
FastAPI reads those of the route.
"""

import contextlib
import itertools
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve import Application

from cato.core.profile import Profile
from cato.core.topology import EngineSpec
from cato.engines.base import Endpoint, EngineRequest
from cato.engines.simulated import SimulatedEngine

MAX_ONGOING = 10_000


class PlainVllm:
    """Relays the stream of a vLLM server on a Unix socket."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path=self._socket, limit=0)
            )
        async with self._session.post("http://engine/v1/completions", json=body) as response:
            async for data in response.content.iter_any():
                yield data


class PlainSimulated:
    """Relays the stream of a simulated engine in this process, as CATO's replica does."""

    def __init__(self, profile: Profile, spec: EngineSpec) -> None:
        self._engine = SimulatedEngine(profile, spec)
        self._numbers = itertools.count()

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        await self._engine.start()
        request = EngineRequest(str(next(self._numbers)), Endpoint.COMPLETIONS, body, raw=True)
        async with contextlib.aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is None:
                    yield chunk.raw
        yield b"data: [DONE]\n\n"


def build_plain(engine: Application, name: str) -> Application:
    """The application around an engine deployment, see `plain_vllm` and `plain_simulated`."""
    app = FastAPI()

    class PlainIngress:
        """HTTP in front of the engine's handle."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine.options(stream=True)

        @app.post("/v1/completions")
        async def completions(self, request: Request) -> StreamingResponse:
            body = await request.json()
            return StreamingResponse(
                self._engine.generate.remote(body), media_type="text/event-stream"
            )

        @app.post("/http-only")
        async def http_only(self, request: Request) -> StreamingResponse:
            """No engine and no hop: the cost of HTTP alone in front of both arms."""
            await request.json()
            return StreamingResponse(_one_event(), media_type="text/event-stream")

        @app.get("/health")
        async def health(self) -> dict[str, str]:
            return {"status": "ok"}

    deployment = serve.deployment(
        serve.ingress(app)(PlainIngress),
        name=name,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
    )
    return deployment.bind(engine)


async def _one_event() -> AsyncGenerator[bytes, None]:
    yield b'data: {"choices":[{"index":0,"text":"x"}]}\n\ndata: [DONE]\n\n'


def plain_vllm(socket: str) -> Application:
    return _deployment(PlainVllm, "plain-vllm").bind(socket)


def plain_simulated(profile: Profile, spec: EngineSpec) -> Application:
    return _deployment(PlainSimulated, "plain-simulated").bind(profile, spec)


def _deployment(cls: type, name: str) -> Any:
    return serve.deployment(
        cls, name=name, max_ongoing_requests=MAX_ONGOING, ray_actor_options={"num_cpus": 0}
    )
