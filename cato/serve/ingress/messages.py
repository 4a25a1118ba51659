"""Anthropic's Messages, which Claude Code speaks, and the count of their tokens.

A virtual model answers the last user's text with its workflow. A request with tools, and any other
model's, is passed through to the engine.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.engines.answers import Event, MessagesAnswer
from cato.engines.base import Endpoint
from cato.serve.ingress import document, virtual
from cato.serve.ingress.answers import serve_text
from cato.serve.ingress.body import cato_of, flag, read_object
from cato.serve.ingress.calls import start_call, whole_call
from cato.serve.ingress.context import Ingress, request_id
from cato.serve.ingress.errors import Failure
from cato.serve.ingress.fill import Fill, call_slo_of, start_fill
from cato.serve.ingress.jsons import PING_EVENT
from cato.serve.ingress.limits import max_tokens_of, stops_of
from cato.serve.ingress.naming import GENERATION, Target, answering_model, resolve
from cato.serve.ingress.typed import TypedForm, serve_typed_call


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["anthropic"])

    @router.post("/v1/messages", **document.MESSAGES)
    async def messages(request: Request) -> Response:
        """Answer a conversation in Anthropic's dialect."""
        body = await read_object(request, ingress.max_body_bytes)
        return await _answer(ingress, request, _without_tier(body))

    @router.post("/v1/messages/count_tokens", **document.COUNT_TOKENS)
    async def count_tokens(request: Request) -> Response:
        """The tokens of a conversation, counted by the model that would answer it."""
        body = _without_tier(await read_object(request, ingress.max_body_bytes))
        extra = cato_of(body)
        model = _called_model(ingress, _target(ingress, request, body, extra))
        slo = call_slo_of(request, body, extra)
        task = start_call(
            ingress, request, model, Endpoint.COUNT_TOKENS, body, slo, is_streamed=False
        )
        return await whole_call(ingress, request, task)

    return router


async def _answer(ingress: Ingress, request: Request, body: dict[str, object]) -> Response:
    extra, is_streamed = cato_of(body), flag(body, "stream")
    target = _target(ingress, request, body, extra)
    max_tokens = max_tokens_of(body, "max_tokens")
    answer = MessagesAnswer(request_id(request), str(body.get("model") or ""))
    form = TypedForm(answer, receipt_in=lambda event: event, failure_event=_failed, sign=PING_EVENT)
    if target.task is None or body.get("tools"):
        return await serve_typed_call(
            ingress,
            request,
            _called_model(ingress, target),
            Endpoint.MESSAGES,
            body,
            call_slo_of(request, body, extra),
            form,
            is_streamed=is_streamed,
            last_event="message_stop",
        )
    fill = Fill(
        virtual.last_user_text(body), max_tokens=max_tokens, stops=stops_of(body, "stop_sequences")
    )
    task = start_fill(ingress, request, target, fill, body, extra)
    return await serve_text(ingress, request, task, form, is_streamed=is_streamed)


def _target(
    ingress: Ingress, request: Request, body: dict[str, object], extra: dict[str, object]
) -> Target:
    if not isinstance(body.get("messages"), list):
        raise InputError("messages must be a list", "messages")
    return resolve(ingress, request, body.get("model"), extra, GENERATION)


def _called_model(ingress: Ingress, target: Target) -> str:
    if target.task is None:
        return target.model
    return answering_model(ingress.service.workflow(target.task))


def _without_tier(body: dict[str, object]) -> dict[str, object]:
    """Anthropic's `service_tier` is about its own capacity, with other values than OpenAI's."""
    return {key: value for key, value in body.items() if key != "service_tier"}


def _failed(failure: Failure) -> Event:
    return failure.as_anthropic()
