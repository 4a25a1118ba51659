"""Sends tasks at their time over HTTP, and takes the times that a user would see."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import aiohttp

from cato.bench.live.workflows import LiveTask
from cato.core.slo import Slo

# Above the longest deadline of a workflow: the answer to a lost task comes from CATO.
TIMEOUT = aiohttp.ClientTimeout(total=90_000.0)
TEXT, DONE = b"event: text\n", b"event: done\n"
_PROBLEM_CHARS = 300


@dataclass(frozen=True, slots=True)
class Seen:
    """One task at the client, in seconds since it should have been sent.

    `late_s`: how much later it was sent. `receipt` is None, and `problem` says why, when the
    answer did not come whole.
    """

    task: LiveTask
    late_s: float
    ttft_s: float
    e2e_s: float
    receipt: dict[str, Any] | None
    problem: str = ""

    @property
    def is_met_at_client(self) -> bool:
        sim = self.task.sim
        achieved_s = {"ttft": self.ttft_s, "e2e": self.e2e_s}[sim.metric.value]
        is_whole = self.receipt is not None
        return is_whole and Slo(sim.metric, sim.target_s).is_met_by(achieved_s)

    @property
    def is_met(self) -> bool:
        """As CATO's own receipt says."""
        return self.receipt is not None and bool(self.receipt["met"])


class TaskClient:
    """Kept-alive connections to one application. Use it as an async context manager."""

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
        self, tasks: Sequence[LiveTask], name: Callable[[LiveTask], str], done: Callable[[], None]
    ) -> list[Seen]:
        """Every task at its time, whatever became of the others; returns them in their order."""
        start_s = time.perf_counter()

        async def one(task: LiveTask) -> Seen:
            due_s = start_s + task.sim.arrived_at_s
            await asyncio.sleep(due_s - time.perf_counter())
            seen = await self._send(name(task), task, due_s)
            done()
            return seen

        return await asyncio.gather(*map(one, tasks))

    async def all_of(
        self,
        tasks: Sequence[LiveTask],
        name: Callable[[LiveTask], str],
        concurrency: int,
        done: Callable[[], None],
    ) -> list[Seen]:
        """All tasks, `concurrency` at any time."""
        waiting = iter(tasks)
        seen: list[Seen] = []

        async def work() -> None:
            for task in waiting:
                seen.append(await self._send(name(task), task, time.perf_counter()))
                done()

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return seen

    async def _send(self, name: str, task: LiveTask, due_s: float) -> Seen:
        assert self._session is not None, "used outside its context"
        body = {"inputs": dict(task.inputs), "stream": True}
        sent_s = time.perf_counter()
        first_s, answer = nan, bytearray()
        try:
            async with self._session.post(f"{self._url}/v1/tasks/{name}", json=body) as response:
                async for part in response.content.iter_any():
                    answer += part
                    if first_s != first_s and TEXT in answer:
                        first_s = time.perf_counter()
            ended_s = time.perf_counter()
            receipt, problem = _receipt(response.status, bytes(answer))
        except (aiohttp.ClientError, TimeoutError) as error:
            ended_s, receipt, problem = time.perf_counter(), None, repr(error)
        return Seen(task, sent_s - due_s, first_s - due_s, ended_s - due_s, receipt, problem)


def _receipt(status: int, answer: bytes) -> tuple[dict[str, Any] | None, str]:
    """The receipt in the last event, or what came instead."""
    start = answer.rfind(DONE)
    if status != 200 or start < 0:
        end = answer[-_PROBLEM_CHARS:].decode(errors="replace")
        return None, f"{status}, no whole answer; its end: {end}"
    data = answer[start + len(DONE) :].partition(b"\n\n")[0].removeprefix(b"data: ")
    receipt: dict[str, Any] = json.loads(data)["cato"]
    return receipt, ""
