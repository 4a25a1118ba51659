"""Reads a chat of any dialect once: the typed conversation, and every field that CATO acts on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

from cato.serve.ingress.body import cato_of, flag
from cato.serve.ingress.clients import Client, client_of
from cato.serve.ingress.context import Ingress
from cato.serve.ingress.hints import tier_of
from cato.serve.ingress.limits import max_tokens_of, stops_of
from cato.serve.ingress.naming import pools_behind
from cato.wire.conversation import Conversation
from cato.wire.endpoint import Endpoint
from cato.wire.reading import conversation_of
from cato.wire.stable import LATE_SYSTEM, stable

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
