"""Measuring a replica: the sweep behind `cato profile`.

Times are taken at the caller, as the ingress does: the fitted values include the engine, its server
and one hop of Serve, the real cost of a lease. Prompts are random token ids, so lengths are exact
and no two share a prefix that a cache could serve, except where that is measured.

Four kinds of points: the first token of a prompt alone; the first token of a prompt with a cached
prefix; a decode step; and how long a prompt stalls concurrent streams. The part of a first token's
time beside streams that stalls none of them is latency: network, server and tokenizer, which run
beside the engine, and compete with it on shared cores. Each point is recorded as engine steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cato.measure.calls import (
    EngineCaller,
    check_answered,
    clock_s,
    completion_body,
    decode_step,
    first_token,
    random_prompt,
)
from cato.measure.evaluation import Measured, Stall
from cato.measure.points import (
    MIN_PROMPT_TOKENS,
    NEW_TOKENS,
    STALLED_STREAMS,
    STALLED_TOKENS,
    Kind,
    Plan,
    Point,
    Target,
    points_of,
)

CALM_TOKENS = 16
WARM_UPS = 3
# Prompt length at which adapters are compared.
ADAPTER_PROMPT_TOKENS = 64


Progress = Callable[[int, int, str], None]
"""Called before every point with the points done, their expected total and the next point."""


class Sweep:
    """Drives an `EngineCaller` through a `Plan`. The requests are deterministic, given `seed`."""

    def __init__(self, caller: EngineCaller, target: Target, plan: Plan, seed: int = 0) -> None:
        self._caller = caller
        self._target = target
        self._plan = plan
        self._random = random.Random(seed)
        self.measured = Measured()

    async def run(self, texts: Sequence[str], progress: Progress) -> Measured:
        """Measure everything; `texts` are code samples, for characters per token."""
        points = points_of(self._target, self._plan)
        total = len(points) * self._plan.rounds
        progress(0, total, "warming up")
        for _ in range(WARM_UPS):
            await first_token(self._caller, random_prompt(self._random, MIN_PROMPT_TOKENS), 2)
        await self._count_characters(texts)
        started_s = clock_s()
        done = 0
        for number in range(self._plan.rounds):
            round_started_s = clock_s()
            if number:
                # The first round goes from small to large and finds the points that take too long.
                self._random.shuffle(points)
            kept = []
            too_long: dict[Kind, int] = {}
            for point in points:
                limit = too_long.get(point.kind)
                if limit is not None and point.work >= limit:
                    total -= self._plan.rounds - number
                    self.measured.skipped.append(f"{point.what}: would take too long")
                    continue
                progress(done, total, point.what)
                point_started_s = clock_s()
                await self._measure(point)
                done += 1
                kept.append(point)
                if clock_s() - point_started_s > self._plan.point_limit_s and not number:
                    too_long[point.kind] = point.work
            points = kept
            self.measured.rounds += 1
            now_s = clock_s()
            if now_s - started_s + (now_s - round_started_s) > self._plan.total_s:
                break
        progress(done, done, "done")
        return self.measured

    async def _measure(self, point: Point) -> None:
        self.measured.points += 1
        if await self._caller.held() > 0:
            self.measured.disturbed += 1
        if point.kind is Kind.DECODE:
            await self._measure_decode(point)
            return
        if point.kind is Kind.STALL:
            await self._measure_stall(point)
            return
        if point.kind is Kind.CACHED:
            await self._measure_cached(point)
            return
        prompt = random_prompt(self._random, point.tokens)
        self.measured.first_tokens.append(await first_token(self._caller, prompt))

    async def _measure_cached(self, point: Point) -> None:
        """Send the same prefix twice, each time followed by new tokens."""
        beginning = random_prompt(self._random, point.tokens)
        await first_token(self._caller, [*beginning, *random_prompt(self._random, NEW_TOKENS)])
        again = await first_token(
            self._caller, [*beginning, *random_prompt(self._random, NEW_TOKENS)]
        )
        if not again.cached_tokens:
            self.measured.skipped.append(f"{point.what}: the engine did not keep the prefix")
            return
        self.measured.first_tokens.append(again)

    async def _measure_decode(self, point: Point) -> None:
        prompts = [random_prompt(self._random, point.tokens) for _ in range(point.batch)]
        step = await decode_step([self._caller], prompts, point.output_tokens)
        if step is None:
            self.measured.skipped.append(f"{point.what}: never all in one batch")
            return
        self.measured.decode.append(step)

    async def _measure_stall(self, point: Point) -> None:
        """Send prompts one after the other beside streams; compare these with themselves alone."""
        streams = min(STALLED_STREAMS, self._target.max_running - 1)
        traces: list[list[tuple[float, int]]] = [[] for _ in range(streams)]
        calm, over = asyncio.Event(), asyncio.Event()
        prompts = [random_prompt(self._random, point.tokens) for _ in range(point.batch)]
        begin_s = end_s = 0.0
        firsts_s: list[float] = []

        async def stream(trace: list[tuple[float, int]]) -> None:
            most = min(STALLED_TOKENS, self._target.context_tokens - MIN_PROMPT_TOKENS - 1)
            body = completion_body(random_prompt(self._random, MIN_PROMPT_TOKENS), most)
            async with contextlib.aclosing(self._caller.stream(body)) as chunks:
                async for chunk in chunks:
                    trace.append((clock_s(), chunk.output_tokens))
                    if all(t and t[-1][1] > CALM_TOKENS for t in traces):
                        calm.set()
                    if over.is_set() and _tokens_since(trace, end_s) >= CALM_TOKENS:
                        break
            check_answered(trace)
            calm.set()  # too short anyway: do not wait for the rest

        async def disturb() -> None:
            nonlocal begin_s, end_s
            await calm.wait()
            begin_s = clock_s()
            longest = max(traces, key=len)  # a stream that ends early sets `calm` before all began
            step_s = (begin_s - longest[0][0]) / CALM_TOKENS
            for i, prompt in enumerate(prompts):
                # First tokens come at the end of a step: sent at once, all would hit one phase.
                await asyncio.sleep(step_s * (i + 0.5) / len(prompts))
                firsts_s.append((await first_token(self._caller, prompt)).duration_s)
            end_s = clock_s()
            over.set()

        await asyncio.gather(disturb(), *(stream(trace) for trace in traces))
        found = [f for t in traces if (f := _stalled(t, begin_s, end_s)) is not None]
        if len(found) < streams:
            self.measured.skipped.append(f"{point.what}: the streams beside them were too short")
            return
        steps_s, stalls_s = zip(*found, strict=True)
        self.measured.stalls.append(
            Stall(
                point.tokens,
                statistics.fmean(steps_s),
                statistics.fmean(stalls_s) / point.batch,
                statistics.fmean(firsts_s),
                streams,
                sum(MIN_PROMPT_TOKENS + trace[-1][1] / 2 for trace in traces),
            )
        )

    async def _count_characters(self, texts: Iterable[str]) -> None:
        for text in texts:
            last = None
            async with contextlib.aclosing(self._caller.stream(completion_body(text, 1))) as chunks:
                async for chunk in chunks:
                    last = chunk
            if last is not None and last.prompt_tokens > 0:
                self.measured.chars += len(text)
                self.measured.text_tokens += last.prompt_tokens


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """Decode step of `batch` requests without an adapter, all with the same one, and cycling
    through all adapters and none; medians in seconds, None if the batch was never complete."""

    batch: int
    none_s: float | None
    one_s: float | None
    mixed_s: float | None


async def adapter_steps(
    base: EngineCaller,
    adapters: Sequence[EngineCaller],
    batches: Sequence[int],
    rounds: int,
    seed: int = 0,
) -> list[AdapterStep]:
    """The cost of adapters; the three kinds of batches alternate."""
    draw = random.Random(seed)
    kinds = ([base], adapters[:1], [base, *adapters])
    found = []
    for batch in batches:
        point = Point(Kind.DECODE, batch, ADAPTER_PROMPT_TOKENS)
        steps_s: list[list[float]] = [[] for _ in kinds]
        for number in range(rounds + 1):
            for callers, times in zip(kinds, steps_s, strict=True):
                prompts = [random_prompt(draw, point.tokens) for _ in range(batch)]
                step = await decode_step(callers, prompts, point.output_tokens)
                if step is not None and number:  # the first loads the adapters
                    times.append(step.step_s)
        medians = (statistics.median(times) if times else None for times in steps_s)
        found.append(AdapterStep(batch, *medians))
    return found


def _tokens_since(trace: Sequence[tuple[float, int]], since_s: float) -> int:
    """Tokens of a stream that came after `since_s`."""
    before = next((tokens for at_s, tokens in reversed(trace) if at_s <= since_s), 0)
    return trace[-1][1] - before


def _stalled(
    trace: Sequence[tuple[float, int]], begin_s: float, end_s: float
) -> tuple[float, float] | None:
    """A stream's step outside `begin_s` to `end_s`, and the added time of its steps inside.

    None when the stream did not run before and after.
    """
    before = [t for t in trace if t[0] <= begin_s]
    after = [t for t in trace if t[0] >= end_s]
    if not before or not after:
        return None
    calm_s = before[-1][0] - before[0][0] + after[-1][0] - after[0][0]
    calm_tokens = before[-1][1] - before[0][1] + after[-1][1] - after[0][1]
    if calm_tokens <= 0:
        return None
    step_s = calm_s / calm_tokens
    steps = after[0][1] - before[-1][1]
    return step_s, after[0][0] - before[-1][0] - steps * step_s
