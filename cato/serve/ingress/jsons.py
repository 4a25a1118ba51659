"""JSON as it leaves: compact, UTF-8, never failing on text that a model or client made up."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

DONE_EVENT = b"data: [DONE]\n\n"

# What shows that a stream lives while nothing comes. Continue's HTTP layer loses data that is read
# together with a comment that begins with `: ping`.
KEEP_ALIVE = b": keep-alive\n\n"  # OpenAI's dialects
PING_EVENT = b'event: ping\ndata: {"type": "ping"}\n\n'  # Anthropic's


def to_json(value: object) -> bytes:
    """Compact JSON; a lone surrogate becomes '?'."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def sse(value: object, event: str = "") -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n".encode() if event else b""
    return b"".join((name, b"data: ", to_json(value), b"\n\n"))


class JsonAnswer(Response):
    media_type = "application/json"

    def __init__(
        self, value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(to_json(value), status, headers)
