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
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from cato.core.errors import InputError
from cato.core.prefix_cache import BLOCK_TOKENS
from cato.core.profile import UNMEASURED, Profile
from cato.engines.base import EngineChunk
from cato.profiles.fit import Sample, Step, fit, r2

# Token ids that exist in every vocabulary and are hardly ever special tokens.
TOKEN_IDS = range(300, 2_000)
MIN_PROMPT_TOKENS = 16
# Tokens that a request generates while its whole batch decodes.
WINDOW_TOKENS = 24
# vLLM mixes prompt chunks of at least this many tokens with decode steps: an early request of a
# batch generates about one token per chunk while the others' prompts are processed.
PROMPT_PIECE_TOKENS = 128
# Prompts, one after the other, beside running streams; the streams run alone before and after.
STALLING_PROMPTS = 6
STALLED_STREAMS = 4
STALLED_TOKENS = 512
CALM_TOKENS = 16
WARM_UPS = 3
# Prompt length at which adapters are compared.
ADAPTER_PROMPT_TOKENS = 64
# New tokens after the cached prefix.
NEW_TOKENS = 24


class EngineCaller(Protocol):
    """One replica's engine, called directly, bypassing its pool's queue."""

    def stream(self, body: Mapping[str, object]) -> AsyncGenerator[EngineChunk, None]:
        """Chunks of one completion; `body` is an OpenAI body as in `EngineRequest`."""
        ...

    async def held(self) -> int:
        """Requests in the replica now, from all senders."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """The engine to measure, and the limits that the sweep must keep.

    `kv_capacity_tokens` 0 means unknown. `step_tokens` is the engine's token budget of a step (0:
    none), `prompt_cap_tokens` the most that one prompt gets of it beside other requests (0: all),
    `block_tokens` the block size of its prefix cache (0: it has none).
    """

    model: str
    accelerator: str
    engine: str
    context_tokens: int
    max_running: int
    kv_capacity_tokens: int
    load_s: float
    step_tokens: int = 0
    prompt_cap_tokens: int = 0
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. Lengths beyond the engine's limits are left out.

    After a point that took longer than `point_limit_s`, larger ones of its kind are skipped. No
    round starts that would end after `total_s` (estimated by the last one), but at least one round
    is always measured.
    """

    prompt_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    concurrencies: tuple[int, ...]
    stalling_prompt_tokens: tuple[int, ...]
    rounds: int
    point_limit_s: float
    total_s: float


QUICK = Plan(
    prompt_tokens=(32, 128, 384, 896, 1792),
    cached_tokens=(256, 768, 3072),
    contexts=(64, 384, 1536),
    concurrencies=(1, 4, 8),
    stalling_prompt_tokens=(32, 192),
    rounds=3,
    point_limit_s=2.0,
    total_s=40.0,
)
FULL = Plan(
    prompt_tokens=(16, 32, 64, 128, 256, 448, 704, 960, 1536, 2048, 4096, 8192, 24576, 65536),
    cached_tokens=(128, 384, 768, 2048, 8192, 32768),
    contexts=(48, 192, 448, 832, 1536, 4096, 8192, 32768),
    concurrencies=(1, 2, 4, 8, 16, 32, 64),
    stalling_prompt_tokens=(16, 64, 256),
    rounds=7,
    point_limit_s=20.0,
    total_s=600.0,
)


class _Kind(Enum):
    FIRST_TOKEN = "first token, prompt"
    CACHED = "first token after cached"
    DECODE = "decode step, context"
    STALL = "stall by prompts of"


@dataclass(frozen=True, slots=True)
class _Point:
    """One thing to measure: a prompt, a batch that decodes, or prompts beside a stream."""

    kind: _Kind
    batch: int
    tokens: int

    @property
    def work(self) -> int:
        return self.batch * self.tokens


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


