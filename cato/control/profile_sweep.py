"""Measuring a replica: the sweep behind `cato profile`.

Time is taken where the ingress takes it, at the caller: what is fitted holds the engine, its
server and one hop of Serve, which is what a lease really costs. Prompts are random token ids, so
lengths are exact and no two share a prefix that a cache could serve.

Three kinds of points: a prompt's first token alone; a decode step; and how long a prompt holds up a
stream that runs beside it. What of a first token holds up nobody is latency: network, server and
tokenizer, which work beside the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from cato.core.errors import InputError
from cato.core.profile import Profile
from cato.engines.base import EngineChunk
from cato.profiles.fit import (
    DecodeFit,
    DecodeSample,
    PrefillFit,
    PrefillSample,
    fit_decode,
    fit_prefill,
)

# Token ids that every vocabulary has and that are hardly ever special ones.
TOKEN_IDS = range(300, 2_000)
MIN_PROMPT_TOKENS = 16
# Tokens that a request generates in the window where all of its batch decode.
WINDOW_TOKENS = 24
# vLLM mixes prompt pieces of this many tokens at least with decode steps: an early request of a
# batch generates about one token for each while the prompts of the others are processed.
PROMPT_PIECE_TOKENS = 128
# Prompts, one after the other, beside a running stream; the stream alone before and after them.
STALLING_PROMPTS = 6
CALM_TOKENS = 16
WARM_UPS = 3


class EngineCaller(Protocol):
    """One replica's engine, asked directly, beside its pool's queue."""

    def stream(self, body: Mapping[str, object]) -> AsyncGenerator[EngineChunk, None]:
        """Chunks of one completion; `body` is an OpenAI body as in `EngineRequest`."""
        ...

    async def held(self) -> int:
        """Requests that the replica holds now, whoever sent them."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured, and the limits that the sweep must keep.

    `kv_capacity_tokens` 0 means unknown.
    """

    model: str
    accelerator: str
    engine: str
    context_tokens: int
    max_running: int
    kv_capacity_tokens: int
    load_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. Lengths beyond the engine's limits are left out.

    A point that took longer than `point_limit_s` ends the growth of its kind; no round starts
    that would end after `total_s` (estimated by the last one), but one round is always measured.
    """

    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    batch_prompt_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    concurrencies: tuple[int, ...]
    stalling_prompt_tokens: tuple[int, ...]
    rounds: int
    point_limit_s: float
    total_s: float


QUICK = Plan(
    prompt_tokens=(32, 128, 384, 896, 1792),
    batches=(2, 4),
    batch_prompt_tokens=(64, 192),
    contexts=(64, 384, 1536),
    concurrencies=(1, 4, 8),
    stalling_prompt_tokens=(32, 192),
    rounds=3,
    point_limit_s=2.0,
    total_s=40.0,
)
FULL = Plan(
    prompt_tokens=(16, 32, 64, 128, 256, 448, 704, 960, 1536, 2048, 4096, 8192),
    batches=(2, 4, 8),
    batch_prompt_tokens=(64, 192, 512),
    contexts=(48, 192, 448, 832, 1536, 4096, 8192),
    concurrencies=(1, 2, 4, 8, 16, 32, 64),
    stalling_prompt_tokens=(16, 64, 256),
    rounds=7,
    point_limit_s=20.0,
    total_s=600.0,
)


class _Kind(Enum):
    FIRST_TOKEN = "first token, prompt"
    DECODE = "decode step, context"
    STALL = "stall by prompts of"


@dataclass(frozen=True, slots=True)
class _Point:
    """One thing to measure: a batch of prompts, one that decodes, or prompts beside a stream."""

    kind: _Kind
    batch: int
    tokens: int

    @property
    def work(self) -> int:
        return self.batch * self.tokens


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """`batch` prompts of `prompt_tokens`, sent together: seconds until all have a token."""

    batch: int
    prompt_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Stall:
    """How much longer a stream's step took for a prompt of `prompt_tokens` that came beside it.

    Below zero when the machine was faster than before and after.
    """

    prompt_tokens: int
    stall_s: float


