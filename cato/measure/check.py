"""Check a profile against a mixed run that it was not fitted to, measured and simulated.

Half of the calls share a prefix with an earlier one, so that the engine's prefix cache serves it;
all other tokens are new. The same calls are run twice: no profile can predict better than the
second run repeats the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cato.core.ids import InvocationId
from cato.core.prefix_cache import PrefixCache
from cato.core.profile import Profile
from cato.measure.calls import EngineCaller, completion_body, random_prompt
from cato.sim.replica import FactKind, SimReplica
from cato.sim.replica import Sequence as SimSequence

CALLS = 80
# Share of the throughput in batches of `PLACES`: calls overlap but do not pile up.
LOAD = 0.5
PLACES = 8
PROMPT_TOKENS = (16, 512)
OUTPUT_TOKENS = (8, 96)
# Number of prefixes that half of the calls share, and the range of their new tokens.
BEGINNINGS = 6
BEGINNING_TOKENS = (64, 4096)
NEW_TOKENS = (16, 128)
# A profile is good when its median error is at most `GOOD`, or `OF_REPEATING` times the median
# difference between two runs of the same calls.
GOOD, OF_REPEATING = 0.10, 1.3


@dataclass(frozen=True, slots=True)
class MixedCall:
    """One call of the run; it arrives `arrives_s` after the start of the run.

    The first `shared_tokens` of its prompt are those of the prefix with the number `beginning`.
    """

    arrives_s: float
    prompt_tokens: int
    output_tokens: int
    beginning: int = 0
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """How the engine schedules a step, and the blocks of its prefix cache (0: it has none).

    `host_tokens` tokens evicted from the cache stay in host memory.
    """

    step_tokens: int
    prompt_cap_tokens: int = 0
    block_tokens: int = 0
    host_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """A call's time from arrival to last token, and its cached prompt tokens."""

    e2e_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call's two measurements and its prediction."""

    call: MixedCall
    measured: Timed
    again: Timed
    predicted: Timed

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted / measured - 1, for both runs."""
        predicted_s = self.predicted.e2e_s
        return predicted_s / self.measured.e2e_s - 1, predicted_s / self.again.e2e_s - 1

    @property
    def repeat_error(self) -> float:
        """The second run / the first - 1."""
        return self.again.e2e_s / self.measured.e2e_s - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """For a set of calls: medians of absolute relative errors; `bias` is the mean signed error."""

    calls: int
    error: float
    repeat_error: float
    bias: float

    @staticmethod
    def of(checked: Sequence[CheckedCall]) -> Verdict:
        errors = [e for c in checked for e in c.errors]
        return Verdict(
            len(checked),
            statistics.median(abs(e) for e in errors),
            statistics.median(abs(c.repeat_error) for c in checked),
            statistics.fmean(errors),
        )

    @property
    def is_good(self) -> bool:
        return self.error <= max(GOOD, OF_REPEATING * self.repeat_error)


def mixed_run(profile: Profile, seed: int, calls: int = CALLS, *, shares: bool) -> list[MixedCall]:
    """Poisson arrivals; lengths log-uniform within the engine's context limit.

    `shares`: half of the calls, at random, share a prefix with others.
    """
    draw = random.Random(seed)
    half = max(2, (profile.context_tokens - OUTPUT_TOKENS[1]) // 2)
    longest = max(PROMPT_TOKENS[0], min(PROMPT_TOKENS[1], half))
    places = max(1, min(PLACES, profile.max_running))
    # All prefixes, plus the calls running beside them, must fit the KV cache.
    most = min(BEGINNING_TOKENS[1], half, profile.kv_capacity_tokens // (4 * BEGINNINGS))
    beginnings = [
        _log_uniform(draw, min(BEGINNING_TOKENS[0], most), most) for _ in range(BEGINNINGS)
    ]
    drawn: list[MixedCall] = []
    for _ in range(calls):
        output = _log_uniform(draw, *OUTPUT_TOKENS)
        prompt = _log_uniform(draw, PROMPT_TOKENS[0], longest)
        beginning, shared = draw.randrange(BEGINNINGS), 0
        if draw.random() < 0.5 and shares:
            shared = beginnings[beginning]
            prompt = shared + min(_log_uniform(draw, *NEW_TOKENS), half)
        drawn.append(MixedCall(0.0, prompt, output, beginning, shared))
    busy_s = statistics.fmean(
        profile.service_s(c.prompt_tokens, c.output_tokens, places, c.shared_tokens) / places
        for c in drawn
    )
    found, at_s = [], 0.0
    for c in drawn:
        at_s += draw.expovariate(LOAD / busy_s)
        found.append(
            MixedCall(at_s, c.prompt_tokens, c.output_tokens, c.beginning, c.shared_tokens)
        )
    return found


def _log_uniform(draw: random.Random, least: int, most: int) -> int:
    return round(least * math.pow(most / least, draw.random()))


def _beginnings(calls: Sequence[MixedCall]) -> dict[int, int]:
    """The prefixes that calls share, with their lengths."""
    return {c.beginning: c.shared_tokens for c in calls if c.shared_tokens}


def predict(profile: Profile, calls: Sequence[MixedCall], steps: EngineSteps) -> list[Timed]:
    """Simulated time of each call, with the prefixes already in the engine's cache."""
    size = steps.block_tokens
    cache = None
    if size:
        cache = PrefixCache(profile.kv_capacity_tokens, size, steps.host_tokens)
    engine = SimReplica(
        profile,
        profile.max_running,
        steps.step_tokens,
        cache=cache,
        prompt_cap_tokens=steps.prompt_cap_tokens,
    )
    # Compute the prefixes long before the run, one after the other.
    todo = [
        MixedCall(1e6 * (i - BEGINNINGS), tokens, 1, beginning, tokens)
        for i, (beginning, tokens) in enumerate(sorted(_beginnings(calls).items()))
    ]
    first = len(todo)
    todo += calls
    blocks = [
        tuple((c.beginning, b) for b in range(c.shared_tokens // size if size else 0)) for c in todo
    ]
    names = {block: n for n, block in enumerate(dict.fromkeys(b for some in blocks for b in some))}
    sequences = [
        SimSequence(
            InvocationId(str(i)),
            c.prompt_tokens,
            c.output_tokens,
            blocks=tuple(names[b] for b in blocks[i]),
        )
        for i, c in enumerate(todo)
    ]
    ended_s = [0.0] * len(todo)
    arrivals = sorted((c.arrives_s + profile.latency_s, i) for i, c in enumerate(todo))
    while arrivals or engine.wake_s < math.inf:
        if arrivals and arrivals[0][0] <= engine.wake_s:
            at_s, i = arrivals.pop(0)
            is_idle = engine.is_idle
            engine.submit(at_s, sequences[i])
            if is_idle:
                engine.go_on(at_s)
            continue
        now_s = engine.wake_s
        for kind, sequence in engine.wake(now_s)[0]:
            if kind is FactKind.DONE:
                ended_s[int(sequence.id)] = now_s
        engine.go_on(now_s)
    return [
        Timed(ended_s[i] - todo[i].arrives_s, sequences[i].cached_tokens)
        for i in range(first, len(todo))
    ]


class _Runner:
    """Runs the same calls on the real replica, any number of times, with fresh new tokens."""

    def __init__(self, caller: EngineCaller, calls: Sequence[MixedCall], seed: int) -> None:
        self._caller, self._calls = caller, calls
        self._random = random.Random(seed)
        lengths = _beginnings(calls)
        self._beginnings = {b: random_prompt(self._random, n) for b, n in lengths.items()}

    async def prime(self) -> None:
        """Compute the prefixes, so that they are cached."""
        for prompt in self._beginnings.values():
            await self._one([*prompt, *random_prompt(self._random, 1)], 1)

    async def run(self, progress: Callable[[], None]) -> list[Timed]:
        """Run all calls at their arrival times; `progress` is called when one has ended.

        Raise the first error of a call, with which all others end.
        """
        prompts = [
            [
                *(self._beginnings[c.beginning] if c.shared_tokens else ()),
                *random_prompt(self._random, c.prompt_tokens - c.shared_tokens),
            ]
            for c in self._calls
        ]
        clock = asyncio.get_running_loop().time
        begin_s = clock()

        async def at_its_time(i: int) -> Timed:
            call = self._calls[i]
            await asyncio.sleep(begin_s + call.arrives_s - clock())
            timed = await self._one(prompts[i], call.output_tokens)
            progress()
            return timed

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(at_its_time(i)) for i in range(len(prompts))]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    async def _one(self, prompt: list[int], output: int) -> Timed:
        clock = asyncio.get_running_loop().time
        started_s, cached = clock(), 0
        body = completion_body(prompt, output)
        async with contextlib.aclosing(self._caller.stream(body)) as chunks:
            async for chunk in chunks:
                cached = max(cached, chunk.cached_tokens)
        return Timed(clock() - started_s, cached)


async def check(
    caller: EngineCaller,
    profile: Profile,
    steps: EngineSteps,
    calls: Sequence[MixedCall],
    seed: int,
    progress: Callable[[], None],
) -> list[CheckedCall]:
    """Run the calls twice and compare them with the simulator's prediction."""
    runner = _Runner(caller, calls, seed)
    await runner.prime()
    measured, again = await runner.run(progress), await runner.run(progress)
    predicted = predict(profile, calls, steps)
    return [CheckedCall(*x) for x in zip(calls, measured, again, predicted, strict=True)]
