"""Anthropic's Messages, which Claude Code speaks, and the count of their tokens.

A virtual model answers one user's text with its workflow. A conversation, and any other model's
request, is passed through to the engine.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.engines.base import Endpoint
from cato.serve.ingress import document, virtual
from cato.serve.ingress.answers import WrittenForm, serve_text
from cato.serve.ingress.body import cato_of, flag, read_object
from cato.serve.ingress.calls import start_call, whole_call
from cato.serve.ingress.context import Ingress, request_id
from cato.serve.ingress.fill import Fill, call_slo_of, start_fill
from cato.serve.ingress.limits import max_tokens_of, stops_of
from cato.serve.ingress.naming import Target, answering_model, chat_target
from cato.serve.ingress.typed import serve_typed_call
from cato.wire.messages import MessagesWriter


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
        target = _target(ingress, request, body, extra)
        model = target.model
        if target.task is not None:
            model = answering_model(ingress.service.workflow(target.task))
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
    form = WrittenForm(MessagesWriter(request_id(request), str(body.get("model") or "")))
    if target.task is None:
        return await serve_typed_call(
            ingress,
            request,
            target,
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
    return chat_target(ingress, request, body, extra, body["messages"], body.get("system"))


def _without_tier(body: dict[str, object]) -> dict[str, object]:
    """Anthropic's `service_tier` is about its own capacity, with other values than OpenAI's."""
    return {key: value for key, value in body.items() if key != "service_tier"}
