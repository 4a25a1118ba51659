"""What was used: by day, tenant, API key, task and model; or by the turns of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.core.tenancy import TurnUsage, Usage
from cato.serve.access.usage import as_csv
from cato.serve.ingress import document
from cato.serve.ingress.context import Ingress, caller_of
from cato.serve.ingress.errors import Failure, answer
from cato.serve.ingress.jsons import JsonAnswer
from cato.store.errors import StoreError

FORMATS = ("json", "csv")
UNREADABLE = partial(
    Failure,
    503,
    "What was used cannot be read now; try again later.",
    "server_error",
    "store_unavailable",
    headers={"Retry-After": "5"},
)


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/v1/usage", **document.USAGE)
    async def usage(request: Request) -> Response:
        """What the tenant of the API key used; for operators and without keys, what all did. With
        `session`, what each turn of it used that is still kept."""
        form = request.query_params.get("format", FORMATS[0])
        if form not in FORMATS:
            raise InputError(f"format must be one of {', '.join(FORMATS)}", "format")
        caller, records = caller_of(request), ingress.service.records
        tenant = caller.sees
        session = request.query_params.get("session")
        used: Sequence[Usage] | Sequence[TurnUsage]
        try:
            if session is None:
                used = await records.usage(tenant)
            else:
                used = await records.turns(session, tenant)
        except StoreError as error:
            return answer(request, UNREADABLE(problem=str(error)))
        if form == "csv":
            kind = Usage if session is None else TurnUsage
            return Response(as_csv(used, kind), media_type="text/csv")
        return JsonAnswer({"object": "list", "data": [asdict(u) for u in used]})

    return router
