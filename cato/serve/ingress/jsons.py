"""JSON responses: compact UTF-8 that never fails on text from a model or client."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from cato.wire.events import DONE_EVENT as DONE_EVENT
from cato.wire.events import to_json


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
