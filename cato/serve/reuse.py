"""Answer reuse: identical calls of one ingress replica share one answer.

A `Flight` is the answer to one call as it arrives. The first run that asks leads: it gets a lease
and adds chunks; others read them. If the leader ends early, a reader takes over the lead and
continues the answer. A complete flight may be kept and read again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from cato.core.reuse import OF_THE_CALLER, AnswerMemory, ReuseLimits, is_deterministic, reuse_key
from cato.engines.base import PREEMPTED, EngineChunk
from cato.serve.prompts import EngineCall
from cato.wire.endpoint import Endpoint

IN_FLIGHT, FROM_MEMORY = "in flight", "memory"
"""Sources of a shared answer, as named in receipts."""

# An answer that ended for another reason may differ next time, so it is not kept.
KEPT_REASONS = ("stop", "length")
# Estimated overhead in bytes, per chunk and per kept answer.
_CHUNK_BYTES, _ANSWER_BYTES = 150, 300


@dataclass(slots=True, eq=False)
class Flight:
    """The answer to one call: its `chunks` so far, its leader and its number of readers."""

    chunks: list[EngineChunk] = field(default_factory=list)
    is_whole: bool = False
    has_leader: bool = False
    readers: int = 0
    # Deadline of its first leader.
    due_s: float = inf
    # Set when the leader's client has left: cancels the leader after the last reader.
    give_up: Callable[[], None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, chunk: EngineChunk, counts: tuple[int, int, int]) -> None:
        """Add a chunk sent to the leader's client; `counts` are cumulative over all attempts."""
        output_tokens, prompt_tokens, cached_tokens = counts
        reason = None if chunk.finish_reason == PREEMPTED else chunk.finish_reason
        self.chunks.append(
            replace(
                chunk, output_tokens=output_tokens, prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens, finish_reason=reason,
            )
        )  # fmt: skip
        self._tell()

    def end(self, *, is_whole: bool) -> None:
        """The leader has ended; `is_whole`: its answer is complete."""
        self.is_whole, self.has_leader, self.give_up = is_whole, False, None
        self._tell()

    def leave(self) -> None:
        """A reader leaves."""
        self.readers -= 1
        if not self.readers and self.give_up is not None:
            self.give_up()

    @property
    def reason(self) -> str | None:
        """The finish reason of the answer."""
        return self.chunks[-1].finish_reason if self.chunks else None

    async def more(self) -> None:
        """Wait for a chunk, the end, or the end of the leader."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Reuse:
    """The flights of one ingress replica, and its kept completions."""

    def __init__(self, limits: ReuseLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory: AnswerMemory[tuple[EngineChunk, ...]] = AnswerMemory(limits)
        self._clock = clock
        self._flights: dict[tuple[str, bytes], Flight] = {}

    def key(self, tenant: str, call: EngineCall) -> bytes | None:
        """The key of identical calls; None if the answer of `call` cannot be shared."""
        if not call.endpoint.generates or call.calls != 1 or not is_deterministic(call.body):
            return None
        parts = (tenant, call.model, call.endpoint.value, call.stream, call.raw)
        is_repeated = call.endpoint is Endpoint.RESPONSES  # its answers echo these fields
        return reuse_key(parts, call.body, () if is_repeated else OF_THE_CALLER)

    def find(self, tenant: str, key: bytes, call: EngineCall, due_s: float) -> tuple[Flight, str]:
        """The flight to read or to lead, and how a receipt describes a read of it.

        A call does not wait for a flight without chunks whose deadline is after its own `due_s`.
        """
        name = (tenant, key)
        flight = self._flights.get(name)
        if flight is not None and (flight.chunks or flight.due_s <= due_s):
            return flight, IN_FLIGHT
        kept = None
        if call.endpoint is Endpoint.COMPLETIONS:
            kept = self._memory.get(tenant, key, self._clock())
        if kept is not None:
            chunks, age_s = kept
            return Flight(list(chunks), is_whole=True), f"{FROM_MEMORY}, {age_s:.0f} s old"
        self._flights[name] = Flight(due_s=due_s)
        return self._flights[name], IN_FLIGHT

    def done(self, tenant: str, key: bytes, call: EngineCall, flight: Flight) -> None:
        """A run has left `flight`: keep a complete answer, drop a flight without other runs."""
        name = (tenant, key)
        if self._flights.get(name) is not flight:
            return
        if flight.is_whole:
            del self._flights[name]
            if call.endpoint is Endpoint.COMPLETIONS and flight.reason in KEPT_REASONS:
                size = _size(flight.chunks)
                self._memory.put(tenant, key, tuple(flight.chunks), size, self._clock())
        elif not flight.readers and not flight.has_leader:
            del self._flights[name]


def _size(chunks: Sequence[EngineChunk]) -> int:
    text = sum(len(c.text.encode("utf-8", "surrogatepass")) + len(c.raw) for c in chunks)
    return _ANSWER_BYTES + _CHUNK_BYTES * len(chunks) + text