@dataclass(frozen=True, slots=True)
class Stall:
    """How a prompt of `prompt_tokens` slowed `streams` whose steps took `step_s` without it.

    `stall_s`: the added delay of their tokens; negative when the machine was faster than before and
    after. `first_token_s`: the prompt's own time to first token. `held_tokens`: the sum of the
    streams' contexts.
    """

    prompt_tokens: int
    step_s: float
    stall_s: float
    first_token_s: float
    streams: int = STALLED_STREAMS
    held_tokens: float = 0.0


@dataclass(slots=True)
class Measured:
    """Results of a sweep. `disturbed` counts measurements taken beside other work."""

    first_tokens: list[FirstToken] = field(default_factory=list)
    decode: list[DecodeStep] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    chars: int = 0
    text_tokens: int = 0
    rounds: int = 0
    points: int = 0
    disturbed: int = 0
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A point: its measured median and the fitted profile's prediction, in seconds."""

    what: str
    batch: int
    tokens: int
    samples: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative; positive when the profile predicts too much."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The fitted profile and how well it predicts the measurements."""

    profile: Profile
    prefill_r2: float
    decode_r2: float
    comparisons: tuple[Comparison, ...]
    samples: int


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
        points = _points(self._target, self._plan)
        total = len(points) * self._plan.rounds
        progress(0, total, "warming up")
        for _ in range(WARM_UPS):
            await first_token(self._caller, random_prompt(self._random, MIN_PROMPT_TOKENS), 2)
        await self._count_characters(texts)
        started_s = _now_s()
        done = 0
        for number in range(self._plan.rounds):
            round_started_s = _now_s()
            if number:
                # The first round goes from small to large and finds the points that take too long.
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
                point_started_s = _now_s()
                await self._measure(point)
                done += 1
                kept.append(point)
                if _now_s() - point_started_s > self._plan.point_limit_s and not number:
                    too_long[point.kind] = point.work
            points = kept
            self.measured.rounds += 1
            now_s = _now_s()
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
        if point.kind is _Kind.CACHED:
            await self._measure_cached(point)
            return
        prompt = random_prompt(self._random, point.tokens)
        self.measured.first_tokens.append(await first_token(self._caller, prompt))

    async def _measure_cached(self, point: _Point) -> None:
        """Send the same prefix twice, each time followed by new tokens."""
        beginning = random_prompt(self._random, point.tokens)
        await first_token(self._caller, [*beginning, *random_prompt(self._random, NEW_TOKENS)])
        again = await first_token(
            self._caller, [*beginning, *random_prompt(self._random, NEW_TOKENS)]
        )
        if not again.cached_tokens:
            self.measured.skipped.append(f"{_what(point)}: the engine did not keep the prefix")
            return
        self.measured.first_tokens.append(again)

    async def _measure_decode(self, point: _Point) -> None:
        prompts = [random_prompt(self._random, point.tokens) for _ in range(point.batch)]
        step = await decode_step([self._caller], prompts, _output_tokens(point))
        if step is None:
            self.measured.skipped.append(f"{_what(point)}: never all in one batch")
            return
        self.measured.decode.append(step)

    async def _measure_stall(self, point: _Point) -> None:
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
                    trace.append((_now_s(), chunk.output_tokens))
                    if all(t and t[-1][1] > CALM_TOKENS for t in traces):
                        calm.set()
                    if over.is_set() and _tokens_since(trace, end_s) >= CALM_TOKENS:
                        break
            _check_answered(trace)
            calm.set()  # too short anyway: do not wait for the rest

        async def disturb() -> None:
            nonlocal begin_s, end_s
            await calm.wait()
            begin_s = _now_s()
            longest = max(traces, key=len)  # a stream that ends early sets `calm` before all began
            step_s = (begin_s - longest[0][0]) / CALM_TOKENS
            for i, prompt in enumerate(prompts):
                # First tokens come at the end of a step: sent at once, all would hit one phase.
                await asyncio.sleep(step_s * (i + 0.5) / len(prompts))
                firsts_s.append((await first_token(self._caller, prompt)).duration_s)
            end_s = _now_s()
            over.set()

        await asyncio.gather(disturb(), *(stream(trace) for trace in traces))
        found = [f for t in traces if (f := _stalled(t, begin_s, end_s)) is not None]
        if len(found) < streams:
            self.measured.skipped.append(f"{_what(point)}: the streams beside them were too short")
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


