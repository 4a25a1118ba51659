"""What stands in for Ray's private parts; a new version of Ray may differ."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from ingress_kit import until
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve._private.replica import Replica
from ray.serve.request_router import ReplicaID

from cato.control import ray_private
from cato.control.ray_private import keep_requests_retryable


@pytest.mark.parametrize("path", ["/v1/completions", "/-/healthz"])
async def test_a_request_waits_until_serve_lets_the_replica_answer_and_a_probe_does_not(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    assert "self._user_callable_initialized" in inspect.getsource(Replica._direct_ingress_asgi)
    was_ready: list[bool] = []

    async def answer(self: Any, scope: Any, receive: Any, send: Any) -> None:
        was_ready.append(self._user_callable_initialized)

    monkeypatch.setattr(Replica, "_direct_ingress_asgi", answer)
    keep_requests_retryable()
    replica = SimpleNamespace(_user_callable_initialized=False)
    asked = asyncio.create_task(Replica._direct_ingress_asgi(replica, {"path": path}, None, None))
    await asyncio.sleep(0.05)
    is_probe = path == "/-/healthz"
    assert was_ready == ([False] if is_probe else [])
    replica._user_callable_initialized = True
    await asyncio.wait_for(asked, 5)
    assert was_ready == [not is_probe]


ENDS = [asyncio.CancelledError(), GeneratorExit(), AssertionError("not ready")]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_request_that_is_given_up_gets_503_unless_its_answer_has_begun(
    monkeypatch: pytest.MonkeyPatch, end: BaseException, has_begun: bool
) -> None:
    """Over uvicorn, whose own answer would be 500."""

    async def answer(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        raise end

    monkeypatch.setattr(Replica, "_direct_ingress_asgi", answer)
    keep_requests_retryable()
    replica = SimpleNamespace(_user_callable_initialized=True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Replica._direct_ingress_asgi(replica, scope, receive, send)

    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started, within_s=10)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient() as http:
        if has_begun:
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get(f"http://127.0.0.1:{port}/v1/completions")
        else:
            told = await http.get(f"http://127.0.0.1:{port}/v1/completions")
            assert told.status_code == 503
            assert told.headers["retry-after"] == "2"
            assert told.json()["error"]["code"] == "stopping"
    server.should_exit = True
    await serving


@pytest.mark.parametrize(
    ("states", "is_stopping"),
    [
        ({"mine": ReplicaState.RUNNING, "next": ReplicaState.STARTING}, False),
        ({"mine": ReplicaState.STOPPING, "next": ReplicaState.STARTING}, True),
        ({"mine": ReplicaState.STOPPING, "next": ReplicaState.RUNNING}, True),
        ({}, False),
    ],
)
async def test_a_replica_knows_that_serve_stops_it(
    monkeypatch: pytest.MonkeyPatch, states: dict[str, ReplicaState], is_stopping: bool
) -> None:
    replicas = [{"replica_id": id, "state": s, "node_id": "n"} for id, s in states.items()]
    listed = {"control-plane": {"target_num_replicas": 1, "replicas": replicas}} if states else {}

    async def details() -> dict[str, Any]:
        return {"engines": {"deployments": listed}}

    mine = ReplicaID("mine", DeploymentID("control-plane", "engines"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(replica_id=mine))
    monkeypatch.setattr(ray_private, "_details", details)
    assert await ray_private.is_stopping() is is_stopping