@dataclass(slots=True)
class Measured:
    """What a sweep saw. `disturbed` counts measurements beside other work on the replica."""

    first_tokens: list[FirstTokens] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    chars: int = 0
    text_tokens: int = 0
    rounds: int = 0
    points: int = 0
    disturbed: int = 0
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A point, the median of what it took, and what the fitted profile says, in seconds."""

    what: str
    batch: int
    tokens: int
    samples: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative; positive when the profile says too much."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The profile and how well it says what was measured."""

    profile: Profile
    prefill: PrefillFit
    decode: DecodeFit
    comparisons: tuple[Comparison, ...]
    samples: int


Progress = Callable[[int, int, str], None]
"""Called before every point with the points done, their expected total and what comes."""


class Sweep:
    """Drives an `EngineCaller` through a `Plan`. Deterministic in what it sends, given `seed`."""

    def __init__(self, caller: EngineCaller, target: Target, plan: Plan, seed: int = 0) -> None:
        self._caller = caller
        self._target = target
        self._plan = plan
        self._random = random.Random(seed)
        self.measured = Measured()

    async def run(self, texts: Sequence[str], progress: Progress) -> Measured:
        """Measure everything; `texts` are samples of code, for characters per token."""
        points = _points(self._target, self._plan)
        total = len(points) * self._plan.rounds
        progress(0, total, "warming up")
        for _ in range(WARM_UPS):
            await self._first_token_s(random_prompt(self._random, MIN_PROMPT_TOKENS), 2)
        await self._count_characters(texts)
        started_s = time.monotonic()
        done = 0
        for number in range(self._plan.rounds):
            round_started_s = time.monotonic()
            if number:
                # The first round goes from small to large and learns what takes too long.
                self._random.shuffle(points)
            kept = []
            too_long: dict[_Kind, int] = {}
            for point in points:
                limit = too_long.get(point.kind)
                if limit is not None and point.work >= limit:
                    total -= self._plan.rounds - number
                    self.measured.skipped.append(f"{_what(point)}: would take too long")
                    continue
                progress(done, total, _what(point))
                point_started_s = time.monotonic()
                await self._measure(point)
                done += 1
                kept.append(point)
                if time.monotonic() - point_started_s > self._plan.point_limit_s and not number:
                    too_long[point.kind] = point.work
            points = kept
            self.measured.rounds += 1
            now_s = time.monotonic()
            if now_s - started_s + (now_s - round_started_s) > self._plan.total_s:
                break
        progress(done, done, "done")
        return self.measured

    async def _measure(self, point: _Point) -> None:
        self.measured.points += 1
        if await self._caller.held() > 0:
            self.measured.disturbed += 1
        if point.kind is _Kind.DECODE:
            await self._measure_decode(point)
            return
        if point.kind is _Kind.STALL:
            await self._measure_stall(point)
            return
        prompts = [random_prompt(self._random, point.tokens) for _ in range(point.batch)]
        started_s = time.monotonic()
        await asyncio.gather(*(self._first_token_s(p, 1) for p in prompts))
        duration_s = time.monotonic() - started_s
        self.measured.first_tokens.append(FirstTokens(point.batch, point.tokens, duration_s))

    async def _measure_decode(self, point: _Point) -> None:
        """Only the time in which the whole batch decodes counts, and the tokens of that time."""
        output = _output_tokens(point)
        streams = await asyncio.gather(
            *(
                self._trace(random_prompt(self._random, point.tokens), output)
                for _ in range(point.batch)
            )
        )
        begin_s = max(trace[0][0] for trace in streams)
        end_s = min(trace[-1][0] for trace in streams)
        spans = []
        for trace in streams:
            inside = [t for t in trace if begin_s <= t[0] <= end_s]
            if len(inside) >= 2 and inside[-1][1] > inside[0][1]:
                spans.append((inside[0], inside[-1]))
        steps = sum(last[1] - first[1] for first, last in spans)
        if len(spans) < point.batch or steps < point.batch * WINDOW_TOKENS // 4:
            self.measured.skipped.append(f"{_what(point)}: never all in one batch")
            return
        step_s = sum(last[0] - first[0] for first, last in spans) / steps
        tokens = sum(first[1] + last[1] for first, last in spans) / (2 * len(spans))
        self.measured.decode.append(DecodeSample(point.batch, point.tokens + tokens, step_s))

    async def _measure_stall(self, point: _Point) -> None:
        """Prompts one after the other beside a stream, which is compared with itself alone."""
        most = self._target.context_tokens - MIN_PROMPT_TOKENS - 1
        trace: list[tuple[float, int]] = []
        calm, crowded = asyncio.Event(), [0.0, 0.0]
        prompts = [random_prompt(self._random, point.tokens) for _ in range(point.batch)]

        async def disturb() -> None:
            await calm.wait()
            crowded[0] = time.monotonic()
            for prompt in prompts:
                await self._first_token_s(prompt, 1)
            crowded[1] = time.monotonic()

        disturbing = asyncio.create_task(disturb())
        try:
            body = completion_body(random_prompt(self._random, MIN_PROMPT_TOKENS), most)
            async with contextlib.aclosing(self._caller.stream(body)) as chunks:
                async for chunk in chunks:
                    trace.append((time.monotonic(), chunk.output_tokens))
                    if chunk.output_tokens > CALM_TOKENS:
                        calm.set()
                    if disturbing.done() and _tokens_since(trace, crowded[1]) >= CALM_TOKENS:
                        break
            if disturbing.done():
                disturbing.result()
            if not disturbing.done() or (stall_s := _stall_s(trace, *crowded)) is None:
                self.measured.skipped.append(
                    f"{_what(point)}: the stream beside them was too short"
                )
                return
            self.measured.stalls.append(Stall(point.tokens, stall_s / point.batch))
        finally:
            disturbing.cancel()
            await asyncio.wait([disturbing])

    async def _first_token_s(self, prompt: list[int], output: int) -> float:
        started_s = time.monotonic()
        first_s, _ = (await self._trace(prompt, output))[0]
        return first_s - started_s

    async def _trace(self, prompt: list[int], output: int) -> list[tuple[float, int]]:
        """When a chunk came, and how many tokens there were by then."""
        trace: list[tuple[float, int]] = []
        async with contextlib.aclosing(
            self._caller.stream(completion_body(prompt, output))
        ) as chunks:
            async for chunk in chunks:
                if chunk.output_tokens > (trace[-1][1] if trace else 0):
                    trace.append((time.monotonic(), chunk.output_tokens))
        if not trace:
            raise InputError("the engine answered without a token; nothing can be measured")
        return trace

    async def _count_characters(self, texts: Iterable[str]) -> None:
        for text in texts:
            last = None
            async with contextlib.aclosing(self._caller.stream(completion_body(text, 1))) as chunks:
                async for chunk in chunks:
                    last = chunk
            if last is not None and last.prompt_tokens > 0:
                self.measured.chars += len(text)
                self.measured.text_tokens += last.prompt_tokens


