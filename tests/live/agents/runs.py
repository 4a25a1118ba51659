"""One run of an agent against CATO, and what all three said of it: client, CATO, engine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from tests.live.agents.agent import NOTES_TEXT, Agent, Place, Ran
from tests.live.agents.recorder import Exchange, Recorder

RECEIPT_S = 20


@dataclass(frozen=True)
class Call:
    """A request that an engine answered, seen by all."""

    exchange: Exchange
    note: dict[str, Any]
    receipt: dict[str, Any]

    @property
    def llm(self) -> dict[str, Any]:
        found: dict[str, Any] = next(n["llm"] for n in reversed(self.receipt["nodes"]) if n["llm"])
        return found

    @property
    def estimate(self) -> float:
        """CATO's count of the prompt, as a fraction of the engine's."""
        return float(self.llm["expected_prompt_tokens"] / self.note["prompt_tokens"])

    @property
    def cached(self) -> int:
        """What the client read of its answer: prompt tokens that were cached."""
        return cached_in(self.exchange.answer)

    @property
    def asks_for_counts(self) -> bool:
        """Whether the client wants them in its stream; in other dialects they always come."""
        if not self.exchange.path.endswith("/chat/completions"):
            return True
        return bool((self.exchange.body.get("stream_options") or {}).get("include_usage"))

    def __str__(self) -> str:
        note = f"{self.note['script']} {self.note['step']} {self.note['outcome']}"
        return f"{self.exchange} {note}"


@dataclass(frozen=True)
class Run:
    """`exchanges` in the order in which they began."""

    agent: Agent
    place: Place
    ran: Ran
    exchanges: Sequence[Exchange]
    notes: Sequence[dict[str, Any]]
    receipts: dict[str, dict[str, Any]]

    @cached_property
    def calls(self) -> list[Call]:
        """Those of which an engine has noted something; the last note of each."""
        found = []
        for exchange in self.exchanges:
            notes = [n for n in self.notes if of_request(n, exchange.request_id)]
            if notes and exchange.request_id in self.receipts:
                receipt = self.receipts[exchange.request_id]
                found.append(Call(exchange, notes[-1], receipt))
        return found

    def script(self, name: str) -> list[Call]:
        """Calls that were answered by one of the agent's scripts or rules."""
        full = f"{self.agent.name}-{name}"
        return [c for c in self.calls if c.note["script"].startswith(full)]

    def main(self, name: str) -> list[Call]:
        """Those of the main loop that were answered whole, one for each turn."""
        turns: dict[tuple[str, int], Call] = {}
        for call in self.script(name):
            if call.note["outcome"] == "done" and not call.exchange.was_cut:
                turns[call.note["script"], call.note["step"]] = call
        return list(turns.values())

    def text(self, name: str) -> str:
        path = self.place.repo / name
        return path.read_text() if path.exists() else ""

    def __str__(self) -> str:
        lines = [str(e) for e in self.exchanges]
        notes = [f"{n['id']} {n['script']} {n['step']} {n['outcome']}" for n in self.notes]
        return "\n".join([str(self.ran), *lines, *notes])


def of_request(note: dict[str, Any], request_id: str) -> bool:
    """Whether an invocation belongs to a request: its id begins with the request's."""
    return bool(request_id) and str(note["id"]).startswith(request_id)


def run_agent(agent: Agent, job: str, folder: Path, url: str, log: Path) -> Run:
    """Let `agent` do a job of its script; `log` is that of the engines."""
    before = _size(log)
    recorder = Recorder(url, cut_at=NOTES_TEXT if job == "work" else "")
    with recorder.running():
        place = Place.made(folder, recorder.url)
        agent.prepare(place)
        ran = agent.run(place, agent.said(job, place))
    notes = [json.loads(line) for line in _since(log, before).splitlines()]
    receipts = {}
    for exchange in recorder.calls:
        if exchange.request_id and (found := receipt_of(url, exchange.request_id)):
            receipts[exchange.request_id] = found
    return Run(agent, place, ran, recorder.exchanges, notes, receipts)


def receipt_of(url: str, request_id: str) -> dict[str, Any] | None:
    deadline_s = time.monotonic() + RECEIPT_S
    while time.monotonic() < deadline_s:
        answer = httpx.get(f"{url}/v1/requests/{request_id}", timeout=10)
        if answer.status_code == 200:
            receipt: dict[str, Any] = answer.json()
            return receipt
        time.sleep(0.1)
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _since(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode()


def usages(raw: bytes) -> list[dict[str, Any]]:
    """All counts in an answer, streamed or whole."""
    found: list[dict[str, Any]] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            usage = value.get("usage")
            if isinstance(usage, dict):
                found.append(usage)
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    lines = [line[6:] for line in raw.splitlines() if line.startswith(b"data: {")]
    for line in lines or [raw]:
        collect(json.loads(line))
    return found


def cached_in(raw: bytes) -> int:
    """Cached prompt tokens, by an answer's last counts; negative when it says nothing of them."""
    found = -1
    for usage in usages(raw):
        for field in ("prompt_tokens_details", "input_tokens_details"):
            if isinstance(details := usage.get(field), dict):
                found = details.get("cached_tokens", found)
        found = usage.get("cache_read_input_tokens", found)
    return found
