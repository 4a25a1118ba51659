"""How long an answer may get: the server's caps, and what a client asks for below them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cato.core.errors import InputError
from cato.core.topology import OutputCaps
from cato.core.workflow import LlmSettings, Node, Workflow
from cato.engines.base import Endpoint
from cato.serve.pools import PoolInfo
from cato.serve.prompts import body_text

# A prompt is estimated; an engine refuses a limit that does not fit behind it.
SURE_FACTOR = 2.0

_FIELDS = {
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
}


def max_tokens_of(body: Mapping[str, object], *fields: str) -> int | None:
    """The first of `fields` that is set; raise `InputError` unless it is a whole number above 0."""
    for field in fields:
        value = body.get(field)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{field} must be a whole number above 0", field)
        return value
    return None


def stops_of(body: Mapping[str, object], field: str = "stop") -> tuple[str, ...]:
    """The stop strings of a body: none, one or a list."""
    value = body.get(field)
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise InputError(f"{field} must be a string or a list of strings", field)
    return tuple(s for s in stops if s)


def shortened(workflow: Workflow, max_tokens: int | None, stops: tuple[str, ...]) -> Workflow:
    """`workflow` with answers of at most `max_tokens` that also end at `stops`.

    Only the nodes whose text is the answer are changed, and only to write less.
    """
    if max_tokens is None and not stops:
        return workflow
    answering = {*workflow.stream, *workflow.output}

    def changed(node: Node) -> Node:
        settings = node.settings
        if node.id not in answering or not isinstance(settings, LlmSettings):
            return node
        limit = min(settings.max_tokens, max_tokens or settings.max_tokens)
        extra = dict(settings.extra or {})
        if stops:
            extra["stop"] = [*stops_of(extra), *stops]
        return replace(node, settings=replace(settings, max_tokens=limit, extra=extra))

    return replace(workflow, nodes=tuple(map(changed, workflow.nodes)))


def capped(
    body: dict[str, object], endpoint: Endpoint, pool: PoolInfo, caps: OutputCaps
) -> dict[str, object]:
    """A direct call's body with the server's cap.

    A body without a limit gets the cap where it surely fits; else the context ends the answer.
    """
    fields = _FIELDS[endpoint]
    cap = caps.completion
    if endpoint is not Endpoint.COMPLETIONS:
        cap = caps.agent if body.get("tools") else caps.chat
    context_tokens = pool.profile.context_tokens
    room = int(context_tokens - SURE_FACTOR * pool.profile.count_tokens(body_text(body)))
    if max_tokens_of(body, *fields) is not None:
        if endpoint is Endpoint.MESSAGES:
            # The limit is no choice there, so clients send the largest that they know.
            cap = min(cap, max(room, context_tokens // 4))
        lowered = {f: min(cap, n) for f in fields if isinstance(n := body.get(f), int)}
        return {**body, **lowered}
    has_default = endpoint is Endpoint.COMPLETIONS  # vLLM's own is 16 tokens
    return body if has_default or room < cap else {**body, fields[0]: cap}
