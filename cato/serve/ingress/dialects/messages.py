"""Anthropic's Messages, used by Claude Code, and its token counting endpoint. Nothing is stored:
every request carries its whole conversation.

A virtual model answers one user message with its workflow. A conversation, and any other model's
request, goes to the engine unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import ContextLengthError, InputError
from cato.core.profile import REFERENCE_CHARS_PER_TOKEN
from cato.core.runs import FinishRun
from cato.serve.ingress import document
from cato.serve.ingress.answers import WrittenForm, serve_text
from cato.serve.ingress.body import read_object
from cato.serve.ingress.calls import whole_call
from cato.serve.ingress.chat_request import ChatRequest, read_chat
from cato.serve.ingress.chats import session_of_chat, start_model, start_task, target_of
from cato.serve.ingress.context import Ingress, request_id
from cato.serve.ingress.errors import ANTHROPIC_ID, known_headers
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.naming import Target, model_of_task, pool_of, with_model
from cato.serve.ingress.relay import relay_typed
from cato.wire.counting import SECTION_TOKENS, estimated_tokens
from cato.wire.documents import with_plain_blocks
from cato.wire.endpoint import Endpoint
from cato.wire.messages import NO_THREADS, MessagesWriter

# Fields that would need Anthropic's own servers. Without them the model would lack a part of the
# conversation, or tools that the client counts on.
_OF_SERVERS = {
    "thread": "conversations are not stored; send all messages",
    "compaction": "ask for a summary in a message",
    "container": "nothing runs on the server; offer tools that the client runs",
    "mcp_servers": "nothing runs on the server; offer tools that the client runs",
}


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["anthropic"])

    @router.post("/v1/messages", **document.MESSAGES)
    async def messages(request: Request) -> Response:
        """Answer a conversation in Anthropic's dialect."""
        body = with_model(await read_object(request, ingress.max_body_bytes))
        _check_fields(body)
        body = with_plain_blocks(_without_tier(body))
        return _named(request, await _answer(ingress, request, body))

    @router.post("/v1/messages/count_tokens", **document.COUNT_TOKENS)
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation with the model that would answer it, even if they are
        more than its context. Costs no tokens."""
        body = with_model(await read_object(request, ingress.max_body_bytes))
        body = with_plain_blocks(_without_tier(body))
        chat = read_chat(ingress, request, Endpoint.COUNT_TOKENS, body)
        target = target_of(ingress, request, chat)
        if target.task is not None:
            session = partial(session_of_chat, request, chat)
            target = Target(model=model_of_task(ingress, request, target.task, session))
        task = await start_model(ingress, request, target, chat)
        response = await whole_call(ingress, request, task, _as_count)
        if isinstance(task.error, ContextLengthError):
            tokens = _estimate(ingress, target, chat, task.error)
            response = JsonAnswer({"input_tokens": tokens}, headers=known_headers(request))
        return _named(request, response)

    return router


def _named(request: Request, response: Response) -> Response:
    """`response` with the request's id where Anthropic's SDKs look for it."""
    response.headers[ANTHROPIC_ID] = request_id(request)
    return response


def _as_count(answer: dict[str, object], _: FinishRun) -> dict[str, object]:
    """The engine's answer; of a conversation beyond the context it comes from the tokenizer."""
    return {"input_tokens": answer["count"]} if "count" in answer else answer


def _estimate(
    ingress: Ingress, target: Target, chat: ChatRequest, refused: ContextLengthError
) -> int:
    """Tokens of a conversation that its engine found too long and could not count.

    Agents ask in order to decide how much to cut, which an error does not tell them.
    """
    scale = REFERENCE_CHARS_PER_TOKEN / pool_of(ingress, target.model).profile.chars_per_token
    sections = chat.conversation.sections()
    tokens = round(scale * sum(estimated_tokens(one) + SECTION_TOKENS for one in sections))
    return max(tokens, refused.prompt_tokens or 0, (refused.context_tokens or 0) + 1)


async def _answer(ingress: Ingress, request: Request, body: dict[str, object]) -> Response:
    chat = read_chat(ingress, request, Endpoint.MESSAGES, body)
    writer = MessagesWriter(request_id(request), str(body.get("model") or ""))
    form = WrittenForm(writer, stops=chat.stops)
    target = target_of(ingress, request, chat)
    if target.task is not None:
        task = start_task(ingress, request, target, chat)
        return await serve_text(ingress, request, task, form, is_streamed=chat.is_streamed)
    task = await start_model(ingress, request, target, chat)
    return await relay_typed(
        ingress, request, task, form, is_streamed=chat.is_streamed, last_event="message_stop"
    )


def _check_fields(body: Mapping[str, object]) -> None:
    """Raise `InputError` for a field that only Anthropic's servers could honour."""
    for field, instead in _OF_SERVERS.items():
        if body.get(field):
            code = NO_THREADS if field == "thread" else None
            raise InputError(f"{field} is not supported: {instead}", field, code)


def _without_tier(body: dict[str, object]) -> dict[str, object]:
    """Remove Anthropic's `service_tier`: it concerns Anthropic's capacity, and its values differ
    from OpenAI's."""
    return {key: value for key, value in body.items() if key != "service_tier"}
