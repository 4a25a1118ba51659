"""Stands between an agent and CATO, and keeps what each said. It can cut one stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

MAX_BODY_BYTES = 64 << 20
# Of the connection between two clients of HTTP, not of a message.
HOP_HEADERS = frozenset({"host", "connection", "transfer-encoding", "content-length", "keep-alive"})
SESSION = web.AppKey("session", aiohttp.ClientSession)
# Answers are read as text.
PLAIN = {"Accept-Encoding": "identity"}

# A piece of text in an event; other fields of these names are longer texts or none.
_WORDS = re.compile(rb'"(?:content|text|delta)":"((?:[^"\\]|\\.)*)"')


@dataclass
class Exchange:
    """A request as the client sent it, and its answer as far as the client got it."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    begun_s: float
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    was_cut: bool = False
    ended_s: float = 0.0

    @property
    def request_id(self) -> str:
        return self.answer_headers.get("x-request-id", "")

    @property
    def has_tools(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("tools"))

    def __str__(self) -> str:
        return f"{self.number}: {self.method} {self.path} -> {self.status} ({self.request_id})"


@dataclass
class Recorder:
    """`cut_at`: the first stream that has said this is cut there."""

    upstream: str
    url: str = ""
    cut_at: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def calls(self) -> list[Exchange]:
        """Those that have bodies in JSON."""
        return [e for e in self.exchanges if isinstance(e.body, dict)]

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        exchange = Exchange(
            number=len(self.exchanges),
            method=request.method,
            path=request.path,
            headers={k.lower(): v for k, v in request.headers.items()},
            body=_json(raw),
            begun_s=time.monotonic(),
        )
        self.exchanges.append(exchange)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        headers = {k: v for k, v in headers.items() if k.lower() != "accept-encoding"} | PLAIN
        session = request.app[SESSION]
        url = f"{self.upstream}{request.path_qs}"
        async with session.request(request.method, url, data=raw, headers=headers) as answer:
            exchange.status = answer.status
            exchange.answer_headers = {k.lower(): v for k, v in answer.headers.items()}
            passed = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            try:
                with contextlib.suppress(ConnectionResetError):  # the client left
                    async for piece in answer.content.iter_any():
                        exchange.answer += piece
                        await response.write(piece)
                        if self.cut_at and self.cut_at in spoken(exchange.answer):
                            self.cut_at = ""
                            exchange.was_cut = True
                            assert request.transport is not None
                            request.transport.abort()
                            return response
                    await response.write_eof()
            finally:
                exchange.ended_s = time.monotonic()
        return response

    @contextmanager
    def running(self) -> Iterator[Recorder]:
        """In a thread of its own, on a free port of loopback."""
        loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def start() -> web.AppRunner:
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
            app[SESSION] = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
            app.router.add_route("*", "/{path:.*}", self._pass_on)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            ready.set()
            return runner

        async def stop(runner: web.AppRunner) -> None:
            await runner.app[SESSION].close()
            await runner.cleanup()

        def run() -> None:
            asyncio.set_event_loop(loop)
            runner = loop.run_until_complete(start())
            loop.run_forever()
            loop.run_until_complete(stop(runner))
            loop.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(30), "the recorder did not start"
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)


def spoken(raw: bytes) -> str:
    """The words of a stream's events, in any dialect, one after the other."""
    return "".join(json.loads(b'"' + piece + b'"') for piece in _WORDS.findall(raw))


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None