def evaluate(target: Target, measured: Measured) -> SweepResult:
    """Fit a profile to what was measured; raise `InputError` when it is too little."""
    decode = fit_decode(measured.decode)
    prefill = fit_prefill(
        [PrefillSample(f.batch, f.prompt_tokens, f.duration_s) for f in measured.first_tokens]
    )
    base_s, per_request_s, latency_s = _split(prefill, decode, measured.stalls)
    profile = Profile(
        model=target.model,
        accelerator=target.accelerator,
        engine=target.engine,
        prefill_per_batch_token_s=prefill.per_batch_token_s,
        prefill_per_request_s=per_request_s,
        prefill_per_token_s=prefill.per_token_s,
        prefill_base_s=base_s,
        decode_per_context_token_s=decode.per_context_token_s,
        decode_per_request_s=decode.per_request_s,
        decode_base_s=decode.base_s,
        kv_capacity_tokens=target.kv_capacity_tokens or target.max_running * target.context_tokens,
        max_running=target.max_running,
        context_tokens=target.context_tokens,
        load_s=target.load_s,
        latency_s=latency_s,
    )
    if measured.text_tokens > 0:
        profile = replace(profile, chars_per_token=measured.chars / measured.text_tokens)
    samples = len(measured.first_tokens) + len(measured.decode) + len(measured.stalls)
    return SweepResult(profile, prefill, decode, _comparisons(profile, measured), samples)


