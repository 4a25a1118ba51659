"""The HTTP client of benchmarks: streamed requests, with the times that a user would see."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, Self, TypeVar

import aiohttp

from cato.core.errors import CatoError

_PROBLEM_CHARS = 300
LEFT = "the client left: it had no text within its patience"
"""`Answer.problem` of such a request."""
_WORDS = ("value", "item", "result", "total", "count", "index", "name", "key", "node", "path")
T = TypeVar("T")
R = TypeVar("R")


def drawn_words(draw: random.Random, count: int) -> str:
    """Words for a distinct prompt, separated by spaces."""
    return " ".join(draw.choices(_WORDS, k=count))


class BenchError(CatoError):
    """An arm did not answer correctly, so its numbers would mean nothing."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a stream's text begins, given all bytes so far, and which bytes it ends with."""

    has_begun: Callable[[bytes], bool]
    end: bytes


def _has_text(seen: bytes) -> bool:
    """Whether the data contains a complete event with text."""
    for event in seen.split(b"\n\n")[:-1]:
        if event.startswith(b"data: {"):
            for choice in json.loads(event[6:]).get("choices", ()):
                if choice.get("text") or choice.get("delta", {}).get("content"):
                    return True
    return False


OPENAI = Form(_has_text, b"data: [DONE]")
TASK = Form(lambda seen: b"event: text\n" in seen, b"event: done\n")


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. `sent_s`, `first_s` (first text; nan: none came) and `ended_s` are
    `time.perf_counter`s; `problem`: why it is incomplete; `retry_after_s`: of a refusal, when to
    ask again.
    """

    sent_s: float
    first_s: float
    ended_s: float
    content: bytes = b""
    problem: str = ""
    request_id: str = ""
    retry_after_s: float = 0.0


class HttpClient:
    """Keep-alive connections, over TCP or a Unix socket. Use it as an async context manager.

    `timeout_s` is that of a whole answer.
    """

    def __init__(self, timeout_s: float, socket: str | None = None) -> None:
        self._timeout_s, self._socket = timeout_s, socket
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector: aiohttp.BaseConnector = (
            aiohttp.TCPConnector(limit=0)
            if self._socket is None
            else aiohttp.UnixConnector(path=self._socket, limit=0)
        )
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None, "used outside its context"
        await self._session.close()

    async def stream(
        self,
        url: str,
        body: Mapping[str, object],
        headers: Mapping[str, str],
        form: Form = OPENAI,
        patience_s: float = inf,
    ) -> Answer:
        """Ask for a stream and read it to its end; leave when there is no text after `patience_s`.
        Never raises for what the server does."""
        assert self._session is not None, "used outside its context"
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        sent_s, first_s, content = time.perf_counter(), nan, bytearray()
        patience = asyncio.timeout(None if patience_s == inf else patience_s)
        try:
            async with patience, self._session.post(url, data=data, headers=headers) as response:
                async for part in response.content.iter_any():
                    content += part
                    if first_s != first_s and form.has_begun(bytes(content)):
                        first_s = time.perf_counter()
                        patience.reschedule(None)
                ended_s = time.perf_counter()
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = LEFT if patience.expired() else repr(error)
            return Answer(sent_s, first_s, time.perf_counter(), bytes(content), problem)
        problem = ""
        if response.status != 200 or form.end not in content:
            end = content[-_PROBLEM_CHARS:].decode(errors="replace")
            problem = f"{response.status}, incomplete answer; its end: {end}"
        id = response.headers.get("x-request-id", "")
        again_s = _retry_after_s(response.headers.get("Retry-After", ""))
        return Answer(sent_s, first_s, ended_s, bytes(content), problem, id, again_s)


def _retry_after_s(header: str) -> float:
    """0 for a date, which no server of a benchmark sends on purpose, and for no header."""
    return float(header) if header.replace(".", "", 1).isdigit() else 0.0


async def events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any] | None, None]:
    """The events of an OpenAI stream as they arrive, None for its end marker; comments left out."""
    rest = b""
    async for part in response.content.iter_any():
        *blocks, rest = (rest + part).split(b"\n\n")
        for block in blocks:
            if not block.startswith(b":"):
                yield None if block == OPENAI.end else json.loads(block.removeprefix(b"data: "))


async def at_due_times(
    items: Iterable[T],
    arrived_at_s: Callable[[T], float],
    send: Callable[[T, float], Awaitable[R]],
) -> list[R]:
    """Send each item at its time from now, whatever happened to the others; `send` also gets that
    time as a `time.perf_counter`. Results are in order of the items.
    """
    start_s = time.perf_counter()

    async def one(item: T) -> R:
        due_s = start_s + arrived_at_s(item)
        await asyncio.sleep(due_s - time.perf_counter())
        return await send(item, due_s)

    return list(await asyncio.gather(*map(one, items)))


async def some_at_a_time(
    items: Sequence[T], concurrency: int, send: Callable[[T], Awaitable[R]]
) -> list[R]:
    """Send all items, `concurrency` at a time; results are in order of their ends."""
    waiting = iter(items)
    results: list[R] = []

    async def work() -> None:
        for item in waiting:
            results.append(await send(item))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(items))):
            group.create_task(work())
    return results
