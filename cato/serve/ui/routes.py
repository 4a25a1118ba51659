"""Routes of the web pages: `/ui`, the status page with administration, and `/docs`, the API.

The status page itself holds no data and needs no key; a browser could not send one with a link. Its
requests to `/ui/state` and `/v1` are checked like any other, with the key that the user typed in
or the token from signing in. The provider's code is exchanged for that token here, so that the page
calls no other host.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from cato.core.baseline import warning
from cato.core.errors import InputError, QuotaError
from cato.serve.access.limits import TokenBucket
from cato.serve.ingress.body import read_object, text_field
from cato.serve.ingress.context import Ingress, caller_of
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.receipts import as_json
from cato.serve.ingress.rollouts import described
from cato.serve.ingress.templates import note_of
from cato.serve.ui import docs
from cato.telemetry.recent import TaskHistory

HERE = Path(__file__).parent
FILES = {
    "/ui": ("page.html", "text/html; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/admin.js": ("admin.js", "text/javascript; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
}
# No external resources, and nothing in the page's data can run as a script.
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
NO_STORE = {"Cache-Control": "no-store"}
# Exchanges need no key, and each one calls the identity provider.
MAX_EXCHANGES_PER_MINUTE = 120
MAX_CODE_BYTES = 16_384


def routes(ingress: Ingress) -> APIRouter:
    """Not in the OpenAPI document: `/ui/state` is private to the page and changes with it."""
    router = APIRouter(include_in_schema=False)
    exchanges = TokenBucket.of(MAX_EXCHANGES_PER_MINUTE, time.monotonic())
    for path, (name, media_type) in FILES.items():
        router.add_api_route(path, _file(name, media_type), methods=["GET", "HEAD"])

    @router.head("/")
    @router.get("/")
    async def root() -> Response:
        """Redirect the bare address to the status page."""
        return RedirectResponse("ui")

    @router.get("/docs")
    async def api(request: Request) -> Response:
        """The API documentation, from the OpenAPI document."""
        html = docs.page(request.app.openapi())
        return Response(html, media_type="text/html; charset=utf-8", headers=HEADERS)

    @router.get("/ui/")
    async def with_slash() -> Response:
        """Redirect to `/ui`: the page's links are relative, to work behind a path prefix."""
        return RedirectResponse("../ui")

    @router.get("/ui/sign-in")
    async def flow(request: Request) -> Response:
        """What the page needs to start a sign-in; empty if sign-in is not configured."""
        sign_in = ingress.access.sign_in
        found = None if sign_in is None else await sign_in.flow()
        return JsonAnswer(found or {}, headers=NO_STORE)

    @router.post("/ui/sign-in")
    async def exchange(request: Request) -> Response:
        """Exchange the identity provider's authorization code for a token."""
        if wait_s := exchanges.wait_s(time.monotonic(), 1.0):
            raise QuotaError("sign-ins per minute", wait_s)
        exchanges.take(time.monotonic(), 1.0)
        body = await read_object(request, min(MAX_CODE_BYTES, ingress.max_body_bytes))
        code, verifier, back = (text_field(body, f) for f in ("code", "verifier", "redirect_uri"))
        if ingress.access.sign_in is None or not (code and verifier and back):
            raise InputError("the body is {code, verifier, redirect_uri}", "code")
        token, person = await ingress.access.sign_in.exchange(code, verifier, back)
        return JsonAnswer({"token": token, "name": person.name}, headers=NO_STORE)

    @router.get("/ui/state")
    async def state(request: Request) -> Response:
        """The fleet's state, and recent events of the caller's tenant; of all, for operators."""
        found = await ingress.service.records.overview(caller_of(request).sees)
        notes = {pool.name: note_of(pool) for pool in ingress.service.pools()}
        pools = tuple(
            replace(p, note=" · ".join(filter(None, (p.note, notes.get(p.name)))))
            for p in found.pools
        )
        service, caller = ingress.service, caller_of(request)
        told = (
            warning(workflow, service.measured(workflow))
            for workflow in map(service.workflow, filter(caller.may_run, sorted(service.workflows)))
        )
        found = replace(
            found,
            pools=pools,
            tasks=tuple(_with_own_target(ingress, task) for task in found.tasks),
            problem=service.workflow_problem,
            warnings=(*found.warnings, *filter(None, told)),
        )
        known = service.records.rollouts() if caller.is_operator else {}
        return JsonAnswer(as_json(found) | {"rollouts": described(known)}, headers=NO_STORE)

    return router


def _with_own_target(ingress: Ingress, task: TaskHistory) -> TaskHistory:
    """`task` with its workflow's target: single requests may have asked for another."""
    workflow = ingress.service.workflows.get(task.task)
    if workflow is None:  # a direct call of a model, or a task that was removed
        return task
    return replace(task, metric=workflow.slo.metric.value, target_s=workflow.slo.target_s)


def _file(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = (HERE / name).read_bytes()

    async def file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return file