async def first_token(caller: EngineCaller, prompt: list[int], output: int = 1) -> FirstToken:
    """The first of `output` tokens; raise `InputError` when there is none."""
    started_s, first_s, cached = _now_s(), None, 0
    async with contextlib.aclosing(caller.stream(completion_body(prompt, output))) as chunks:
        async for chunk in chunks:
            if first_s is None and chunk.output_tokens > 0:
                first_s = _now_s()
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
                trace.append((_now_s(), chunk.output_tokens))
    _check_answered(trace)
    return trace


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
        point = _Point(_Kind.DECODE, batch, ADAPTER_PROMPT_TOKENS)
        steps_s: list[list[float]] = [[] for _ in kinds]
        for number in range(rounds + 1):
            for callers, times in zip(kinds, steps_s, strict=True):
                prompts = [random_prompt(draw, point.tokens) for _ in range(batch)]
                step = await decode_step(callers, prompts, _output_tokens(point))
                if step is not None and number:  # the first loads the adapters
                    times.append(step.step_s)
        medians = (statistics.median(times) if times else None for times in steps_s)
        found.append(AdapterStep(batch, *medians))
    return found


def _now_s() -> float:
    return asyncio.get_running_loop().time()


_NO_TOKEN = "the engine answered without a token; nothing can be measured"


def _check_answered(trace: Sequence[tuple[float, int]]) -> None:
    if not trace:
        raise InputError(_NO_TOKEN)


def evaluate(target: Target, measured: Measured) -> SweepResult:
    """Fit a profile to the measurements; raise `InputError` when there are too few."""
    prompts = [_first_sample(target, f) for f in measured.first_tokens]
    decode = [_decode_sample(d) for d in measured.decode]
    beside = [sample for s in measured.stalls for sample in _stall_samples(target, s)]
    blank = replace(
        UNMEASURED,
        model=target.model,
        accelerator=target.accelerator,
        engine=target.engine,
        kv_capacity_tokens=target.kv_capacity_tokens or target.max_running * target.context_tokens,
        max_running=target.max_running,
        context_tokens=target.context_tokens,
        load_s=target.load_s,
        step_tokens=target.step_tokens,
        block_tokens=target.block_tokens or BLOCK_TOKENS,
    )
    profile = fit([*prompts, *decode, *beside], blank, knows_latency=bool(beside))
    if measured.text_tokens > 0:
        profile = replace(profile, chars_per_token=measured.chars / measured.text_tokens)
    samples = len(measured.first_tokens) + len(measured.decode) + len(measured.stalls)
    comparisons = _comparisons(target, profile, measured)
    return SweepResult(profile, r2(prompts, profile), r2(decode, profile), comparisons, samples)


def prompt_steps(
    target: Target, prompt_tokens: int, cached_tokens: int, streams: int = 0, held: float = 0.0
) -> list[Step]:
    """The steps in which the engine computes one prompt, alone or beside `streams` that decode."""
    most = max(1, (target.step_tokens or prompt_tokens) - streams)
    if streams and target.prompt_cap_tokens:
        most = min(most, target.prompt_cap_tokens)
    steps, done = [], cached_tokens
    while done < prompt_tokens:
        piece = min(most, prompt_tokens - done)
        is_last = done + piece == prompt_tokens
        attended = piece * (done + piece / 2)
        steps.append(Step(streams, held + done, piece, int(is_last), attended))
        done += piece
    return steps


def _first_sample(target: Target, first: FirstToken) -> Sample:
    steps = prompt_steps(target, first.prompt_tokens, first.cached_tokens)
    return Sample(tuple(steps), first.duration_s, has_latency=True)


