"""Engine schedulers compared: long prompts beside streams and short prompts, in turns.

The model has random weights, so nothing is downloaded. Eight streams run; three long prompts
arrive, followed by short ones. Measured from the arrival of the first long prompt until the last
long one has begun: the streams' inter-token latency, and the TTFT of both kinds of prompts. A
simulated engine gives the same table.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from cato.core.errors import InputError
from cato.core.ids import ModelName
from cato.core.pool.prefill import NOTHING_DUE, CallTarget
from cato.core.profile import UNMEASURED
from cato.core.topology import DUE_DATE, EngineSpec, ModelSpec
from cato.engines.base import Engine, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.engines.vllm.host import Zygote
from cato.engines.vllm.process import VllmEngine
from cato.lab.bench.checkpoints import write_checkpoint
from cato.lab.client import BenchError
from cato.wire.endpoint import Endpoint

CONTEXT_TOKENS = 16_384
MODEL = ModelSpec(ModelName("random"), "random", "qwen")
SPEC = EngineSpec(
    "vllm",
    zygote=True,
    dtype="float32",
    max_num_seqs=32,
    max_model_len=CONTEXT_TOKENS,
    kv_cache_memory_bytes=1 << 30,
    start_timeout_s=120.0,
)
# Profile of the random model on two cores, used by the simulated engine only.
PROFILE = replace(
    UNMEASURED,
    model="random",
    engine="simulated",
    accelerator="cpu",
    prefill_per_batch_token_s=1.0e-4,
    prefill_per_attended_token_s=2.6e-8,
    prefill_base_s=0.0,
    decode_per_context_token_s=0.0,
    decode_per_request_s=0.3e-3,
    decode_base_s=5.6e-3,
    context_tokens=CONTEXT_TOKENS,
    load_s=0.0,
)
ENGINES = ("vllm", "simulated")
STREAM_TOKENS, BEGUN_TOKENS = 8192, 5
LEAST_ID, MOST_ID = 300, 2900  # token ids of the demo model's vocabulary, no special ones
# Two settings of vLLM's own scheduler, and CATO's rule in it.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "steps-256": {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 0},
    "pieces-256": {
        "max_num_batched_tokens": 2048,
        "long_prefill_token_threshold": 256,
    },
    "due-date": {"max_num_batched_tokens": 2048, "scheduler": DUE_DATE},
}


@dataclass(frozen=True, slots=True)
class Form:
    """Prompts by arrival time, in seconds after the streams have begun, and their tokens."""

    streams: int = 8
    stream_prompt_tokens: int = 64
    longs: tuple[tuple[float, int], ...] = ((0.0, 12_000), (0.2, 8_000), (0.4, 6_000))
    shorts: tuple[tuple[float, int], ...] = tuple((0.6 + 0.6 * i, 100) for i in range(6))
    long_due_s: float = 20.0
    short_due_s: float = 0.5
    short_output_tokens: int = 8


@dataclass(slots=True)
class Run:
    """One arm in one round: TTFTs, and inter-token latencies of streams."""

    longs_s: list[float] = field(default_factory=list)
    shorts_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        waits = sorted(self.waits_s)
        return {
            "itl_p50_ms": 1e3 * statistics.median(waits),
            "itl_p95_ms": 1e3 * waits[round(0.95 * (len(waits) - 1))],
            "long_ttft_s": statistics.mean(self.longs_s),
            "last_long_ttft_s": max(self.longs_s),
            "short_ttft_ms": 1e3 * statistics.median(self.shorts_s),
            "last_short_ttft_ms": 1e3 * max(self.shorts_s),
        }


class Shown(Protocol):
    def begin(self, what: str, steps: int) -> None: ...

    def step(self) -> None: ...


def measure(
    engine: str,
    rounds: int,
    seed: int,
    folder: Path,
    shown: Shown,
    arms: Sequence[str] = (),
    form: Form = Form(),
) -> dict[str, Any]:
    """All arms in each round, in rotating order."""
    unknown = [name for name in arms if name not in ARMS]
    if engine not in ENGINES or unknown:
        which = engine if engine not in ENGINES else ", ".join(unknown)
        raise InputError(
            f"no such engine or arm: {which}; there are {', '.join(ENGINES)}, "
            f"and {', '.join(map(repr, ARMS))}"
        )
    chosen = tuple(arms) or tuple(ARMS)
    shown.begin(f"schedulers on {engine}", rounds * len(chosen))
    found = asyncio.run(_measured(engine, rounds, seed, folder, shown.step, chosen, form))
    return {
        "engine": engine,
        "simulated": engine == "simulated",
        "seed": seed,
        "arms": {
            arm: {"settings": dict(ARMS[arm]), "rounds": [run.row() for run in runs]}
            for arm, runs in found.items()
        },
    }


async def _measured(
    engine: str,
    rounds: int,
    seed: int,
    folder: Path,
    step: Callable[[], None],
    arms: Sequence[str],
    form: Form,
) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {arm: [] for arm in arms}
    async with _engines(engine, folder) as make:
        for number in range(rounds):
            for i in range(len(arms)):
                arm = arms[(number + i) % len(arms)]
                made = make(replace(SPEC, **ARMS[arm]))
                await made.start()
                try:
                    found[arm].append(await run(made, form, seed + number))
                finally:
                    await made.stop()
                step()
    return found


@asynccontextmanager
async def _engines(
    engine: str, folder: Path
) -> AsyncGenerator[Callable[[EngineSpec], Engine], None]:
    if engine == "simulated":
        yield lambda spec: SimulatedEngine(PROFILE, replace(spec, kind="simulated"))
        return
    source = str(write_checkpoint(folder / "model", "deep", 1, CONTEXT_TOKENS))
    zygote = Zygote(folder / "z.sock")
    await zygote.ready()
    try:
        yield lambda spec: VllmEngine(spec, MODEL, source, str(folder), zygote.socket)
    finally:
        await zygote.stop()


async def run(engine: Engine, form: Form, seed: int) -> Run:
    """The form on a ready engine; raise the first error of a call, with which all others end."""
    draw, found = random.Random(seed), Run()
    # First executions take longer; the rule learns step times.
    for tokens in (100, 3000, 100):
        await _first_s(engine, _asked(draw, f"warm-up-{tokens}", tokens, 4), NOTHING_DUE)
    heard: list[list[float]] = [[] for _ in range(form.streams)]
    begins = [asyncio.Event() for _ in heard]
    try:
        async with asyncio.TaskGroup() as group:
            streams = []
            for i, (times, begun) in enumerate(zip(heard, begins, strict=True)):
                request = _asked(draw, f"stream-{i}", form.stream_prompt_tokens, STREAM_TOKENS)
                streams.append(group.create_task(_listen(engine, request, times, begun)))
            await asyncio.gather(*(begun.wait() for begun in begins))
            began_s = time.monotonic()
            longs = [
                _later(engine, _asked(draw, f"long-{i}", tokens, 2), at_s, form.long_due_s)
                for i, (at_s, tokens) in enumerate(form.longs)
            ]
            output = form.short_output_tokens
            shorts = [
                _later(engine, _asked(draw, f"short-{i}", tokens, output), at_s, form.short_due_s)
                for i, (at_s, tokens) in enumerate(form.shorts)
            ]
            firsts = await asyncio.gather(*longs, *shorts)
            for task in streams:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    found.longs_s, found.shorts_s = firsts[: len(longs)], firsts[len(longs) :]
    ended_s = began_s + max(
        at_s + first_s for (at_s, _), first_s in zip(form.longs, found.longs_s, strict=True)
    )
    for times in heard:
        found.waits_s += gaps_s(times, began_s, ended_s)
    return found


def gaps_s(times_s: Sequence[float], began_s: float, ended_s: float) -> list[float]:
    """The gaps between tokens that end in the window. A stream without a token in it has one, from
    its last token before to the window's end: it stood still at least for so long."""
    times_s = [at_s for at_s in times_s if at_s <= ended_s]
    found = [b - a for a, b in itertools.pairwise(times_s) if b >= began_s]
    return found or [ended_s - times_s[-1]]


