"""`/ui`: a page that only reads. What it shows comes from `/ui/state` and `/v1/requests/{id}`.

The page itself holds no data, so it needs no key; a browser could not send one with a link. What
it asks for goes through the gate like any request, with the key that was typed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from cato.serve.ingress.context import Ingress, caller_of
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.receipts import as_json
from cato.serve.ingress.rollouts import described
from cato.serve.ingress.templates import note_of

HERE = Path(__file__).parent
FILES = {
    "/ui": ("page.html", "text/html; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
}
# Nothing comes from elsewhere, and nothing in the page's data can become a script.
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def routes(ingress: Ingress) -> APIRouter:
    """Not in the OpenAPI document: `/ui/state` is the page's own and follows it."""
    router = APIRouter(include_in_schema=False)
    for path, (name, media_type) in FILES.items():
        router.add_api_route(path, _file(name, media_type), methods=["GET", "HEAD"])

    @router.get("/ui/")
    async def with_slash() -> Response:
        """The page's own links are relative, so that it works behind a proxy's path."""
        return RedirectResponse("../ui")

    @router.get("/ui/state")
    async def state(request: Request) -> Response:
        """The fleet now, and what happened lately to the caller's tenant; for operators to all."""
        found = await ingress.service.records.overview(caller_of(request).sees)
        notes = {pool.name: note_of(pool) for pool in ingress.service.pools()}
        pools = tuple(
            replace(p, note=" · ".join(filter(None, (p.note, notes.get(p.name)))))
            for p in found.pools
        )
        found = replace(found, pools=pools, problem=ingress.service.workflow_problem)
        known = ingress.service.records.rollouts() if caller_of(request).is_operator else {}
        shown = as_json(found) | {"rollouts": described(known)}
        return JsonAnswer(shown, headers={"Cache-Control": "no-store"})

    return router


def _file(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = (HERE / name).read_bytes()

    async def file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return file
