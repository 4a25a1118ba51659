"""Clients that send or read too slowly lose their connection, not everybody's server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from ingress_kit import COMPLETION, a_fast_pool, a_pool, running, until_idle

from cato.serve.ingress import body, exchange


def head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


async def test_a_body_that_trickles_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_WITHIN_S", 0.2)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.server() as url,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(head("/v1/completions", 1000) + b'{"model": "fast",')
        async with asyncio.timeout(20):
            answer = await reader.readuntil(b"}}")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"did not arrive within 0.2 s" in answer


async def test_a_client_that_does_not_read_its_stream_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "READ_WITHIN_S", 0.2)
    pool = a_pool("sim-fast", "fast", step_s=0.01)
    asked = {"model": "fast", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": [], "client": ("127.0.0.1", 1),
    }  # fmt: skip
    sent: list[bytes] = []
    was_asked = False

    async def receive() -> dict[str, object]:
        nonlocal was_asked
        if was_asked:
            await asyncio.Event().wait()
        was_asked = True
        return {"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}

    async def send(message: dict[str, object]) -> None:
        if len(sent) >= 3:
            await asyncio.Event().wait()  # as behind full buffers
        sent.append(bytes(message.get("body", b"")))  # type: ignore[arg-type]

    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        async with asyncio.timeout(30):
            await kit.app(scope, receive, send)  # type: ignore[arg-type]
        await until_idle(pool, within_s=5)
        (receipt,) = kit.records.receipts.values()
    assert receipt.status == "cancelled"
