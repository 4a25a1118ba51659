"""A light HTTP client that times streamed completions."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

import aiohttp

from cato.core.errors import CatoError

TIMEOUT = aiohttp.ClientTimeout(total=120.0)
DONE = b"data: [DONE]"
_WORDS = ("value", "item", "result", "total", "count", "index", "name", "key", "node", "path")


@dataclass(frozen=True, slots=True)
class Place:
    """Address of an arm: an HTTP URL, or a path on a Unix socket."""

    url: str
    model: str
    socket: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timing:
    """One request as seen by the client, in seconds. `ttft_s`: first event with text."""

    ttft_s: float
    e2e_s: float
    request_id: str


class BenchError(CatoError):
    """An arm did not answer correctly, so its numbers would mean nothing."""


class Prompts:
    """Short, distinct prompts of code, reproducible by seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._number = itertools.count()

    def next(self) -> str:
        words = " ".join(self._random.choices(_WORDS, k=6))
        return f"# {next(self._number)}: {words}\ndef {self._random.choice(_WORDS)}("


class Client:
    """Keep-alive connections to one place. Use it as an async context manager."""

    def __init__(self, place: Place, output_tokens: int) -> None:
        self._place = place
        self._fixed = {
            "model": place.model,
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector: aiohttp.BaseConnector
        if self._place.socket is not None:
            connector = aiohttp.UnixConnector(path=self._place.socket, limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0)
        headers = {"Content-Type": "application/json", **self._place.headers}
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=TIMEOUT, headers=headers, auto_decompress=False
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None, "used outside its context"
        await self._session.close()

    async def complete(self, prompt: str) -> Timing:
        """One streamed completion; raise `BenchError` if it is incomplete."""
        assert self._session is not None, "used outside its context"
        data = json.dumps({**self._fixed, "prompt": prompt}).encode()
        first_s, seen = 0.0, b""
        started_s = time.perf_counter()
        async with self._session.post(self._place.url, data=data) as response:
            if response.status != 200:
                words = (await response.read())[:500].decode(errors="replace")
                raise BenchError(f"{self._place.url} answered {response.status}: {words}")
            async for part in response.content.iter_any():
                if not first_s:
                    seen += part
                    if _has_text(seen):
                        first_s = time.perf_counter()
                else:
                    seen = part if len(part) > 64 else seen[-64:] + part
            ended_s = time.perf_counter()
        if not first_s or DONE not in seen:
            raise BenchError(
                f"{self._place.url} sent an incomplete stream; its end: {seen[-200:]!r}"
            )
        request_id = response.headers.get("x-request-id", "")
        return Timing(first_s - started_s, ended_s - started_s, request_id)

    async def block(self, prompts: list[str], concurrency: int) -> list[Timing]:
        """All `prompts`, `concurrency` at a time."""
        waiting = iter(prompts)
        timings: list[Timing] = []

        async def work() -> None:
            for prompt in waiting:
                timings.append(await self.complete(prompt))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(work())
        return timings


def _has_text(seen: bytes) -> bool:
    """Whether the data so far contains a complete event with text."""
    for event in seen.split(b"\n\n")[:-1]:
        if event.startswith(b"data: ") and event != DONE:
            choices = json.loads(event[6:]).get("choices")
            if choices and choices[0].get("text"):
                return True
    return False
