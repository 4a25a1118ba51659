"""Does a profile foretell a run that it was not made from? Mixed calls, measured and simulated."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cato.control.profile_sweep import EngineCaller, completion_body, random_prompt
from cato.core.ids import PoolName, TaskName
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.policies.schedulers import static_cap
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.tasks import SimNode, SimTask

CALLS = 60
# Of what the replica can do in batches of `PLACES`: calls meet each other, and do not pile up.
LOAD = 0.5
PLACES = 8
PROMPT_TOKENS = (16, 512)
OUTPUT_TOKENS = (8, 96)


@dataclass(frozen=True, slots=True)
class MixedCall:
    """One call of the run; it arrives `arrives_s` after its begin."""

    arrives_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call with its measured and its foretold time from arrival to last token."""

    call: MixedCall
    measured_s: float
    foretold_s: float

    @property
    def error(self) -> float:
        """Foretold / measured - 1."""
        return self.foretold_s / self.measured_s - 1


def median_error(checked: Sequence[CheckedCall]) -> float:
    """Of the absolute relative errors."""
    return statistics.median(abs(c.error) for c in checked)


def mixed_run(profile: Profile, seed: int, calls: int = CALLS) -> list[MixedCall]:
    """Poisson arrivals; lengths log-uniform within what the engine's context allows."""
    draw = random.Random(seed)
    longest = max(PROMPT_TOKENS[0], min(PROMPT_TOKENS[1], profile.context_tokens // 2))
    places = max(1, min(PLACES, profile.max_running))
    lengths = [
        (_log_uniform(draw, PROMPT_TOKENS[0], longest), _log_uniform(draw, *OUTPUT_TOKENS))
        for _ in range(calls)
    ]
    busy_s = statistics.fmean(profile.service_s(p, o, places) / places for p, o in lengths)
    found, at_s = [], 0.0
    for prompt, output in lengths:
        at_s += draw.expovariate(LOAD / busy_s)
        found.append(MixedCall(at_s, prompt, output))
    return found


def _log_uniform(draw: random.Random, least: int, most: int) -> int:
    return round(least * math.pow(most / least, draw.random()))


def foretell(profile: Profile, calls: Sequence[MixedCall], chunk_tokens: int | None) -> list[float]:
    """Seconds from arrival to last token of each, on the simulator's replica of `profile`."""
    name = PoolName("checked")
    tasks = [
        SimTask(
            str(i),
            TaskName("check"),
            c.arrives_s,
            SloMetric.E2E,
            1.0,
            (SimNode(name, c.prompt_tokens, c.output_tokens, c.output_tokens),),
            (0.0,),
        )
        for i, c in enumerate(calls)
    ]
    policies = static_cap(profile.max_running)
    outcomes = Fleet([PoolSetup(name, (profile,), policies, chunk_tokens=chunk_tokens)]).run(tasks)
    return [o.e2e_s for o in outcomes]


async def measure(
    caller: EngineCaller, calls: Sequence[MixedCall], seed: int, progress: Callable[[int], None]
) -> list[float]:
    """The same calls on the real replica, at their times; `progress` is told how many ended."""
    draw = random.Random(seed)
    prompts = [random_prompt(draw, c.prompt_tokens) for c in calls]
    took_s = [0.0] * len(calls)
    clock = asyncio.get_running_loop().time
    begin_s, ended = clock(), 0

    async def one(i: int) -> None:
        nonlocal ended
        await asyncio.sleep(begin_s + calls[i].arrives_s - clock())
        started_s = clock()
        body = completion_body(prompts[i], calls[i].output_tokens)
        async with contextlib.aclosing(caller.stream(body)) as chunks:
            async for _ in chunks:
                pass
        took_s[i] = clock() - started_s
        ended += 1
        progress(ended)

    async with asyncio.TaskGroup() as group:
        for i in range(len(calls)):
            group.create_task(one(i))
    return took_s


async def check(
    caller: EngineCaller,
    profile: Profile,
    chunk_tokens: int | None,
    calls: Sequence[MixedCall],
    seed: int,
    progress: Callable[[int], None],
) -> list[CheckedCall]:
    """Run the calls and compare. `chunk_tokens`: the engine's prompt tokens of one step."""
    measured_s = await measure(caller, calls, seed, progress)
    foretold_s = foretell(profile, calls, chunk_tokens)
    return [CheckedCall(*x) for x in zip(calls, measured_s, foretold_s, strict=True)]
