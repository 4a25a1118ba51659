"""Authentication middleware: checks the API key before anything else.

A key, or a token of the team's identity provider, comes as `Authorization: Bearer KEY` (OpenAI's
clients, Tabby, llama.cpp's), `x-api-key` (Anthropic's) or `api-key` (Azure's). It is never read
from a URL, since URLs are logged. Responses tell a tenant what is left of its limits.
"""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cato.core.errors import AccessError
from cato.serve.access.addresses import is_own
from cato.serve.access.caller import Caller
from cato.serve.access.control import AccessControl
from cato.serve.access.limits import Left
from cato.serve.draining import Drain
from cato.serve.ingress.context import remember_caller
from cato.serve.ingress.errors import answer
from cato.serve.ingress.failures import failure_of_error
from cato.serve.ingress.forwarded import Proxies, named
from cato.serve.ingress.headers import IndexedRequest
from cato.serve.ingress.pages import Pages
from cato.telemetry.tracing import HEADER, TRACEPARENT

# Paths without a key: probes, which reveal details only to this machine; the status page without
# its data, and its sign-in; and the API's documentation, which is the same for every deployment of
# this version.
OPEN_PATHS = frozenset(
    {"/", "/docs", "/health", "/livez", "/readyz", "/ui", "/ui/", "/ui/sign-in"}
    | {f"/ui/{file}" for file in ("page.js", "admin.js", "page.css")}
)
# A restart takes longer, but other replicas may serve meanwhile.
STOPPING_RETRY_S = 5.0
KEY_HEADERS = ("x-api-key", "api-key")


class Gate:
    """Refuses requests without a valid key.

    `is_private`: the proxy in front listens on loopback only; None without a proxy, where the
    connection itself shows the client. `proxies` are trusted to name their clients. `pages`
    distinguishes a user's own keyless requests from those of web pages. Once draining has started,
    `drain` makes the gate refuse new requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: AccessControl,
        is_private: bool | None,
        proxies: Proxies = Proxies(),  # noqa: B008  # frozen
        pages: Pages = Pages(),  # noqa: B008  # frozen
        drain: Drain | None = None,
    ) -> None:
        self._app = app
        self._drain = drain
        self._pages = pages
        self._proxies = proxies
        self._access = access
        self._is_private = is_private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = IndexedRequest(scope)
        is_local = self._is_local(request)
        request.state.cato_is_local = is_local and self._is_person(request)
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            if self._drain is not None and self._drain.is_asked:
                told = "The server is shutting down; try again in a moment."
                raise AccessError(503, "stopping", told, STOPPING_RETRY_S)
            given = credentials(request)
            person = await self._access.person(given)
            caller = self._access.caller(given, is_local=is_local, person=person)
            if not caller.key:
                self._pages.check(request.headers, is_named=self._access.serves_by_place)
        except AccessError as error:
            refusal = answer(request, failure_of_error(error, lambda _: True))
            await refusal(scope, receive, send)
            return
        peer = "" if request.client is None else request.client.host
        remember_caller(request, caller, self._proxies.client(peer, request.headers))
        TRACEPARENT.set(request.headers.get(HEADER, ""))
        if self._access.left(caller) is not None:
            send = self._telling_limits(send, caller)
        if self._drain is None:
            await self._app(scope, receive, send)
            return
        self._drain.under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.under_way -= 1

    def _telling_limits(self, send: Send, caller: Caller) -> Send:
        """`send`, with the rest of the tenant's limits in the response headers."""

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                left = self._access.left(caller)
                headers = {} if left is None else limit_headers(left)
                more = [(name.encode(), value.encode()) for name, value in headers.items()]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        return told

    def _is_local(self, request: Request) -> bool:
        """Whether the client is on this machine and does not forward for another."""
        if self._is_private is False or request.client is None or not is_own(request.client.host):
            return False
        return all(map(is_own, named(request.headers)))

    def _is_person(self, request: Request) -> bool:
        """Whether the request does not come from a foreign web page."""
        try:
            self._pages.check(request.headers, is_named=True)
        except AccessError:
            return False
        return True


def limit_headers(left: Left) -> dict[str, str]:
    """OpenAI's rate-limit headers: limit per minute, remaining burst, and time to full reset."""
    headers = {}
    for name, known in (("requests", left.requests), ("tokens", left.tokens)):
        if known is not None:
            rate, remaining, full_in_s = known
            headers[f"x-ratelimit-limit-{name}"] = str(rate)
            headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
            headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(full_in_s * 1000)}ms"
    return headers


def comes_from_here(request: Request) -> bool:
    """Whether the gate found a client on this machine that is not a foreign web page."""
    return bool(getattr(request.state, "cato_is_local", False))


def credentials(request: Request) -> str:
    """The request's API key; empty if it has none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return next((v.strip() for h in KEY_HEADERS if (v := request.headers.get(h))), "")
