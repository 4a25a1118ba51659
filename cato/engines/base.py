"""The protocol between an engine replica and its engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cato.core.kv_events import KvEvent
from cato.core.pool.prefill import NOTHING_DUE, CallTarget
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.topology import AdapterSpec, TemplateFacts
from cato.wire.endpoint import Endpoint as Endpoint


@record
class EngineRequest:
    """One invocation as the engine sees it.

    `body` is the dialect's body without `model` and `stream`; the adapter sets these, the request
    id and the priority (smaller runs first). With `raw` the chunks carry the engine's own bytes,
    for requests that are passed through: SSE events when `stream`, the JSON answer otherwise.
    Only completions and chat are also answered without `raw`. `traceparent` is the W3C trace
    context of the run; empty when it is not traced. `prefix` are the prompt's nodes, see
    `Invocation.prefix`. `adapter` is a LoRA adapter of the engine's
    model; None for the base model. `prompt_tokens` is the estimated prompt length. `target` is for
    a scheduler inside the engine.

    `begun` is the part of the answer, at the prompt's end, that other engines generated.
    `begun_tokens` of its tokens were counted and are already subtracted from the body's limits.
    There may be more, since a stream event may hold several tokens. An engine that counts tokens
    itself subtracts the rest and reports them as its own output.
    """

    id: str
    endpoint: Endpoint
    body: Mapping[str, object]
    priority: int = 0
    stream: bool = True
    raw: bool = False
    traceparent: str = ""
    adapter: AdapterSpec | None = None
    prompt_tokens: int = 0
    begun: str = ""
    begun_tokens: int = 0
    target: CallTarget = NOTHING_DUE
    prefix: tuple[int, ...] = ()


PREEMPTED = "preempted"
"""Finish reason of a stream that its pool's router preempted; it resumes under a new lease."""


@record
class EngineChunk:
    """Some output. Counts are cumulative; `finish_reason` is set on the last chunk only.

    `prompt_tokens` and `cached_tokens` are -1 until the engine reports them; the last chunk
    always has them. `stop_sequence`: the one at which the output stopped, on the last chunk of
    engines that tell it.
    """

    text: str = ""
    output_tokens: int = 0
    prompt_tokens: int = -1
    cached_tokens: int = -1
    finish_reason: str | None = None
    raw: bytes = b""
    stop_sequence: str = ""


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load that the engine itself reports; `kv_cache_usage` is a fraction in [0, 1]."""

    running: int
    waiting: int
    kv_cache_usage: float


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Constants of a running engine.

    `simulated` marks output that no model computed. `served_model` is the name the engine
    answers to. `kv_capacity_tokens` and `block_tokens` (the size of a KV cache block) are 0 when
    the engine does not report them. `host_bytes` of host memory hold blocks evicted from that
    cache, `host_tokens` of them (0: none, or unknown). `template` is None when it is unknown or
    the model has none.
    """

    kind: str
    served_model: str
    max_running: int
    context_tokens: int
    simulated: bool
    start_s: float = 0.0
    version: str = ""
    kv_capacity_tokens: int = 0
    block_tokens: int = 0
    host_tokens: int = 0
    host_bytes: int = 0
    template: TemplateFacts | None = None
    capabilities: frozenset[str] = field(default_factory=frozenset)

    def host_tokens_by(self, profile: Profile) -> int:
        """Tokens held in host memory; if the engine does not report them, `profile`'s number."""
        if self.host_tokens or not self.host_bytes:
            return self.host_tokens
        if profile.kv_token_bytes:
            return self.host_bytes // profile.kv_token_bytes
        return profile.host_capacity_tokens


class Engine(Protocol):
    """An inference runtime. All methods belong to one asyncio loop.

    `generate` yields at least one chunk, the last with a finish reason, or raises
    `EngineError` (refused: status 400 with the engine's message, `ContextLengthError` when the
    prompt does not fit; broken: `EngineDeadError`). Closing the iterator early, or cancelling
    the task that reads it, aborts the request in the engine.
    """

    @property
    def state(self) -> EngineState: ...

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def pid(self) -> int | None:
        """The engine's own process on this host; None if it has none."""
        ...

    async def start(self) -> None:
        """Return when the engine answers; otherwise raise `EngineError` with the end of its log."""
        ...

    async def stop(self) -> None:
        """End the engine and every process it started. Idempotent."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]: ...

    async def load(self) -> EngineLoad: ...

    def watch_cache(self, heard: Callable[[KvEvent], None]) -> None:
        """Call `heard` with each change of the KV cache from now on, also after later starts.

        An engine that cannot tell never calls it.
        """
        ...

    async def wait_dead(self) -> str:
        """Return the reason once the engine dies without having been stopped."""
        ...