def _asked(draw: random.Random, id: str, tokens: int, output_tokens: int) -> EngineRequest:
    body: dict[str, object] = {
        "prompt": [draw.randrange(LEAST_ID, MOST_ID) for _ in range(tokens)],
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    return EngineRequest(id, Endpoint.COMPLETIONS, body, prompt_tokens=tokens)


async def _later(engine: Engine, request: EngineRequest, at_s: float, due_s: float) -> float:
    await asyncio.sleep(at_s)
    return await _first_s(engine, request, CallTarget(due_s))


async def _first_s(engine: Engine, request: EngineRequest, target: CallTarget) -> float:
    began_s, first_s = time.monotonic(), inf
    async for chunk in engine.generate(replace(request, target=target)):
        if chunk.output_tokens:
            first_s = min(first_s, time.monotonic() - began_s)
    if first_s == inf:
        raise BenchError(f"the engine answered {request.id} without a token")
    return first_s


async def _listen(
    engine: Engine, request: EngineRequest, times: list[float], begun: asyncio.Event
) -> None:
    """Record when its tokens arrive; `begun` is set after a few. Raise `BenchError` if it ends
    early."""
    said = 0
    async for chunk in engine.generate(request):
        if chunk.output_tokens > said:
            said = chunk.output_tokens
            times.append(time.monotonic())
            if said > BEGUN_TOKENS:
                begun.set()
    if said < STREAM_TOKENS:
        raise BenchError(f"{request.id} ended after {said} of {STREAM_TOKENS} tokens")


def table(report: Mapping[str, Any]) -> Table:
    """Minimum and maximum over the rounds."""
    what = "simulated engine" if report["simulated"] else "vLLM, random weights"
    shown = Table(title=f"Schedulers inside an engine ({what})")
    columns = {
        "itl_p50_ms": "ITL p50, ms",
        "itl_p95_ms": "ITL p95, ms",
        "long_ttft_s": "long TTFT, s",
        "last_long_ttft_s": "the last, s",
        "short_ttft_ms": "short TTFT, ms",
    }
    shown.add_column("")
    for title in columns.values():
        shown.add_column(title, justify="right", no_wrap=True)
    for arm, found in report["arms"].items():
        cells = []
        for name in columns:
            values = [row[name] for row in found["rounds"]]
            digits = 2 if name.endswith("_s") else 0
            cells.append(f"{min(values):.{digits}f}..{max(values):.{digits}f}")
        shown.add_row(arm, *cells)
    return shown
