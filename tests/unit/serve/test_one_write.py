"""The head of a stream leaves with its first bytes; uvicorn's private classes may change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from ingress_kit import until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cato.serve.one_write import FOLLOWED, join_heads


class Wire(asyncio.Transport):
    """Keeps each write apart."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def answered(app: Any, until_writes: int) -> Wire:
    """What `app` writes to one request."""
    config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None)
    config.load()
    protocol = HttpToolsProtocol(config, ServerState(), {})
    wire = Wire()
    protocol.connection_made(wire)  # type: ignore[arg-type]
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await until(lambda: len(wire.writes) >= until_writes, within_s=10)
    await asyncio.sleep(0)
    return wire


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestResponseCycle, "send", RequestResponseCycle.send)
    join_heads()


@pytest.mark.parametrize(("extra", "writes"), [({}, 3), ({FOLLOWED: True}, 2)])
async def test_a_head_that_is_followed_leaves_with_the_first_bytes(
    extra: dict[str, bool], writes: int
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [], **extra})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    wire = await answered(app, writes)
    assert len(wire.writes) == writes
    assert b"".join(wire.writes).startswith(b"HTTP/1.1 200")
    assert b"".join(wire.writes).endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


async def test_a_head_that_nothing_follows_is_not_lost() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [], FOLLOWED: True})

    wire = await answered(app, 1)
    assert wire.writes[0].startswith(b"HTTP/1.1 200")
    assert wire.is_closed
