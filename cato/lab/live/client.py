"""HTTP client that sends tasks on schedule and records the times that a user would see."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cato.core.slo import Slo, tpot_s
from cato.lab.client import LEFT, OPENAI, TASK, HttpClient, at_due_times, some_at_a_time
from cato.lab.live.workflows import LiveTask

# Longer than any workflow deadline: CATO itself answers lost tasks.
TIMEOUT_S = 90_000.0
_COMPLETION_TOKENS, _CACHED_TOKENS = b'"completion_tokens"', b'"cached_tokens"'


@dataclass(frozen=True, slots=True)
class Seen:
    """One task as seen by the client, in seconds since its scheduled time.

    `late_s`: delay of sending. `problem`: why the answer is incomplete; then, and where CATO was
    not asked, `receipt` is None. `output_tokens` and `cached_tokens` are the engine's own counts, 0
    when not reported. `retry_after_s`: of a refusal, when to ask again.
    """

    task: LiveTask
    late_s: float
    ttft_s: float
    e2e_s: float
    receipt: dict[str, Any] | None
    problem: str = ""
    output_tokens: int = 0
    cached_tokens: int = 0
    retry_after_s: float = 0.0

    @property
    def is_refused(self) -> bool:
        """Refused, as the simulator refuses too."""
        return self.problem.startswith("429")

    @property
    def is_left(self) -> bool:
        """Its client had no patience any more, as in the simulator."""
        return self.problem == LEFT

    @property
    def is_lost(self) -> bool:
        if self.receipt is not None and self.receipt["status"] != "done":
            return True
        return bool(self.problem) and not self.is_refused and not self.is_left

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


class TaskClient(HttpClient):
    """Keep-alive connections to one application. Use it as an async context manager."""

    def __init__(self, url: str) -> None:
        super().__init__(TIMEOUT_S)
        self._url = url

    async def replay(
        self, tasks: Sequence[LiveTask], ask: Callable[[LiveTask], Ask], done: Callable[[], None]
    ) -> list[Seen]:
        """Every task at its time, whatever happened to the others; results are in task order."""

        async def one(task: LiveTask, due_s: float) -> Seen:
            seen = await self.send(ask(task), task, due_s)
            done()
            return seen

        return await at_due_times(tasks, lambda task: task.sim.arrived_at_s, one)

    async def all_of(
        self,
        tasks: Sequence[LiveTask],
        ask: Callable[[LiveTask], Ask],
        concurrency: int,
        done: Callable[[], None],
    ) -> list[Seen]:
        """All tasks, `concurrency` at a time."""

        async def one(task: LiveTask) -> Seen:
            seen = await self.send(ask(task), task, time.perf_counter())
            done()
            return seen

        return await some_at_a_time(tasks, concurrency, one)

    async def send(self, ask: Ask, task: LiveTask, due_s: float) -> Seen:
        form = OPENAI if ask.is_plain else TASK
        patience_s = task.sim.patience_s
        answer = await self.stream(self._url + ask.path, ask.body, ask.headers, form, patience_s)
        return Seen(
            task,
            answer.sent_s - due_s,
            answer.first_s - due_s,
            answer.ended_s - due_s,
            None if ask.is_plain or answer.problem else _receipt(answer.content),
            answer.problem,
            _last_number(_COMPLETION_TOKENS, answer.content),
            _last_number(_CACHED_TOKENS, answer.content),
            answer.retry_after_s,
        )


def _last_number(name: bytes, answer: bytes) -> int:
    """The value in the last event that has it; 0 if there is none."""
    at = answer.rfind(name)
    digits = answer[at + len(name) :].lstrip(b": ") if at >= 0 else b""
    found = re.match(rb"\d+", digits)
    return int(found[0]) if found else 0


def _receipt(answer: bytes) -> dict[str, Any]:
    """The receipt in the last event."""
    start = answer.rfind(TASK.end) + len(TASK.end)
    data = answer[start:].partition(b"\n\n")[0].removeprefix(b"data: ")
    receipt: dict[str, Any] = json.loads(data)["cato"]
    return receipt
