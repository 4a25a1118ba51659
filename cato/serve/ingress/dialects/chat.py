"""OpenAI's chat completions.

A virtual model (`cato-generation`, ...) answers one user message with its workflow; the body's
object `cato` holds its other inputs and SLA: `{"inputs": {...}, "sla": ..., "task": ...,
"deadline_ms": ...}`. A conversation, and any other model's chat, goes to the engine unchanged
(`cato.serve.ingress.chats`), except that the role `developer` becomes `system`, which templates
know.

The receipt is the object `cato` of a whole answer, of a stream's usage chunk if the client asked
for usage, or else of a task's last chunk. A direct stream without usage has it only on demand
(header `X-CATO-Receipt: 1` or `{"cato": {"receipt": true}}`), in a chunk without choices.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.serve.ingress import document
from cato.serve.ingress.answers import WrittenForm, serve_text
from cato.serve.ingress.body import flag, read_object, sub_object
from cato.serve.ingress.chat_request import ChatRequest, read_chat
from cato.serve.ingress.chats import start_model, start_task, target_of
from cato.serve.ingress.context import Ingress, request_id
from cato.serve.ingress.hints import TIERS
from cato.serve.ingress.naming import with_model
from cato.serve.ingress.relay import relay_choices, wants_receipt
from cato.wire.chat import ChatWriter
from cato.wire.choices import UsageIn
from cato.wire.endpoint import Endpoint


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", **document.CHAT)
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        body = with_model(await read_object(request, ingress.max_body_bytes))
        return await _answer(ingress, request, body)

    return router


async def _answer(ingress: Ingress, request: Request, body: dict[str, object]) -> Response:
    chat = read_chat(ingress, request, Endpoint.CHAT, body)
    writer = _writer(request, chat)
    target = target_of(ingress, request, chat)
    if target.task is not None:
        task = start_task(ingress, request, target, chat)
        form = WrittenForm(writer)
        return await serve_text(ingress, request, task, form, is_streamed=chat.is_streamed)
    has_receipt = wants_receipt(request, chat.extra)
    passed = {**chat.body, "messages": with_known_roles(chat.body["messages"])}
    task = await start_model(ingress, request, target, replace(chat, body=passed))
    return await relay_choices(
        ingress,
        request,
        task,
        writer,
        is_streamed=chat.is_streamed,
        has_receipt=has_receipt,
    )


def _writer(request: Request, chat: ChatRequest) -> ChatWriter:
    return ChatWriter(
        request_id(request),
        str(chat.body.get("model") or ""),
        int(time.time()),
        usage_in_of(chat.body),
        {"service_tier": TIERS[chat.tier][1]} if chat.tier else {},
    )


def usage_in_of(body: Mapping[str, object]) -> UsageIn:
    """Where a stream reports usage, according to `stream_options`."""
    wants_usage = flag(sub_object(body, "stream_options"), "include_usage")
    return UsageIn.OWN_CHUNK if wants_usage else UsageIn.NO_CHUNK


def with_known_roles(messages: object) -> object:
    """Messages with the role `developer` renamed to `system`, which chat templates know."""
    if not isinstance(messages, list):
        return messages
    return [
        {**m, "role": "system"} if isinstance(m, dict) and m.get("role") == "developer" else m
        for m in messages
    ]
