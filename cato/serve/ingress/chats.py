"""Reads a chat of any dialect once, and starts the task or model call that serves it.

The body becomes a `ChatRequest`: the typed conversation, and every field that CATO acts on. The
task or model, session, token count, prefix and SLO follow from it. The engine gets the client's
own body with stable prompts (`cato.wire.stable`), without CATO's fields, and with a token limit
that fits. Fields unknown to CATO are passed on.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request

from cato.core.errors import CatoError, InputError
from cato.core.profile import Profile
from cato.core.receipt import SlaReceipt
from cato.core.session import Prompt, Turn, TurnKind
from cato.core.session_slo import SessionShare, turn_times_s
from cato.core.slo import Slo, SloMetric
from cato.serve.executor import RunningTask
from cato.serve.ingress.body import cato_of, flag
from cato.serve.ingress.calls import engine_body, other_prompt, start_call
from cato.serve.ingress.clients import Client, client_of, turn_of
from cato.serve.ingress.context import Ingress, caller_of, whose
from cato.serve.ingress.fill import Fill, call_slo_of, start_fill
from cato.serve.ingress.hints import session_target_s, tier_of
from cato.serve.ingress.limits import limited, max_tokens_of, stops_of
from cato.serve.ingress.naming import (
    AUTO_MODEL,
    GENERATION,
    Target,
    model_of_task,
    names_a_task,
    pool_of,
    pools_behind,
    resolve,
    without_family,
)
from cato.serve.ingress.parameters import sampling_of
from cato.serve.ingress.templates import check_tools
from cato.serve.pools import PoolInfo
from cato.serve.service import CALL_DEADLINE_S, CALL_SLO, PRIOR_TURN_TOKENS, ModelCall
from cato.serve.sessions import Hashing, Reading
from cato.wire.conversation import Conversation, PartKind
from cato.wire.endpoint import Endpoint
from cato.wire.prefix import block_chars
from cato.wire.reading import conversation_of
from cato.wire.stable import LATE_SYSTEM, stable

# An agent's turn, in seconds: TTFT, from notes on what users of agents tolerate, and TPOT.
AGENT_TTFT_S = 2.0
AGENT_TPOT_S = 0.04
# If the prompt alone takes more than half of the TTFT target, or an engine step more than half of
# the TPOT, the target becomes twice the unloaded time.
UNLOADED = 2.0
# `Profile.chars_per_token` of the vocabularies that `cato.wire.counting` is fitted to.
REFERENCE_CHARS_PER_TOKEN = 3.5

_LIMITS = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
    Endpoint.COUNT_TOKENS: (),
}
_STOPS = {Endpoint.CHAT: "stop", Endpoint.MESSAGES: "stop_sequences"}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat. `body` is the client's, changed by the rules in `changes`; `extra` its object
    `cato`.

    `tier` is OpenAI's `service_tier`; empty if absent.
    """

    endpoint: Endpoint
    body: Mapping[str, object]
    conversation: Conversation
    client: Client
    extra: dict[str, object]
    is_streamed: bool
    max_tokens: int | None
    stops: tuple[str, ...]
    tier: str
    changes: tuple[str, ...] = ()

    @property
    def has_tools(self) -> bool:
        return bool(self.conversation.tools or self.conversation.deferred)


def read_chat(
    ingress: Ingress, request: Request, endpoint: Endpoint, body: dict[str, object]
) -> ChatRequest:
    """The chat in `body`; raise `InputError` naming an invalid field."""
    extra, is_streamed = cato_of(body), flag(body, "stream")
    tier = "" if endpoint in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS) else tier_of(body)
    pools, off = pools_behind(ingress, body.get("model")), ingress.prompt_rules_off
    templates = [pool.template for pool in pools]
    if pools and all(t is not None and t.takes_late_system for t in templates):
        off |= {LATE_SYSTEM}
    better, changes = stable(endpoint, body, off)
    conversation = conversation_of(endpoint, better)
    return ChatRequest(
        endpoint=endpoint,
        body=better,
        conversation=conversation,
        client=client_of(request.headers, conversation.system),
        extra=extra,
        is_streamed=is_streamed,
        max_tokens=max_tokens_of(body, *_LIMITS[endpoint]),
        stops=stops_of(body, _STOPS[endpoint]) if endpoint in _STOPS else (),
        tier=tier,
        changes=tuple(changes),
    )


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
    memory, kind = _memory_of(request, turn), f"{chat.client.name}:{model}"
    hashing = Hashing(block_chars(pool.profile.chars_per_token), model, ingress.salt_of(request))
    reading = _reading(ingress, pool, hashing, memory, kind, chat.conversation)
    body, limit = limited(
        body,
        chat.endpoint,
        reading.prompt.tokens,
        pool.profile.context_tokens,
        ingress.caps,
        is_sure=reading.is_corrected,
    )
    expected_tokens = min(limit or PRIOR_TURN_TOKENS, PRIOR_TURN_TOKENS)
    target_s = session_target_s(request, chat.extra, target.session_target_s)
    clock = _SessionClock(ingress, request, turn, memory)
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
            slo=_slo(request, chat, turn, pool, reading.prompt, expected_tokens, share),
            turn=replace(turn, think_s=think_s),
            passed=target.why,
            share=share,
            ended=ended,
        )
        return await start_call(ingress, request, call, client=chat.client)
    except (CatoError, asyncio.CancelledError):
        clock.end(is_answered=False)
        raise


