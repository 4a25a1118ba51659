"""Output token limits: the server's caps, and the client's `max_tokens` below them."""

from __future__ import annotations

from collections.abc import Mapping

from cato.core.errors import InputError
from cato.core.topology import OutputCaps
from cato.engines.base import Endpoint
from cato.wire.limits import MOST_ERROR, with_limits

# Prompt tokens are estimated. Factors by which the estimate may be wrong: when the prompt came as
# tokens, when an engine counted the previous turn, for any other prompt, and when the client sets
# no limit.
EXACT = 1.0
CORRECTED = 1.06
ESTIMATED = MOST_ERROR
SURE_FACTOR = 2.0

_FIELDS = {
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
}


def max_tokens_of(body: Mapping[str, object], *fields: str) -> int | None:
    """The first of `fields` that is set; raise `InputError` unless it is a positive integer."""
    for field in fields:
        value = body.get(field)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{field} must be a whole number above 0", field)
        return value
    return None


def stops_of(body: Mapping[str, object], field: str = "stop") -> tuple[str, ...]:
    """The stop strings of a body, which may hold none, one or a list."""
    value = body.get(field)
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise InputError(f"{field} must be a string or a list of strings", field)
    return tuple(s for s in stops if s)


def limited(
    body: Mapping[str, object],
    endpoint: Endpoint,
    prompt_tokens: int,
    context_tokens: int,
    caps: OutputCaps,
    *,
    factor: float = ESTIMATED,
) -> tuple[dict[str, object], int | None]:
    """A direct call's body with a token limit that fits, and that limit.

    The limit is cut to the server's cap and to the context that the prompt may leave, since clients
    send the largest value they know; fields that must not exceed it follow (`with_limits`). vLLM
    0.32 lowers it to what the prompt really leaves; an engine that refuses it is asked again
    (`with_room`). A body without a limit gets the cap if it certainly fits; otherwise None: the
    answer ends at the context's end. `factor`: how wrong `prompt_tokens` may be.
    """
    if endpoint is Endpoint.COMPLETIONS and _asks_only_for_its_prompt(body):
        return dict(body), 1  # vLLM generates one token and leaves it out
    fields = _FIELDS[endpoint]
    cap = caps.completion
    if endpoint is not Endpoint.COMPLETIONS:
        cap = caps.agent if body.get("tools") else caps.chat
    room = int(context_tokens - prompt_tokens / factor)
    asked = max_tokens_of(body, *fields)
    if asked is not None:
        # If the prompt is estimated too long, the engine decides.
        limit = min(asked, cap, max(room, context_tokens // 4, 1))
        lowered = {f: min(limit, n) for f in fields if isinstance(n := body.get(f), int)}
        return with_limits(body, lowered), limit
    has_default = endpoint is Endpoint.COMPLETIONS  # vLLM's own is 16 tokens
    if has_default or context_tokens - SURE_FACTOR * prompt_tokens < cap:
        return dict(body), None
    return with_limits(body, {fields[0]: cap}), cap


def _asks_only_for_its_prompt(body: Mapping[str, object]) -> bool:
    """Whether a completion returns its prompt and nothing else, usually with `logprobs`."""
    limit = body.get("max_tokens")
    return body.get("echo") is True and type(limit) is int and limit == 0
