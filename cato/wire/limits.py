"""The fields that limit an answer's tokens in each dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPLETION_TOKENS = 16
"""vLLM's limit of a completion without one; other answers may go on to the context's end."""
MOST_ERROR = 1.3
"""Factor by which an estimate of a prompt's tokens may be wrong, either way."""
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MIN_THINKING_TOKENS = 1024
"""The smallest thinking budget in Anthropic's API and in vLLM's."""


def limits_of(body: Mapping[str, Any]) -> dict[str, int]:
    """The fields of `body` that limit its output, with their values."""
    return {name: limit for name in LIMIT_FIELDS if isinstance(limit := body.get(name), int)}


def with_limits(body: Mapping[str, Any], limits: Mapping[str, int]) -> dict[str, Any]:
    """`body` with these limit fields, and with every field that must not exceed them lowered too.

    An engine refuses `min_tokens` above the limit, and a thinking budget that is not below it. If
    the limits do not change, neither does anything else: the engine tells the client that its own
    fields contradict each other.
    """
    changed = {**body, **limits}
    if all(body.get(name) == limit for name, limit in limits.items()):
        return changed
    most = min(limits.values())
    if isinstance(least := body.get("min_tokens"), int):
        changed["min_tokens"] = min(least, most)
    thinking = body.get("thinking")
    budget = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
    if isinstance(thinking, Mapping) and isinstance(budget, int) and budget >= most:
        changed["thinking"] = {**thinking, "budget_tokens": most - 1}
        if most <= MIN_THINKING_TOKENS:  # without the field the model thinks as it does by default
            del changed["thinking"]
    return changed


def shortened(body: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """`body` for the rest of an answer that already has `tokens`; its limit is at least 1."""
    rest = {name: max(1, limit - tokens) for name, limit in limits_of(body).items()}
    if isinstance(least := body.get("min_tokens"), int):
        body = {**body, "min_tokens": max(0, least - tokens)}
    return with_limits(body, rest)
