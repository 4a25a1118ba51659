"""The fields that limit an answer's tokens in each dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPLETION_TOKENS = 16
"""vLLM's limit of a completion without one; other answers may go on to the context's end."""
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def limits_of(body: Mapping[str, Any]) -> dict[str, int]:
    """The fields of `body` that limit its output, with their values."""
    return {name: limit for name in LIMIT_FIELDS if isinstance(limit := body.get(name), int)}


def shortened(body: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """`body` for the rest of an answer that already has `tokens`; its limit is at least 1."""
    rest = {name: max(1, limit - tokens) for name, limit in limits_of(body).items()}
    if isinstance(least := body.get("min_tokens"), int):
        rest["min_tokens"] = max(0, least - tokens)
    return {**body, **rest}
