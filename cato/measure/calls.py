"""Timed calls of an engine, at the caller."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cato.core.errors import InputError
from cato.engines.base import EngineChunk
from cato.measure.points import WINDOW_TOKENS

# Token ids that exist in every vocabulary and are hardly ever special tokens.
TOKEN_IDS = range(300, 2_000)


class EngineCaller(Protocol):
    """One replica's engine, called directly, bypassing its pool's queue."""

    def stream(self, body: Mapping[str, object]) -> AsyncGenerator[EngineChunk, None]:
        """Chunks of one completion; `body` is an OpenAI body as in `EngineRequest`."""
        ...

    async def held(self) -> int:
        """Requests in the replica now, from all senders."""
        ...


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds to the first token of a prompt of `prompt_tokens`, `cached_tokens` of which were
    in the prefix cache, as the engine reports."""

    prompt_tokens: int
    duration_s: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode step of `batch` requests with `context_tokens` each on average."""

    batch: int
    context_tokens: float
    step_s: float


async def first_token(caller: EngineCaller, prompt: list[int], output: int = 1) -> FirstToken:
    """The first of `output` tokens; raise `InputError` when there is none."""
    started_s, first_s, cached = clock_s(), None, 0
    async with contextlib.aclosing(caller.stream(completion_body(prompt, output))) as chunks:
        async for chunk in chunks:
            if first_s is None and chunk.output_tokens > 0:
                first_s = clock_s()
            cached = max(cached, chunk.cached_tokens)
    if first_s is None:
        raise InputError(_NO_TOKEN)
    return FirstToken(len(prompt), first_s - started_s, cached)


async def decode_step(
    callers: Sequence[EngineCaller], prompts: Sequence[list[int]], output: int
) -> DecodeStep | None:
    """One decode step of all `prompts`, of equal length, in one batch; the callers take turns.

    Only the time in which the whole batch decodes counts, and the tokens of that time. None when
    there was no such time.
    """
    batch = len(prompts)
    streams = await asyncio.gather(
        *(_trace(callers[i % len(callers)], prompt, output) for i, prompt in enumerate(prompts))
    )
    begin_s = max(trace[0][0] for trace in streams)
    end_s = min(trace[-1][0] for trace in streams)
    spans = []
    for trace in streams:
        inside = [t for t in trace if begin_s <= t[0] <= end_s]
        if len(inside) >= 2 and inside[-1][1] > inside[0][1]:
            spans.append((inside[0], inside[-1]))
    steps = sum(last[1] - first[1] for first, last in spans)
    if len(spans) < batch or steps < batch * WINDOW_TOKENS // 4:
        return None
    step_s = sum(last[0] - first[0] for first, last in spans) / steps
    tokens = sum(first[1] + last[1] for first, last in spans) / (2 * len(spans))
    return DecodeStep(batch, len(prompts[0]) + tokens, step_s)


async def _trace(caller: EngineCaller, prompt: list[int], output: int) -> list[tuple[float, int]]:
    """Times of the chunks, and the number of tokens by then."""
    trace: list[tuple[float, int]] = []
    async with contextlib.aclosing(caller.stream(completion_body(prompt, output))) as chunks:
        async for chunk in chunks:
            if chunk.output_tokens > (trace[-1][1] if trace else 0):
                trace.append((clock_s(), chunk.output_tokens))
    check_answered(trace)
    return trace


_NO_TOKEN = "the engine answered without a token; nothing can be measured"


def check_answered(trace: Sequence[tuple[float, int]]) -> None:
    if not trace:
        raise InputError(_NO_TOKEN)


def random_prompt(draw: random.Random, tokens: int) -> list[int]:
    """Random token ids that no cache holds."""
    return draw.choices(TOKEN_IDS, k=tokens)


def completion_body(prompt: list[int] | str, output: int) -> dict[str, object]:
    """A greedy completion of exactly `output` tokens."""
    return {
        "prompt": prompt,
        "max_tokens": output,
        "min_tokens": output,
        "ignore_eos": True,
        "temperature": 0.0,
    }


def clock_s() -> float:
    return asyncio.get_running_loop().time()
