"""OpenAI's Responses, used by Codex. Nothing is stored: every request carries its whole input.

A virtual model answers one user message with its workflow. A conversation, and any other model's
request, goes to the engine unchanged.
"""

from __future__ import annotations

import time
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.serve.ingress import document
from cato.serve.ingress.answers import WrittenForm, serve_text
from cato.serve.ingress.body import read_object
from cato.serve.ingress.chat_request import ChatRequest, read_chat
from cato.serve.ingress.chats import start_model, start_task, target_of
from cato.serve.ingress.context import Ingress, request_id
from cato.serve.ingress.dialects.chat import with_known_roles
from cato.serve.ingress.errors import answer
from cato.serve.ingress.failures import Failure
from cato.serve.ingress.hints import TIERS
from cato.serve.ingress.naming import with_model
from cato.serve.ingress.relay import relay_typed
from cato.wire.endpoint import Endpoint
from cato.wire.responses import ResponsesWriter
from cato.wire.sealed import asks, unsealed

# Fields that would need a store of earlier responses.
STATEFUL_FIELDS = ("previous_response_id", "conversation", "background", "prompt")

# What `include` asks of OpenAI's own search. vLLM refuses names of it that it does not know.
_OF_SEARCH = "web_search_call."
_STORED = (
    ("/v1/responses/{id}", ["GET", "DELETE"]),
    ("/v1/responses/{id}/cancel", ["POST"]),
    ("/v1/responses/{id}/input_items", ["GET"]),
)
NOT_STORED = Failure(
    404,
    "Responses are not stored: send the whole input with every request.",
    "invalid_request_error",
    "response_not_found",
)
NO_COMPACTION = Failure(
    404,
    "Responses cannot be compacted here: ask for a summary in a message, and send that instead of "
    "the earlier input.",
    "invalid_request_error",
    "not_supported",
)

NOT_COUNTED = Failure(
    404,
    "Tokens are not counted in this dialect: use POST /tokenize with the same messages, or "
    "POST /v1/messages/count_tokens.",
    "invalid_request_error",
    "not_supported",
)


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["openai"])

    @router.post("/v1/responses", **document.RESPONSES)
    async def responses(request: Request) -> Response:
        """Answer, with tools if the model supports them. Nothing is stored."""
        body = with_model(await read_object(request, ingress.max_body_bytes))
        return await _respond(ingress, request, body)

    async def not_stored(request: Request) -> Response:
        return answer(request, NOT_STORED)

    @router.post("/v1/responses/compact", include_in_schema=False)
    async def compact(request: Request) -> Response:
        return answer(request, NO_COMPACTION)

    @router.post("/v1/responses/input_tokens", include_in_schema=False)
    async def input_tokens(request: Request) -> Response:
        return answer(request, NOT_COUNTED)

    for path, methods in _STORED:
        router.add_api_route(path, not_stored, methods=methods, include_in_schema=False)
    return router


async def _respond(ingress: Ingress, request: Request, body: dict[str, object]) -> Response:
    for field in STATEFUL_FIELDS:
        if body.get(field):
            rule = f"{field} is not supported: responses are not stored; send the whole input"
            raise InputError(rule, field)
    if not isinstance(body.get("input"), str | list):
        raise InputError("input must be a string or a list", "input")
    body = {**body, "input": unsealed(body["input"])}
    chat = read_chat(ingress, request, Endpoint.RESPONSES, body)
    form = WrittenForm(_writer(request, chat))
    target = target_of(ingress, request, chat)
    if target.task is not None:
        task = start_task(ingress, request, target, chat)
        return await serve_text(ingress, request, task, form, is_streamed=chat.is_streamed)
    items = with_types(with_known_roles(chat.body["input"]))
    passed = {**chat.body, "input": items, "store": False}
    if isinstance(include := passed.get("include"), list):
        passed["include"] = [one for one in include if not str(one).startswith(_OF_SEARCH)]
    task = await start_model(ingress, request, target, replace(chat, body=passed))
    return await relay_typed(
        ingress,
        request,
        task,
        form,
        is_streamed=chat.is_streamed,
        last_event="response.completed",
        seals=asks(body),
        extra=_tier(chat),
    )


def with_types(items: object) -> object:
    """Items with the type of messages, which clients may leave out (opencode does). vLLM 0.32
    refuses an earlier answer without it."""
    if not isinstance(items, list):
        return items
    return [
        {**i, "type": "message"} if isinstance(i, dict) and "role" in i and not i.get("type") else i
        for i in items
    ]


def _tier(chat: ChatRequest) -> dict[str, object]:
    """The tier that serves the request, if it asks for one; the engine does not know it."""
    return {"service_tier": TIERS[chat.tier][1]} if chat.tier else {}


def _writer(request: Request, chat: ChatRequest) -> ResponsesWriter:
    body = chat.body
    asked = {**body, **_tier(chat)}
    return ResponsesWriter(
        request_id(request), str(body.get("model") or ""), int(time.time()), asked
    )
