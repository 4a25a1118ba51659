"""Sends the head of an event stream and its first bytes in one write.

uvicorn writes them apart. HAProxy and the client would wake up twice before the first token.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

FOLLOWED = "cato.followed"
"""Key of an `http.response.start` message: the response's first bytes follow at once."""


def join_heads() -> None:
    """Have this process' uvicorn hold back a head with the key `FOLLOWED` until they do."""
    send = RequestResponseCycle.send

    async def joined(self: Any, message: Any) -> None:
        if FOLLOWED in message and not isinstance(self.transport, _HeadFirst):
            self.transport = _HeadFirst(self.transport)
        await send(self, message)

    RequestResponseCycle.send = joined  # type: ignore[method-assign]


class _HeadFirst:
    """The transport of one response, which begins with its head."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head: bytes | None = None  # empty once it was written

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
            return
        head, self._head = self._head, b""
        self._transport.write(head + data if head else data)

    def close(self) -> None:
        if self._head:
            self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
