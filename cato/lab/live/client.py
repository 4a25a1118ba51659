"""HTTP client that sends tasks on schedule and records the times that a user would see."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

import aiohttp

from cato.core.slo import Slo, tpot_s
from cato.lab.live.workflows import LiveTask

# Longer than any workflow deadline: CATO itself answers lost tasks.
TIMEOUT = aiohttp.ClientTimeout(total=90_000.0)
TEXT, DONE = b"event: text\n", b"event: done\n"
# Markers in an OpenAI stream: the first piece of the answer, and the end.
PIECE, END = b"data: {", b"data: [DONE]"
_COMPLETION_TOKENS, _CACHED_TOKENS = b'"completion_tokens"', b'"cached_tokens"'
_PROBLEM_CHARS = 300


@dataclass(frozen=True, slots=True)
class Seen:
    """One task as seen by the client, in seconds since its scheduled time.

    `late_s`: delay of sending. `problem`: why the answer is incomplete; then, and where CATO was
    not asked, `receipt` is None. `output_tokens` and `cached_tokens` are the engine's own counts, 0
    when not reported.
    """

    task: LiveTask
    late_s: float
    ttft_s: float
    e2e_s: float
    receipt: dict[str, Any] | None
    problem: str = ""
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def is_refused(self) -> bool:
        """Refused, as the simulator refuses too."""
        return self.problem.startswith("429")

    @property
    def is_lost(self) -> bool:
        if self.receipt is not None and self.receipt["status"] != "done":
            return True
        return bool(self.problem) and not self.is_refused

    @property
    def is_met_at_client(self) -> bool:
        sim = self.task.sim
        achieved_s = {"ttft": self.ttft_s, "e2e": self.e2e_s}[sim.metric.value]
        tokens = self.output_tokens or sim.nodes[-1].output_tokens
        pace_s = tpot_s(self.ttft_s, self.e2e_s, tokens)
        slo = Slo(sim.metric, sim.target_s, sim.tpot_target_s)
        return not self.problem and slo.is_met_by(achieved_s, pace_s)

    @property
    def is_met(self) -> bool:
        """As CATO's receipt says; without a receipt, as the client saw it."""
        return self.is_met_at_client if self.receipt is None else bool(self.receipt["met"])


@dataclass(frozen=True, slots=True)
class Ask:
    """A streamed request: a CATO workflow, or (`is_plain`) an OpenAI request."""

    path: str
    body: Mapping[str, object]
    is_plain: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


class TaskClient:
    """Keep-alive connections to one application. Use it as an async context manager."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> TaskClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None, "used outside its context"
        await self._session.close()

    async def replay(
        self, tasks: Sequence[LiveTask], ask: Callable[[LiveTask], Ask], done: Callable[[], None]
    ) -> list[Seen]:
        """Every task at its time, whatever happened to the others; results are in task order."""
        start_s = time.perf_counter()

        async def one(task: LiveTask) -> Seen:
            due_s = start_s + task.sim.arrived_at_s
            await asyncio.sleep(due_s - time.perf_counter())
            seen = await self.send(ask(task), task, due_s)
            done()
            return seen

        return await asyncio.gather(*map(one, tasks))

    async def all_of(
        self,
        tasks: Sequence[LiveTask],
        ask: Callable[[LiveTask], Ask],
        concurrency: int,
        done: Callable[[], None],
    ) -> list[Seen]:
        """All tasks, `concurrency` at a time."""
        waiting = iter(tasks)
        seen: list[Seen] = []

        async def work() -> None:
            for task in waiting:
                seen.append(await self.send(ask(task), task, time.perf_counter()))
                done()

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return seen

    async def send(self, ask: Ask, task: LiveTask, due_s: float) -> Seen:
        assert self._session is not None, "used outside its context"
        mark = PIECE if ask.is_plain else TEXT
        sent_s = time.perf_counter()
        first_s, answer = nan, bytearray()
        try:
            async with self._session.post(
                self._url + ask.path, json=ask.body, headers=ask.headers
            ) as response:
                async for part in response.content.iter_any():
                    answer += part
                    if first_s != first_s and mark in answer:
                        first_s = time.perf_counter()
            ended_s = time.perf_counter()
            read = _whole if ask.is_plain else _receipt
            receipt, problem = read(response.status, bytes(answer))
        except (aiohttp.ClientError, TimeoutError) as error:
            ended_s, receipt, problem = time.perf_counter(), None, repr(error)
        return Seen(
            task,
            sent_s - due_s,
            first_s - due_s,
            ended_s - due_s,
            receipt,
            problem,
            _last_number(_COMPLETION_TOKENS, bytes(answer)),
            _last_number(_CACHED_TOKENS, bytes(answer)),
        )


def _last_number(name: bytes, answer: bytes) -> int:
    """The value in the last event that has it; 0 if there is none."""
    at = answer.rfind(name)
    digits = answer[at + len(name) :].lstrip(b": ") if at >= 0 else b""
    found = re.match(rb"\d+", digits)
    return int(found[0]) if found else 0


def _receipt(status: int, answer: bytes) -> tuple[dict[str, Any] | None, str]:
    """The receipt in the last event, or a description of the answer instead."""
    start = answer.rfind(DONE)
    if status != 200 or start < 0:
        return None, _not_whole(status, answer)
    data = answer[start + len(DONE) :].partition(b"\n\n")[0].removeprefix(b"data: ")
    receipt: dict[str, Any] = json.loads(data)["cato"]
    return receipt, ""


def _whole(status: int, answer: bytes) -> tuple[None, str]:
    """Whether an OpenAI stream is complete."""
    is_whole = status == 200 and END in answer
    return None, "" if is_whole else _not_whole(status, answer)


def _not_whole(status: int, answer: bytes) -> str:
    end = answer[-_PROBLEM_CHARS:].decode(errors="replace")
    return f"{status}, no whole answer; its end: {end}"
