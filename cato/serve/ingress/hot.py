"""Fast path for the two busiest routes: skips FastAPI's dependencies, exit stacks and routing.

The same functions answer behind the same gate, and FastAPI still documents the routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cato.core.errors import CatoError
from cato.serve.ingress.errors import answer
from cato.serve.ingress.failures import failure_of_error
from cato.serve.ingress.headers import IndexedRequest

PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})

Endpoint = Callable[[Request], Awaitable[Response]]


def hot_endpoints(app: FastAPI) -> dict[str, Endpoint]:
    """The endpoint function of `app` for each of `PATHS`."""
    return {r.path: r.endpoint for r in app.routes if isinstance(r, APIRoute) and r.path in PATHS}


class HotRoutes:
    """Calls `endpoints` directly; passes every other request on to the application."""

    def __init__(
        self, app: ASGIApp, endpoints: Mapping[str, Endpoint], has_replicas: Callable[[str], bool]
    ) -> None:
        self._app, self._endpoints, self._has_replicas = app, endpoints, has_replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = IndexedRequest(scope, receive, send)
        try:
            response = await endpoint(request)
        except (CatoError, HTTPException) as error:
            response = answer(request, failure_of_error(error, self._has_replicas))
        await response(scope, receive, send)
