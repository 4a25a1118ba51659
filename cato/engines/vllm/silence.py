"""Watches a vLLM server for silence, since a hung one keeps its connections open.

The rule is `cato.core.hung`; this collects what it judges by: the tokens of answers, the answer to
a probe, the server's own counters and its running threads.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from math import inf
from typing import Protocol

import aiohttp

from cato.core.errors import EngineDeadError, EngineError
from cato.core.hung import HungRule, Signs, Silence
from cato.core.pool.prefill import CallTarget
from cato.core.topology import EngineSpec
from cato.engines.vllm import stream, threads
from cato.engines.vllm.scheduler import with_target

# How often to check for silence, and how often to sample threads of a silent server.
_LISTEN_S = 0.25
_SAMPLE_S = 0.1
_PROBE_LIMIT = aiohttp.ClientTimeout(total=10.0)
_SOON = aiohttp.ClientTimeout(total=0.5)
# Runs before all of CATO's calls.
_PROBE_PRIORITY, _PROBE_TARGET = -(2**31), CallTarget(target_s=0.0, has_begun=True)
_NO_ANSWER = 504


class Ask(Protocol):
    """Asks the server; raises `EngineDeadError` if it is gone, `EngineError` for a refusal."""

    def __call__(
        self, method: str, path: str, body: bytes | None, limit: aiohttp.ClientTimeout, /
    ) -> Awaitable[bytes]: ...


@dataclass(slots=True, eq=False)
class WatchedCall:
    """One call under way; `has_begun` once any part of its answer has arrived."""

    prompt_tokens: int
    has_begun: bool = False


class SilenceWatch:
    """The calls and signs of life of one engine, over all its starts. Belongs to one asyncio loop.

    Its owner tells it of calls and of what it hears from the server. While `may_be_silent` (asleep,
    swapping weights, or loading an adapter), silence is no sign of anything.
    """

    def __init__(self, rule: HungRule, spec: EngineSpec, ask: Ask) -> None:
        self._rule, self._spec, self._ask = rule, spec, ask
        self._calls: set[WatchedCall] = set()
        # Since when the running calls are silent, and the server's last sign of life.
        self._heard_s = self._alive_s = time.monotonic()
        self.may_be_silent = False

    def begin(self, prompt_tokens: int) -> WatchedCall:
        """A call is about to be sent; `end` it in any case."""
        if not self._calls:
            self._heard_s = time.monotonic()
        call = WatchedCall(prompt_tokens)
        self._calls.add(call)
        return call

    def heard(self, call: WatchedCall) -> None:
        """A part of the call's answer arrived."""
        call.has_begun = True
        self.show_life()

    def end(self, call: WatchedCall) -> None:
        self._calls.discard(call)

    def show_life(self) -> None:
        """The server has just shown a sign of life."""
        self._heard_s = self._alive_s = time.monotonic()

    def is_heard_again(self) -> None:
        """The server has started, or what may take long in silence has ended."""
        self.may_be_silent = False
        self.show_life()

    async def until_hung(self, pid: int, model: str) -> str:
        """Return why the server, whose first process is `pid`, is to be given up. It knows its
        model as `model`."""
        pids = threads.family(pid)
        stopped_since_s: float | None = None
        while True:
            await asyncio.sleep(_LISTEN_S)
            if threads.is_stopped(pids):
                stopped_since_s = stopped_since_s or time.monotonic()
                why = self._rule.why_stopped(time.monotonic() - stopped_since_s)
            else:
                stopped_since_s = None
                why = await self._why_silent(pid, pids, model)
            if why:
                return why

    async def _why_silent(self, pid: int, pids: list[int], model: str) -> str:
        """Why to give up a silent server; empty while there are signs of life."""
        if not self._is_silent():
            return ""
        signs = await self._signs(pid, model)
        if signs.answered or signs.counted:
            self.show_life()
        # Calls that began or ended meanwhile are no signs of life, but a long prompt may now need
        # more time.
        if not self._is_silent() or threads.is_stopped(pids):
            return ""
        return self._rule.why_hung(self._silence(), signs)

    def _is_silent(self) -> bool:
        return not self.may_be_silent and self._rule.is_due(self._silence())

    def _silence(self) -> Silence:
        now_s = time.monotonic()
        prompt_tokens = sum(max(1, c.prompt_tokens) for c in self._calls if not c.has_begun)
        return Silence(
            now_s - self._heard_s, len(self._calls), prompt_tokens, now_s - self._alive_s
        )

    async def _signs(self, pid: int, model: str) -> Signs:
        """Signs of life within `watched_s`: a token of any answer, an answer to the probe, the
        server's own counters, running threads of the process `pid` and its children."""
        alive_s, samples = self._alive_s, list[bool]()
        pids: list[int] = []
        asking = asyncio.create_task(self._probe(model))
        counting = asyncio.create_task(self._counted())
        try:
            # Counted, not timed: while this process stands still, it hears no answer either.
            for _ in range(round(self._rule.watched_s / _SAMPLE_S)):
                await asyncio.sleep(_SAMPLE_S)
                if asking.done() or self._alive_s != alive_s:
                    return Signs(answered=True, counted=False, working=0.0)
                # Not those of the start: kernels compile in child processes.
                pids = pids or await asyncio.to_thread(threads.family, pid)
                samples.append(threads.is_working(pids))
            before = await counting
            counted = before is not None and (await self._counted() or 0.0) > before
        finally:
            asking.cancel()
            counting.cancel()
            await asyncio.wait([asking, counting])
        has_new_children = not set(await asyncio.to_thread(threads.family, pid)) <= set(pids)
        working = 1.0 if has_new_children else sum(samples) / max(1, len(samples))
        return Signs(answered=False, counted=counted, working=working)

    async def _probe(self, model: str) -> None:
        """Return when the server has computed one token or refused to."""
        body: dict[str, object] = {"model": model, "prompt": "#", "max_tokens": 1}
        if self._spec.priority_scheduling:
            body["priority"] = _PROBE_PRIORITY
        if self._spec.scheduler:
            body = with_target(body, _PROBE_TARGET)
        try:
            await self._ask("POST", "/v1/completions", json.dumps(body).encode(), _PROBE_LIMIT)
        except EngineDeadError:
            await asyncio.sleep(inf)  # gone or not accepting: no sign of life
        except EngineError as error:
            if error.status == _NO_ANSWER:
                await asyncio.sleep(inf)

    async def _counted(self) -> float | None:
        """Tokens by the server's counters: unstreamed answers show no progress."""
        if not self._calls:
            return None
        try:
            return stream.tokens_of_metrics(await self._ask("GET", "/metrics", None, _SOON))
        except EngineError:
            return None
