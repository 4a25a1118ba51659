"""Endpoints that generate nothing: tokenize, detokenize, embeddings, score and rerank.

Bodies and answers are the engine's own; 404 if the engine does not support an endpoint.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.engines.base import Endpoint
from cato.serve.ingress import document
from cato.serve.ingress.body import cato_of, read_object
from cato.serve.ingress.calls import engine_body, other_prompt, start_call, whole_call
from cato.serve.ingress.context import Ingress
from cato.serve.ingress.fill import call_slo_of
from cato.serve.ingress.hints import tier_of
from cato.serve.ingress.naming import GENERATION, model_of_task, resolve
from cato.serve.service import ModelCall


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["engines"])

    @router.post("/tokenize", **document.TOKENIZE)
    async def tokenize(request: Request) -> Response:
        """Tokenize a prompt or messages."""
        return await _passed(ingress, request, Endpoint.TOKENIZE)

    @router.post("/detokenize", **document.DETOKENIZE)
    async def detokenize(request: Request) -> Response:
        """Convert tokens to text."""
        return await _passed(ingress, request, Endpoint.DETOKENIZE)

    @router.post("/v1/embeddings", **document.EMBEDDINGS)
    async def embeddings(request: Request) -> Response:
        """Embed texts with a deployed embedding model."""
        return await _passed(ingress, request, Endpoint.EMBEDDINGS)

    @router.post("/score", **document.SCORE, include_in_schema=False)
    @router.post("/v1/score", **document.SCORE)
    async def score(request: Request) -> Response:
        """Score pairs of texts with a deployed scoring model, in vLLM's form."""
        return await _passed(ingress, request, Endpoint.SCORE)

    @router.post("/rerank", **document.RERANK, include_in_schema=False)
    @router.post("/v2/rerank", **document.RERANK, include_in_schema=False)
    @router.post("/v1/rerank", **document.RERANK)
    async def rerank(request: Request) -> Response:
        """Rank documents by relevance to a query, in Jina's and Cohere's form."""
        return await _passed(ingress, request, Endpoint.RERANK)

    return router


async def _passed(ingress: Ingress, request: Request, endpoint: Endpoint) -> Response:
    body = await read_object(request, ingress.max_body_bytes)
    extra = cato_of(body)
    target = resolve(ingress, request, body.get("model"), extra, GENERATION)
    model = target.model
    if target.task is not None:
        model = model_of_task(ingress, request, target.task)
    passed = engine_body(body, is_streamed=False)
    slo = call_slo_of(request, tier_of(body), extra)
    call = ModelCall(model, endpoint, passed, other_prompt(passed), slo=slo)
    return await whole_call(ingress, request, await start_call(ingress, request, call))