def _split(
    prefill: PrefillFit, decode: DecodeFit, stalls: Sequence[Stall]
) -> tuple[float, float, float]:
    """Of the seconds that any prompt costs alone: a step's base, what holds up others, latency.

    Without stalls nothing is known to be latency.
    """
    if not stalls:
        return prefill.base_s, prefill.per_request_s, 0.0
    whole_s = prefill.base_s + prefill.per_request_s
    base_s = min(decode.base_s, whole_s)
    token_s = prefill.per_batch_token_s + prefill.per_token_s
    stall_s = statistics.median(s.stall_s - token_s * s.prompt_tokens for s in stalls)
    per_request_s = min(max(0.0, stall_s), whole_s - base_s)
    return base_s, per_request_s, whole_s - base_s - per_request_s


def _tokens_since(trace: Sequence[tuple[float, int]], since_s: float) -> int:
    """Tokens of a stream that came after `since_s`."""
    before = next((tokens for at_s, tokens in reversed(trace) if at_s <= since_s), 0)
    return trace[-1][1] - before


def _stall_s(trace: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float | None:
    """What the time from `begin_s` to `end_s` took longer than as many of the stream's other steps.

    None when the stream was not there before and after.
    """
    before = [t for t in trace if t[0] <= begin_s]
    after = [t for t in trace if t[0] >= end_s]
    if len(before) < 2 or len(after) < 2:
        return None
    calm_s = before[-1][0] - before[0][0] + after[-1][0] - after[0][0]
    calm_tokens = before[-1][1] - before[0][1] + after[-1][1] - after[0][1]
    if calm_tokens <= 0:
        return None
    steps = after[0][1] - before[-1][1]
    return after[0][0] - before[-1][0] - steps * calm_s / calm_tokens


def _comparisons(profile: Profile, measured: Measured) -> tuple[Comparison, ...]:
    firsts: dict[tuple[int, int], list[float]] = {}
    for first in measured.first_tokens:
        firsts.setdefault((first.batch, first.prompt_tokens), []).append(first.duration_s)
    steps: dict[tuple[int, int], list[float]] = {}
    for step in measured.decode:
        # Contexts of one point differ by a token or two between rounds.
        steps.setdefault((step.batch, round(step.context_tokens / 16) * 16), []).append(step.step_s)
    rows = []
    for (batch, tokens), times in sorted(firsts.items()):
        predicted_s = profile.latency_s + profile.prefill_s(tokens, batch)
        rows.append(
            Comparison(
                "first token", batch, tokens, len(times), statistics.median(times), predicted_s
            )
        )
    for (batch, tokens), times in sorted(steps.items()):
        predicted_s = profile.decode_step_s(batch, tokens)
        rows.append(
            Comparison(
                "decode step", batch, tokens, len(times), statistics.median(times), predicted_s
            )
        )
    return tuple(rows)


def _points(target: Target, plan: Plan) -> list[_Point]:
    """All points that fit the engine, the smallest work first."""
    capacity = target.kv_capacity_tokens or target.max_running * target.context_tokens
    points = [_Point(_Kind.FIRST_TOKEN, 1, n) for n in plan.prompt_tokens]
    points += [
        _Point(_Kind.FIRST_TOKEN, b, n) for b in plan.batches for n in plan.batch_prompt_tokens
    ]
    points += [_Point(_Kind.DECODE, b, c) for b in plan.concurrencies for c in plan.contexts]

    def fits(point: _Point) -> bool:
        output = _output_tokens(point) if point.kind is _Kind.DECODE else 1
        tokens = point.tokens + output
        return (
            point.batch <= target.max_running
            and tokens < target.context_tokens
            and point.batch * tokens <= capacity
        )

    fitting = sorted(
        (p for p in points if fits(p)), key=lambda p: (p.kind is _Kind.DECODE, p.work, p.batch)
    )
    if not fitting:
        raise InputError(
            f"nothing to measure fits {target.context_tokens} tokens of context and "
            f"{target.max_running} running requests"
        )
    if target.max_running >= 2:
        prompts = (n for n in plan.stalling_prompt_tokens if 2 * n < target.context_tokens)
        fitting += [_Point(_Kind.STALL, STALLING_PROMPTS, n) for n in prompts]
    return fitting


def _output_tokens(point: _Point) -> int:
    """Enough that the first of a batch still decodes when the last one has its first token."""
    return WINDOW_TOKENS + point.batch + point.work // PROMPT_PIECE_TOKENS


def random_prompt(draw: random.Random, tokens: int) -> list[int]:
    """Token ids that no cache knows."""
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


def _what(point: _Point) -> str:
    return f"{point.kind.value} {point.tokens} x {point.batch}"
