"""JSON and server-sent events as they are sent."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pydantic_core

Event = dict[str, Any]
"""The data of one server-sent event. For a typed event, `type` is also the event's name."""

DONE_EVENT = b"data: [DONE]\n\n"

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, for OpenAI's dialects. Not `: ping`: Continue's HTTP layer loses data that it reads
together with a comment starting with that."""

PING_EVENT = b'event: ping\ndata: {"type": "ping"}\n\n'
"""Anthropic's keep-alive."""


_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(value: object) -> bytes:
    """Compact JSON; a lone surrogate becomes '?'."""
    try:
        return pydantic_core.to_json(value)  # takes a quarter of the time
    except ValueError:  # a lone surrogate, or nested very deeply
        return _COMPACT.encode(value).encode("utf-8", "replace")


def event_bytes(event: Event) -> bytes:
    kind = event.get("type")
    name = b"" if kind is None else f"event: {kind}\n".encode()
    return b"".join((name, b"data: ", to_json(event), b"\n\n"))


def events_bytes(events: Iterable[Event]) -> bytes:
    return b"".join(map(event_bytes, events))
