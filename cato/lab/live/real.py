"""Tasks for a real engine: code to continue, and answers as long as the model makes them.

The simulator must know the lengths, but a limit per request would reveal them to CATO. So every
prompt is answered once beforehand, bypassing CATO's workflows and their learning, and the
resulting lengths are those of the simulated tasks. Decoding is greedy, so that every arm gets the
same answers, except for rounding in other batches; a penalty keeps a small model out of loops.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import aiohttp
import numpy as np

from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.lab.client import BenchError
from cato.sim.tasks import SimNode, SimTask
from cato.sim.workloads import SABER_CLASSES, SABER_ENGINE, SABER_SHARES, lengths, poisson

POOL = PoolName("engine")
MIX = "W3"
# SABER's prompts divided by three: the demo model has a context of 1,024 tokens.
SHRUNK = 3
# Values of the demo model's engine.
FULL_BATCH = 16
# No seed: vLLM 0.32 on CPU crashes on a seeded request whose prompt takes several steps.
TEMPERATURE = 0.0
EXTRA: Mapping[str, object] = {"ignore_eos": True, "frequency_penalty": 0.8}
MAX_PROMPT_TOKENS = 350
_LEAST_FILE_BYTES = 20_000
_STREAM = 5  # random stream; the simulator's workloads use others


@dataclass(frozen=True, slots=True)
class Ending:
    """Where the answers of a class end: at one of `stops`, or at `max_tokens`."""

    stops: tuple[str, ...]
    max_tokens: int
    mean_tokens: int


# Means of 64 answers of the demo model; SABER's divided by three are 14, 10, 129 and 206. The
# spread is the model's own: 0.7 to 0.8 of the mean. One in thirty is truncated.
ENDINGS: Mapping[str, Ending] = {
    "qna": Ending(("\n",), 60, 9),
    "summary": Ending(("\n",), 60, 9),
    "generation": Ending(("return",), 400, 102),
    "translation": Ending(("raise",), 600, 199),
}


# With random weights no answer ends by itself: SABER's means divided by three, without spread.
ENDLESS: Mapping[str, Ending] = {
    name: Ending((), tokens, tokens)
    for name, tokens in {"qna": 14, "summary": 10, "generation": 129, "translation": 206}.items()
}


@dataclass(frozen=True, slots=True)
class Mix:
    """SABER's mix for one engine of `profile` behind `pool`; load is relative to `full_batch`
    concurrent calls, its maximum. `endings` are those of the model that answers."""

    profile: Profile
    full_batch: int = FULL_BATCH
    endings: Mapping[str, Ending] = field(default_factory=lambda: ENDINGS)
    pool: PoolName = POOL

    def tasks(self, load: float, seed: int, n: int) -> list[SimTask]:
        """`n` tasks; at load 1 their mean work equals the engine's capacity.

        A target is the same multiple of the mean service time alone as in SABER. Output lengths are
        the means of the class until they are recorded.
        """
        rng = np.random.default_rng([seed, _STREAM, round(load * 1000)])
        names, profile = list(SABER_CLASSES), self.profile
        prompts = {k: SABER_CLASSES[k][0] / SHRUNK for k in names}
        shares = [SABER_SHARES[MIX][k] for k in names]
        means = {k: self.endings[k].mean_tokens for k in names}
        busy_s = sum(
            share * profile.service_s(round(prompts[k]), means[k], self.full_batch)
            for k, share in zip(names, shares, strict=True)
        )
        times = poisson(rng, load * self.full_batch / busy_s, n)
        classes = rng.choice(names, n, p=shares)
        draws = rng.random(n)
        tasks = []
        for i, arrived_at_s in enumerate(times):
            name = str(classes[i])
            prompt = min(MAX_PROMPT_TOKENS, int(lengths(rng, prompts[name], 1)[0]))
            node = SimNode(self.pool, prompt, means[name], means[name])
            target_s = _strictness(name) * profile.service_s(round(prompts[name]), means[name])
            tasks.append(
                SimTask(
                    f"t{i:05d}",
                    TaskName(name),
                    arrived_at_s,
                    SloMetric.E2E,
                    target_s,
                    (node,),
                    (float(draws[i]),),
                )
            )
        return tasks

    def completion(self, task: SimTask, prompt: str, model: str) -> dict[str, object]:
        """The body of an OpenAI completion equivalent to a workflow of `task`'s class."""
        ending = self.endings[task.name]
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": ending.max_tokens,
            "stop": list(ending.stops),
            "temperature": TEMPERATURE,
            **EXTRA,
        }

    async def recorded(
        self,
        tasks: Sequence[SimTask],
        prompts: Sequence[str],
        url: str,
        model: str,
        done: Callable[[], None],
    ) -> list[SimTask]:
        """The tasks with the lengths of the model's answers; raise `BenchError` when it does not
        answer.

        Sequentially, so that every prompt is answered in a batch of one. An answer without stop
        texts has its maximum length: there only the prompt is counted.
        """
        found = []
        async with aiohttp.ClientSession() as session:
            for task, prompt in zip(tasks, prompts, strict=True):
                ending = self.endings[task.name]
                body = self.completion(task, prompt, model)
                if not ending.stops:
                    body["max_tokens"] = 1
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.json()
                if response.status != 200:
                    raise BenchError(f"{model} did not answer a prompt while recording: {answer}")
                usage = answer["usage"]
                output = usage["completion_tokens"] if ending.stops else ending.max_tokens
                node = replace(
                    task.nodes[0],
                    prompt_tokens=usage["prompt_tokens"],
                    output_tokens=max(1, output),
                )
                found.append(replace(task, nodes=(node,)))
                done()
        return found


def _strictness(name: str) -> float:
    """SABER's target over the mean service time on its engine alone."""
    prompt, output, target_s = SABER_CLASSES[name]
    return target_s / SABER_ENGINE.service_s(prompt, output)


def code_prompts(tasks: Sequence[SimTask], chars_per_token: float, seed: int) -> list[str]:
    """Lines of the standard library for each task, of about its prompt length."""
    draw = random.Random(seed)
    texts = _library()
    found = []
    for task in tasks:
        characters = round(task.nodes[0].prompt_tokens * chars_per_token)
        text = draw.choice(texts)
        start = text.find("\n", draw.randrange(len(text) // 2)) + 1
        found.append(text[start : start + characters])
    return found


@cache
def _library() -> tuple[str, ...]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.glob("*.py") if p.stat().st_size > _LEAST_FILE_BYTES)
    return tuple(p.read_text(encoding="utf-8", errors="replace") for p in files)


def with_belief(task: SimTask, belief: LengthBelief | None) -> SimTask:
    """The task with the belief that the simulator's policies get; None: that of its mix."""
    if belief is None:
        return task
    node = replace(task.nodes[0], expected_tokens=round(belief.mean), length=belief)
    return replace(task, nodes=(node,))
