"""OpenAI's Responses, which Codex speaks. Nothing is stored: every request brings all it is about.

A virtual model answers the last user's text with its workflow. A request with tools, and any other
model's, is passed through to the engine.
"""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.engines.answers import Event, ResponsesAnswer
from cato.engines.base import Endpoint
from cato.serve.ingress import document, virtual
from cato.serve.ingress.answers import serve_text
from cato.serve.ingress.body import cato_of, flag, read_object
from cato.serve.ingress.chats import with_known_roles
from cato.serve.ingress.context import Ingress, request_id
from cato.serve.ingress.errors import Failure
from cato.serve.ingress.fill import Fill, call_slo_of, start_fill
from cato.serve.ingress.hints import TIERS, tier_of
from cato.serve.ingress.jsons import KEEP_ALIVE
from cato.serve.ingress.limits import max_tokens_of
from cato.serve.ingress.naming import GENERATION, Target, answering_model, resolve
from cato.serve.ingress.typed import TypedForm, serve_typed_call

# Codes that Codex knows by name: it stops, and says why.
KEPT_CODES = ("context_length_exceeded", "insufficient_quota")
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
    target = resolve(ingress, request, body.get("model"), extra, GENERATION)
    if target.task is not None and body.get("tools"):
        target = Target(model=answering_model(ingress.service.workflow(target.task)))
    form = _form(request, body)
    if target.task is None:
        passed = {**body, "input": with_known_roles(body["input"]), "store": False}
        return await serve_typed_call(
            ingress,
            request,
            target.model,
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


def _form(request: Request, body: dict[str, object]) -> TypedForm:
    tier = tier_of(body)
    asked = {**body, "service_tier": TIERS[tier][1]} if tier else body
    answer = ResponsesAnswer(
        request_id(request), str(body.get("model") or ""), int(time.time()), asked
    )
    return TypedForm(
        answer,
        receipt_in=lambda event: event["response"],
        failure_event=lambda failure: _failed(answer, failure),
        sign=KEEP_ALIVE,
    )


def _failed(answer: ResponsesAnswer, failure: Failure) -> Event:
    # The dialect knows few codes; one that is not the server's forbids a retry.
    codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
    code = codes.get(failure.status, "server_error")
    if failure.code in KEPT_CODES:
        code = failure.code
    return answer.failed(code, failure.with_numbers or failure.message)
