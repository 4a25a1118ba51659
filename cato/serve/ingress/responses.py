"""OpenAI's Responses, which Codex speaks. Nothing is stored: every request brings all it is about.

A virtual model answers one user's text with its workflow. A conversation, and any other model's
request, is passed through to the engine.
"""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.engines.base import Endpoint
from cato.serve.ingress import document, virtual
from cato.serve.ingress.answers import WrittenForm, serve_text
from cato.serve.ingress.body import cato_of, flag, read_object
from cato.serve.ingress.chats import with_known_roles
from cato.serve.ingress.context import Ingress, request_id
from cato.serve.ingress.fill import Fill, call_slo_of, start_fill
from cato.serve.ingress.hints import TIERS, tier_of
from cato.serve.ingress.limits import max_tokens_of
from cato.serve.ingress.naming import chat_target
from cato.serve.ingress.typed import serve_typed_call
from cato.wire.responses import ResponsesWriter

# What would need a store of earlier responses.
STATEFUL_FIELDS = ("previous_response_id", "conversation", "background")


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["openai"])

    @router.post("/v1/responses", **document.RESPONSES)
    async def responses(request: Request) -> Response:
        """Answer, with tools if the model knows them; nothing is stored."""
        body = await read_object(request, ingress.max_body_bytes)
        return await _respond(ingress, request, body)

    return router


async def _respond(ingress: Ingress, request: Request, body: dict[str, object]) -> Response:
    for field in STATEFUL_FIELDS:
        if body.get(field):
            raise InputError(f"responses are not stored; send all of the input, not {field}", field)
    if not isinstance(body.get("input"), str | list):
        raise InputError("input must be a string or a list", "input")
    extra, is_streamed = cato_of(body), flag(body, "stream")
    target = chat_target(ingress, request, body, extra, body["input"], body.get("instructions"))
    form = _form(request, body)
    if target.task is None:
        passed = {**body, "input": with_known_roles(body["input"]), "store": False}
        return await serve_typed_call(
            ingress,
            request,
            target,
            Endpoint.RESPONSES,
            passed,
            call_slo_of(request, body, extra),
            form,
            is_streamed=is_streamed,
            last_event="response.completed",
        )
    prompt = body["input"]
    text = prompt if isinstance(prompt, str) else virtual.last_user_text(body, "input")
    fill = Fill(text, max_tokens=max_tokens_of(body, "max_output_tokens"))
    task = start_fill(ingress, request, target, fill, body, extra)
    return await serve_text(ingress, request, task, form, is_streamed=is_streamed)


def _form(request: Request, body: dict[str, object]) -> WrittenForm:
    tier = tier_of(body)
    asked = {**body, "service_tier": TIERS[tier][1]} if tier else body
    model = str(body.get("model") or "")
    return WrittenForm(ResponsesWriter(request_id(request), model, int(time.time()), asked))
