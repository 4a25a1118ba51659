"""Times streamed completions of the arms of `cato bench overhead`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from cato.lab.client import BenchError, HttpClient, drawn_words, some_at_a_time

TIMEOUT_S = 120.0


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


class Prompts:
    """Short, distinct prompts of code, reproducible by seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._number = itertools.count()

    def next(self) -> str:
        words, name = drawn_words(self._random, 6), drawn_words(self._random, 1)
        return f"# {next(self._number)}: {words}\ndef {name}("


class Client(HttpClient):
    """Keep-alive connections to one place. Use it as an async context manager."""

    def __init__(self, place: Place, output_tokens: int) -> None:
        super().__init__(TIMEOUT_S, place.socket)
        self._place = place
        self._fixed = {
            "model": place.model,
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }

    async def complete(self, prompt: str) -> Timing:
        """One streamed completion; raise `BenchError` if it is incomplete."""
        place = self._place
        answer = await self.stream(place.url, {**self._fixed, "prompt": prompt}, place.headers)
        if answer.problem or answer.first_s != answer.first_s:
            raise BenchError(f"{place.url}: {answer.problem or 'a stream without text'}")
        sent_s = answer.sent_s
        return Timing(answer.first_s - sent_s, answer.ended_s - sent_s, answer.request_id)

    async def block(self, prompts: list[str], concurrency: int) -> list[Timing]:
        """All `prompts`, `concurrency` at a time."""
        return await some_at_a_time(prompts, concurrency, self.complete)
