"""Requests that end without a response, behind a real uvicorn."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from ingress_kit import until
from ray.serve._private.http_util import RequestIdMiddleware
from starlette.middleware import Middleware

from cato.cli.serve import TRANSPORT
from cato.serve.given_up import RETRY_S, Answered, give_up

ROOT = Path(__file__).parents[3]
VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


async def answer_to(app: Any) -> httpx.Response:
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started, within_s=10)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient() as http:
            return await http.get(f"http://127.0.0.1:{port}/v1/models")
    finally:
        server.should_exit = True
        await serving


@pytest.mark.parametrize("is_raised", [False, True])
async def test_a_request_without_a_response_gets_503(is_raised: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if is_raised:
            raise asyncio.CancelledError

    told = await answer_to(Answered(app))
    assert told.status_code == 503
    assert told.headers["retry-after"] == str(RETRY_S)
    assert told.json()["error"]["code"] == "stopping"


async def test_the_503_has_the_id_of_its_own_request_alone() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await give_up(send)

    for _ in range(2):
        scope: Any = {"type": "http", "headers": []}
        await RequestIdMiddleware(app)(scope, _nothing, send)
    ids = [[v for k, v in m["headers"] if k == b"x-request-id"] for m in sent if "status" in m]
    assert [len(own) for own in ids] == [1, 1]
    assert ids[0] != ids[1]


async def _nothing() -> Any:
    raise AssertionError("nothing is read")


async def test_a_response_stays_as_it_is() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"whole"})

    told = await answer_to(Answered(app))
    assert (told.status_code, told.content) == (200, b"whole")


async def test_a_response_that_breaks_off_is_not_completed() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})

    with pytest.raises(httpx.RemoteProtocolError):
        await answer_to(Answered(app))


def test_serve_finds_the_middleware_for_its_proxies_wherever_ray_starts() -> None:
    module, _, name = TRANSPORT[VARIABLE].partition(":")
    (middleware,) = getattr(import_module(module), name)()
    assert isinstance(middleware, Middleware)
    for file in ("README.md", "deployments/README.md", "docker/Dockerfile"):
        assert f"{VARIABLE}={TRANSPORT[VARIABLE]}" in (ROOT / file).read_text(), file
