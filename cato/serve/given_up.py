"""503 for HTTP requests that Serve or an ending process gives up; uvicorn's answer would be 500.

Serve's fallback proxy sends nothing when the ingress replica of a request dies.
"""

from __future__ import annotations

import contextlib
import json

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

RETRY_S = 2
_BODY = json.dumps(
    {
        "error": {
            "message": "This part of the server is stopping; try again in a moment.",
            "type": "server_error",
            "param": None,
            "code": "stopping",
        }
    }
).encode()
_HEADERS = (
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_BODY)).encode()),
    (b"retry-after", str(RETRY_S).encode()),
    (b"connection", b"close"),
)


async def give_up(send: Send) -> None:
    """Send the 503 unless a response has begun. Does not wait: the process may be ending."""
    # A message of its own: Serve adds the request's id to it.
    start = {"type": "http.response.start", "status": 503, "headers": list(_HEADERS)}
    with contextlib.suppress(Exception):  # has begun, or the client has left
        await send(start)
        await send({"type": "http.response.body", "body": _BODY})


class Answered:
    """No request ends without a response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if scope["type"] == "http":
                await give_up(send)


def for_proxies() -> list[Middleware]:
    """For Serve's proxies; replicas, which Serve asks too, need none.

    `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this function.
    """
    try:
        serve.get_replica_context()
    except RayServeException:
        return [Middleware(Answered)]
    return []
