"""`GET /v1/usage`: usage and cost by day, tenant, API key, task and model, or by session turn."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.core.tenancy import CardTime, Usage
from cato.serve.access.usage import (
    GROUPS,
    TURN_COLUMNS,
    Row,
    as_csv,
    columns,
    days_of,
    groups_of,
    summed,
    turn_rows,
)
from cato.serve.ingress import document
from cato.serve.ingress.context import Ingress, caller_of
from cato.serve.ingress.jsons import JsonAnswer

FORMATS = ("json", "csv")


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/v1/usage", **document.USAGE)
    async def usage(request: Request) -> Response:
        """Usage and cost of the API key's tenant; of all tenants for operators and when no keys are
        configured. `by` groups the rows. With `session`: one row for each of its turns that is
        still stored."""
        form = request.query_params.get("format", FORMATS[0])
        if form not in FORMATS:
            raise InputError(f"format must be one of {', '.join(FORMATS)}", "format")
        tenant = caller_of(request).sees
        session = request.query_params.get("session")
        if session is None:
            asked = request.query_params
            by = groups_of(asked.get("by", ",".join(GROUPS)), "by")
            days = days_of(asked.get("since"), asked.get("until"))
            names: Sequence[str] = columns(by)
            rows: Sequence[Row] = await _rows(ingress, tenant, days, by)
        else:
            names = TURN_COLUMNS
            rows = turn_rows(await ingress.service.records.turns(session, tenant))
        if form == "csv":
            headers = {"Content-Disposition": 'attachment; filename="cato-usage.csv"'}
            return Response(as_csv(rows, names), media_type="text/csv", headers=headers)
        return JsonAnswer({"object": "list", "data": rows, "currency": ingress.prices.currency})

    return router


async def _rows(
    ingress: Ingress, tenant: str | None, days: tuple[str, str], by: tuple[str, ...]
) -> list[Row]:
    records, prices = ingress.service.records, ingress.prices
    used = await records.usage(tenant, *days)
    of_all: Sequence[Usage] = used
    held: Sequence[CardTime] = ()
    if prices.card_hour is not None:
        held = await records.card_time(*days)
        of_all = used if tenant is None else await records.usage(None, *days)
    pools = ingress.service.pools()
    bases = {str(group[0]): str(p.model.name) for p in pools for group in p.model.groups}
    return summed(used, prices.costs(used, of_all, held, bases), by)