@dataclass(frozen=True, slots=True)
class _SessionClock:
    """Tracks session time for one turn; calls outside the main loop are not tracked."""

    ingress: Ingress
    request: Request
    turn: Turn
    memory: str

    @property
    def _is_main(self) -> bool:
        return self.turn.kind in (TurnKind.MAIN, TurnKind.COMPACTION)

    def begin(
        self, profile: Profile, prompt: Prompt, expected_tokens: int, target_s: float | None
    ) -> tuple[float | None, SessionShare | None]:
        """Think time before the turn, and the turn's share of the session's time; each None if it
        does not apply."""
        if not self._is_main:
            return None, None
        turn = self.turn
        begun = self.ingress.session_book.begin(
            self.memory,
            turn.client,
            time.monotonic(),
            number=turn.number,
            times_s=turn_times_s(profile, prompt.tokens, prompt.new_tokens, expected_tokens),
            target_s=target_s,
            parent=_memory_of(self.request, Turn(turn.parent)) if turn.parent else "",
        )
        return begun.think_s, begun.share

    def end(self, *, is_answered: bool) -> None:
        if self._is_main:
            self.ingress.session_book.ended(self.memory, time.monotonic(), is_answered=is_answered)


def _memory_of(request: Request, turn: Turn) -> str:
    """The session's name across tenants: a digest, since it leaves the ingress. A call outside the
    main loop has its own prompt, unless it summarizes the main one."""
    is_main = turn.kind in (TurnKind.MAIN, TurnKind.COMPACTION)
    beside = "" if is_main else turn.kind.value
    name = "\0".join((caller_of(request).tenant, turn.session, beside))
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _reading(
    ingress: Ingress,
    pool: PoolInfo,
    hashing: Hashing,
    memory: str,
    kind: str,
    conversation: Conversation,
) -> Reading:
    return ingress.sessions.read(
        memory,
        tuple(conversation.sections()),
        hashing,
        kind=kind,
        scale=REFERENCE_CHARS_PER_TOKEN / pool.profile.chars_per_token,
    )


def _slo(
    request: Request,
    chat: ChatRequest,
    turn: Turn,
    pool: PoolInfo,
    prompt: Prompt,
    expected_tokens: int,
    share: SessionShare | None,
) -> Slo:
    """The SLO of a turn, from the part of its prompt that is new to the session.

    An agent gets a TTFT of 2 s and a TPOT of 40 ms; any other chat the SLO of a direct call. Both
    are raised to twice the unloaded time where that is longer. Titles are not urgent. In a session
    with a target and slack, the TTFT is extended by the turn's share of the slack.
    """
    profile = pool.profile
    is_agent = bool(chat.client.name) or chat.has_tools
    ttft_s = max(
        AGENT_TTFT_S if is_agent else CALL_SLO.target_s,
        UNLOADED * profile.first_token_s(prompt.new_tokens),
    )
    base = Slo(SloMetric.TTFT, ttft_s)
    if is_agent:
        pace_s = max(AGENT_TPOT_S, UNLOADED * profile.decode_step_s(1, prompt.tokens))
        base = replace(base, tpot_target_s=pace_s)
    if share is not None:
        answer_s = expected_tokens * min(base.tpot_target_s, AGENT_TPOT_S)
        first_s = min(share.first_token_s(base.target_s, answer_s), CALL_DEADLINE_S)
        base = replace(base, target_s=first_s)
    is_urgent = turn.kind is not TurnKind.TITLE
    return call_slo_of(
        request,
        chat.tier,
        chat.extra,
        base,
        is_urgent=is_urgent,
        expected_tokens=expected_tokens,
    )
