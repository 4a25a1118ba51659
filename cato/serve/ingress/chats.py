"""Starts the task or model call that serves a chat of any dialect.

Task or model, session, token count, prefix and SLO follow from its `ChatRequest`. The engine gets
the client's own body with stable prompts (`cato.wire.stable`), without CATO's fields, and with a
token limit that fits. Fields unknown to CATO are passed on.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from starlette.requests import Request

from cato.core.errors import CatoError, InputError
from cato.core.profile import REFERENCE_CHARS_PER_TOKEN
from cato.core.receipt import SlaReceipt
from cato.core.session import Turn
from cato.serve.executor import RunningTask
from cato.serve.ingress.calls import engine_body, other_prompt, start_call
from cato.serve.ingress.chat_request import ChatRequest
from cato.serve.ingress.clients import turn_of
from cato.serve.ingress.context import Ingress, caller_of, whose
from cato.serve.ingress.fill import Fill, call_slo_of, start_fill
from cato.serve.ingress.hints import session_target_s
from cato.serve.ingress.limits import CORRECTED, ESTIMATED, limited
from cato.serve.ingress.naming import (
    AUTO_MODEL,
    GENERATION,
    Target,
    model_of_task,
    names_a_task,
    pool_of,
    resolve,
    without_family,
)
from cato.serve.ingress.parameters import sampling_of
from cato.serve.ingress.templates import check_tools
from cato.serve.ingress.turns import SessionClock, memory_of, slo_of_turn
from cato.serve.service import PRIOR_TURN_TOKENS, ModelCall
from cato.serve.sessions import Hashing
from cato.wire.conversation import PartKind
from cato.wire.endpoint import Endpoint
from cato.wire.prefix import block_chars

# Choosing a task or model


def target_of(ingress: Ingress, request: Request, chat: ChatRequest) -> Target:
    """The task or model that serves `chat`, by the table in `deployments/clients/README.md`.

    Raise what `resolve` and `model_of_task` raise, and `InputError` if the request has task inputs
    but goes to a model.
    """
    model = chat.body.get("model")
    session = partial(session_of_chat, request, chat)
    target = resolve(ingress, request, model, chat.extra, GENERATION, session=session)
    if target.task is None:
        return target
    why = _why_conversation(chat)
    is_auto = isinstance(model, str) and without_family(model) == AUTO_MODEL
    if not why and is_auto and not names_a_task(request, chat.extra):
        why = f"{AUTO_MODEL} passes chats on"
    if not why:
        return target
    if chat.extra.get("inputs"):
        raise InputError(
            f"the request goes directly to a model ({why}), and a model takes no inputs; "
            f"send one user message, or use POST /v1/tasks/{target.task}",
            "cato.inputs",
        )
    model, workflow = (
        model_of_task(ingress, request, target.task, session),
        ingress.service.workflow(target.task),
    )
    return Target(model=model, why=why, session_target_s=workflow.session_target_s)


def session_of_chat(request: Request, chat: ChatRequest) -> str:
    """The session key for rollouts; calls outside the main loop belong to the session too."""
    return f"{caller_of(request).tenant}\0{_turn_of(request, chat).session}"


def _turn_of(request: Request, chat: ChatRequest) -> Turn:
    whole = "\0".join(whose(request))
    return turn_of(chat.client, request.headers, chat.endpoint, chat.body, chat.conversation, whole)


def _why_conversation(chat: ChatRequest) -> str:
    """Why a task cannot serve the chat; empty if it holds just one text."""
    conversation = chat.conversation
    if chat.has_tools:
        return "it has tools"
    if conversation.system:
        return "it has a system prompt"
    if chat.client.name:
        return f"it comes from {chat.client.name}"
    if len(conversation.messages) > 1:
        return f"it has {len(conversation.messages)} messages"
    if conversation.messages[0].role != "user":
        return "it has no user message"
    return ""


def start_task(
    ingress: Ingress, request: Request, target: Target, chat: ChatRequest
) -> RunningTask:
    """Start the workflow of `target` with the one text of `chat`; raise `InputError` for fields
    that a task cannot honour."""
    assert target.task is not None, "the target is a model, not a task"
    (message,) = chat.conversation.messages
    if any(part.kind is not PartKind.TEXT for part in message.parts):
        raise InputError("a task takes text only; name a model to send other parts", _field(chat))
    fill = Fill(
        message.text,
        max_tokens=chat.max_tokens,
        stops=chat.stops,
        sampling=sampling_of(chat.body, target.task),
    )
    return start_fill(ingress, request, target, fill, chat.body, chat.extra, tier=chat.tier)


def _field(chat: ChatRequest) -> str:
    return "input" if chat.endpoint is Endpoint.RESPONSES else "messages"


async def start_model(
    ingress: Ingress, request: Request, target: Target, chat: ChatRequest
) -> RunningTask:
    """Call `target`'s model with the whole `chat`.

    Raise `UnknownNameError` if no pool serves the model, and `InputError` if its chat template
    drops the request's tools.
    """
    pool = pool_of(ingress, target.model)
    check_tools(pool, chat.body)
    model = pool.model.called(target.model)
    turn = replace(_turn_of(request, chat), changes=chat.changes)
    body = engine_body(chat.body, is_streamed=chat.is_streamed)
    if not chat.endpoint.generates:
        prompt = other_prompt(body)
        slo = call_slo_of(request, chat.tier, chat.extra)
        call = ModelCall(
            target.model, chat.endpoint, body, prompt, slo=slo, turn=turn, passed=target.why
        )
        return await start_call(ingress, request, call, client=chat.client)
    memory, kind = memory_of(request, turn), f"{chat.client.name}:{model}"
    hashing = Hashing(block_chars(pool.profile.chars_per_token), model, ingress.salt_of(request))
    sections = tuple(chat.conversation.sections())
    scale = REFERENCE_CHARS_PER_TOKEN / pool.profile.chars_per_token
    reading = ingress.sessions.read(memory, sections, hashing, kind=kind, scale=scale)
    body, limit = limited(
        body,
        chat.endpoint,
        reading.prompt.tokens,
        pool.profile.context_tokens,
        ingress.caps,
        factor=CORRECTED if reading.is_corrected else ESTIMATED,
    )
    expected_tokens = min(limit or PRIOR_TURN_TOKENS, PRIOR_TURN_TOKENS)
    target_s = session_target_s(request, chat.extra, target.session_target_s)
    clock = SessionClock(ingress, request, turn, memory)
    think_s, share = clock.begin(pool.profile, reading.prompt, expected_tokens, target_s)

    def ended(receipt: SlaReceipt) -> None:
        for node in receipt.nodes:
            if node.llm is not None and node.llm.prompt_tokens > 0:
                ingress.sessions.learn(memory, kind, reading, node.llm.prompt_tokens)
        clock.end(is_answered=receipt.status == "done")

    try:
        call = ModelCall(
            target.model,
            chat.endpoint,
            body,
            replace(reading.prompt, session=memory),
            is_streamed=chat.is_streamed,
            expected_tokens=expected_tokens,
            max_tokens=limit,
            slo=slo_of_turn(request, chat, turn, pool, reading.prompt, expected_tokens, share),
            turn=replace(turn, think_s=think_s),
            passed=target.why,
            share=share,
            ended=ended,
        )
        return await start_call(ingress, request, call, client=chat.client)
    except (CatoError, asyncio.CancelledError):
        clock.end(is_answered=False)
        raise