def _decode_sample(step: DecodeStep) -> Sample:
    one = Step(step.batch, step.batch * step.context_tokens)
    return Sample((one,), step.step_s, has_latency=False)


def _stall_samples(target: Target, stall: Stall) -> list[Sample]:
    """The steps shared by streams and prompt, and the prompt's way through them.

    A prompt beside streams waits for half a step on average, then shares the next ones.
    """
    streams, held = stall.streams, stall.held_tokens
    mixed = tuple(prompt_steps(target, stall.prompt_tokens, 0, streams, held))
    waits = Step(streams, held, count=0.5)
    mixed_s = stall.stall_s + len(mixed) * stall.step_s
    found = [Sample((waits, *mixed), stall.first_token_s, has_latency=True)]
    if mixed_s > 0:  # the machine may have been faster than before and after
        found.append(Sample(mixed, mixed_s, has_latency=False))
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


def _comparisons(target: Target, profile: Profile, measured: Measured) -> tuple[Comparison, ...]:
    """One for each point, sorted by kind and size."""
    found: dict[tuple[str, int, int], list[tuple[float, Sample]]] = {}
    for first in measured.first_tokens:
        what = "first token, cached" if first.cached_tokens else "first token"
        sample = _first_sample(target, first)
        key = (what, 1, first.prompt_tokens)
        found.setdefault(key, []).append((first.duration_s, sample))
    for step in measured.decode:
        # Contexts of one point differ by a token or two between rounds.
        key = ("decode step", step.batch, round(step.context_tokens / 16) * 16)
        found.setdefault(key, []).append((step.step_s, _decode_sample(step)))
    for stall in measured.stalls:
        sample = _stall_samples(target, stall)[0]
        key = ("first token beside streams", stall.streams, stall.prompt_tokens)
        found.setdefault(key, []).append((stall.first_token_s, sample))
    rows = []
    for (what, batch, tokens), pairs in found.items():
        measured_s = statistics.median(s for s, _ in pairs)
        predicted_s = statistics.median(sample.predicted_s(profile) for _, sample in pairs)
        rows.append(Comparison(what, batch, tokens, len(pairs), measured_s, predicted_s))
    kinds = list(dict.fromkeys(row.what for row in rows))
    return tuple(sorted(rows, key=lambda r: (kinds.index(r.what), r.batch, r.tokens)))


def _points(target: Target, plan: Plan) -> list[_Point]:
    """All points that fit the engine, the smallest work first."""
    capacity = target.kv_capacity_tokens or target.max_running * target.context_tokens
    points = [_Point(_Kind.FIRST_TOKEN, 1, n) for n in plan.prompt_tokens]
    if target.block_tokens:
        # Whole blocks, at least one: shorter prefixes are never found in the cache.
        blocks = {max(1, n // target.block_tokens) for n in plan.cached_tokens}
        points += [_Point(_Kind.CACHED, 1, b * target.block_tokens) for b in sorted(blocks)]
    points += [_Point(_Kind.DECODE, b, c) for b in plan.concurrencies for c in plan.contexts]

    def fits(point: _Point) -> bool:
        more = {_Kind.DECODE: _output_tokens(point), _Kind.CACHED: NEW_TOKENS + 1}
        tokens = point.tokens + more.get(point.kind, 1)
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
    held = STALLED_STREAMS * (MIN_PROMPT_TOKENS + STALLED_TOKENS)
    if target.max_running >= 2:
        prompts = (
            n
            for n in plan.stalling_prompt_tokens
            if n + 1 < target.context_tokens and held + n <= capacity
        )
        fitting += [_Point(_Kind.STALL, STALLING_PROMPTS, n) for n in prompts]
    return fitting


def _output_tokens(point: _Point) -> int:
    """Enough that the first of a batch still decodes when the last gets its first token."""
    return WINDOW_TOKENS + point.batch + point.work // PROMPT_PIECE_TOKENS


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


def _what(point: _Point) -> str:
    return f"{point.kind.value} {point.tokens} x {point.batch}"
