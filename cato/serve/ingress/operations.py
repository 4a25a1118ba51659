"""Endpoints for operators and load tools: health, readiness, metrics, receipts."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import AccessError
from cato.serve.ingress import document
from cato.serve.ingress.context import Ingress, caller_of
from cato.serve.ingress.errors import answer
from cato.serve.ingress.failures import Failure
from cato.serve.ingress.gate import comes_from_here
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.receipts import as_json
from cato.serve.ingress.templates import note_of

UNKNOWN_REQUEST = Failure(
    404,
    "No receipt has this request id. Use the x-request-id header of a response; a receipt appears "
    "when its task has ended, and only the newest are kept.",
    "invalid_request_error",
    "request_not_found",
    param="request_id",
)


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["operations"])

    # Uptime monitors probe with HEAD; the server leaves out the body of the answer.
    @router.head("/health", include_in_schema=False)
    @router.head("/livez", include_in_schema=False)
    @router.get("/health", responses=document.HEALTH)
    @router.get("/livez", responses=document.HEALTH)
    async def health() -> Response:
        """200 while this process is alive."""
        return JsonAnswer({"status": "ok"})

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", responses=document.READY)
    async def readyz(request: Request) -> Response:
        """200 if tasks can be served, else 503 with the reason. Only clients on the server's own
        machine get the details, and notes on what an operator should mend."""
        is_ready, reason = ingress.ready()
        if is_ready:
            notes = [reason] if reason else []
            notes += [note for pool in ingress.service.pools() if (note := note_of(pool))]
            told = {"notes": notes} if notes and comes_from_here(request) else {}
            return JsonAnswer({"status": "ready", **told})
        if not comes_from_here(request):
            reason = reason.partition("\n")[0]
        return JsonAnswer({"status": "not ready", "reason": reason}, 503, {"Retry-After": "1"})

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", response_class=Response, responses=document.METRICS)
    async def metrics(request: Request) -> Response:
        """All metrics in Prometheus' text format; operators only, since they cover all tenants.
        A tenant's own numbers are at `/v1/usage`."""
        if not caller_of(request).is_operator:
            raise AccessError(
                403, "operators_only",
                "Only operators may read metrics: create a key with `cato keys create --role "
                "operator`, or see /v1/usage for a tenant's own numbers.",
            )  # fmt: skip
        page = await ingress.service.records.metrics()
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/v1/requests/{request_id}", responses=document.RECEIPT)
    async def receipt(request: Request, request_id: str) -> Response:
        """The SLA receipt of a finished task."""
        found = await ingress.service.records.receipt(request_id, caller_of(request).sees)
        if found is None:
            return answer(request, UNKNOWN_REQUEST)
        return JsonAnswer(as_json(found))

    return router
