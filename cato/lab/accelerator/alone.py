"""Accelerator measurements on a bare engine process, without Ray or Serve."""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cato.config.places import model_path
from cato.control import nvidia
from cato.core.errors import InputError
from cato.core.eviction import CopyId
from cato.core.ids import ModelName
from cato.core.profile import Profile
from cato.core.slots import SlotOrder
from cato.core.topology import AdapterSpec, DeploymentSpec, HostedModel, ModelSpec
from cato.engines.base import Engine
from cato.engines.vllm.host import Zygote
from cato.engines.vllm.offloading import GIB
from cato.engines.vllm.process import VllmEngine
from cato.lab.bench.checkpoints import write_adapter
from cato.measure.calls import first_token, random_prompt
from cato.measure.evaluation import Measured, evaluate
from cato.measure.points import FULL, QUICK, Plan, Target
from cato.measure.sweep import Sweep, adapter_steps
from cato.profiles.schema import ProfileFile, Provenance
from cato.serve.engine_loader import EngineLoader, new_engine
from cato.serve.engine_start import started
from cato.serve.staging import DirectCaller, engine_memory_bytes

# The first sleep also pins host memory.
SLEEPS = 3
ADAPTERS, ADAPTER_RANK = 2, 16
# Two engines share the accelerator: a sleeping one keeps CUDA's context and graphs on it.
SHARED_MEMORY = 0.8
# Host memory for KV blocks that are offloaded from the accelerator.
OFFLOADED_GIB = 32
# Size of the cache in longest prompts: small enough that evicted prompts are really gone.
CACHE_PROMPTS = 1.5
CPU_BLOCK, CARD_BLOCK = 128, 16
CHARS = "def value(name):\n    return "
TOKENS = 32


@dataclass(frozen=True, slots=True)
class Form:
    """How much to measure."""

    plan: Plan
    turns: int
    batches: tuple[int, ...]
    adapter_rounds: int
    lengths: tuple[int, ...]
    length_rounds: int


WHOLE = Form(
    # A round takes a minute on an H100, and single points there err by a factor of two or three.
    replace(FULL, rounds=3, point_limit_s=8.0, total_s=200.0),
    turns=3,
    batches=(1, 16, 64),
    adapter_rounds=3,
    lengths=(1_024, 4_096, 15_000, 64_000, 128_000),
    length_rounds=3,
)
SMALL = Form(
    replace(
        QUICK,
        prompt_tokens=(32, 128, 384),
        cached_tokens=(256,),
        contexts=(64, 384, 768),
        concurrencies=(1, 4, 8),
        stalling_prompt_tokens=(32,),
        rounds=2,
        total_s=10.0,
    ),
    turns=1,
    batches=(1, 3),
    adapter_rounds=1,
    lengths=(512,),
    length_rounds=1,
)


@dataclass(frozen=True, slots=True)
class Alone:
    """The first deployment of a file and its model, on a bare engine; `profile` is its known
    profile. `folder` is for sockets and logs; engines are forked from `zygote`."""

    deployment: DeploymentSpec
    model: ModelSpec
    others: Sequence[ModelSpec]
    profile: Profile
    folder: Path
    zygote: Zygote
    form: Form

    @property
    def is_cpu(self) -> bool:
        return self.deployment.accelerator == "cpu"

    def cards(self) -> tuple[nvidia.Card, ...]:
        """Accelerators that the engine may use."""
        return nvidia.cards() if self.deployment.accelerator == "gpu" else ()

    def with_engine(self, **changes: Any) -> Alone:
        """The same with another engine."""
        engine = replace(self.deployment.engine, **changes)
        return replace(self, deployment=replace(self.deployment, engine=engine))

    async def socket(self) -> str:
        """Socket of the zygote, which starts when an engine first needs it."""
        await self.zygote.ready()
        return self.zygote.socket

    @contextlib.asynccontextmanager
    async def engine(self) -> AsyncGenerator[Engine, None]:
        """A ready, warm engine that ends with the block."""
        engine = await new_engine(
            self.deployment, self.model, self.profile, str(self.folder), self.socket
        )
        engine = await started(engine)
        try:
            yield engine
        finally:
            await engine.stop()


# a


async def engine_alone(alone: Alone, provenance: Provenance, seed: int) -> dict[str, Any]:
    """Start time, memory, raw sweeps and the fitted profile; sleep and wake."""
    was_compiled = _has_compiled(alone.deployment)
    before = alone.cards()
    sleepy = alone if alone.is_cpu else alone.with_engine(sleep=True)
    async with sleepy.engine() as engine:
        facts = engine.facts
        held = engine_memory_bytes(engine.pid, before)
        spec = alone.deployment.engine.on(alone.deployment.accelerator)
        target = Target(
            model=alone.model.name,
            accelerator=accelerator_name(alone.deployment, before),
            engine=facts.kind,
            context_tokens=facts.context_tokens,
            max_running=facts.max_running,
            kv_capacity_tokens=facts.kv_capacity_tokens,
            load_s=facts.start_s,
            step_tokens=spec.max_num_batched_tokens or 0,
            prompt_cap_tokens=spec.long_prefill_token_threshold or 0,
            block_tokens=facts.block_tokens if spec.prefix_caching else 0,
        )
        sweep = Sweep(DirectCaller(engine), target, alone.form.plan, seed)
        measured = await sweep.run([CHARS * 40], lambda done, total, what: None)
        asleep = await _slept(engine, before) if not alone.is_cpu else None
    fitted = _fitted(target, measured, provenance)
    return {
        "start_s": facts.start_s,
        "had_compiled": was_compiled,
        "vllm": facts.version,
        "context_tokens": facts.context_tokens,
        "kv_capacity_tokens": facts.kv_capacity_tokens,
        "block_tokens": facts.block_tokens,
        "memory_bytes": held,
        "memory_is_of": "cards" if before else "host",
        "sleep": asleep,
        "sweep": {
            "first_tokens": [asdict(x) for x in measured.first_tokens],
            "decode": [asdict(x) for x in measured.decode],
            "stalls": [asdict(x) for x in measured.stalls],
            "left_out": list(dict.fromkeys(measured.skipped)),
        },
        **fitted,
    }


def _fitted(target: Target, measured: Measured, provenance: Provenance) -> dict[str, Any]:
    """The fitted profile and its error; if the fit fails, the reason. The raw measurements are kept
    either way."""
    try:
        result = evaluate(target, measured)
    except InputError as error:
        return {"fit": [], "profile": None, "problem": str(error)}
    about = {
        "samples": result.samples,
        "prefill_r2": round(result.prefill_r2, 4),
        "decode_r2": round(result.decode_r2, 4),
        "note": f"{measured.rounds} rounds; times at the engine's socket",
    }
    file = ProfileFile.of(result.profile, provenance.model_copy(update=about))
    fit = [asdict(c) for c in result.comparisons]
    return {"fit": fit, "profile": file.model_dump(), "problem": ""}


def accelerator_name(deployment: DeploymentSpec, cards: Sequence[nvidia.Card]) -> str:
    """The accelerator's name in profile names: Ray's label for it, where there is one."""
    if deployment.accelerator_type is not None:
        return deployment.accelerator_type
    if deployment.accelerator == "gpu" and cards:
        return cards[0].type
    return deployment.accelerator


def _has_compiled(deployment: DeploymentSpec) -> bool:
    """Whether vLLM will find compiled code from an earlier start."""
    env = {**os.environ, **deployment.engine.env}
    root = Path(env.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "vllm")
    return any((root / "torch_compile_cache").glob("*"))


async def _slept(engine: Engine, before: Sequence[nvidia.Card]) -> dict[str, Any]:
    assert isinstance(engine, VllmEngine)
    sleep_s, wake_s, held = [], [], 0
    for _ in range(SLEEPS):
        started_s = time.monotonic()
        await engine.sleep()
        sleep_s.append(time.monotonic() - started_s)
        held = engine_memory_bytes(engine.pid, before)
        await engine.wake()
        wake_s.append(engine.facts.start_s)
    return {"sleep_s": sleep_s, "wake_s": wake_s, "asleep_bytes": held}


# f


async def two_models(alone: Alone) -> dict[str, Any]:
    """Two models take turns in a slot; the inactive one sleeps in host memory.

    On a CPU vLLM only pauses: the code path is the same, but its times mean nothing.
    """
    shared = SHARED_MEMORY if not alone.is_cpu else None
    most = alone.deployment.engine.gpu_memory_utilization or 1.0
    spec = alone.with_engine(
        sleep=True, gpu_memory_utilization=None if shared is None else min(shared, most)
    )
    models = (alone.model, alone.others[0])
    before = alone.cards()
    found: dict[str, dict[str, Any]] = {}
    loader = EngineLoader(spec.deployment, str(alone.folder), alone.socket)
    engine: Engine | None = None
    try:
        for turn in range(alone.form.turns + 1):
            for model, other in (models, models[::-1]):
                order = SlotOrder(
                    CopyId(f"{model.name}.{turn}"),
                    HostedModel(model),
                    alone.profile,
                    remembered=(model.name, other.name),
                )
                was_asleep = model.name in loader.asleep
                started_s = time.monotonic()
                previous, engine = engine, None
                engine = await loader.load(order, previous)
                took_s = time.monotonic() - started_s
                row = found.setdefault(model.name, {"wake_s": [], "answers": []})
                if turn == 0:
                    row["load_s"] = engine.facts.start_s
                elif was_asleep:
                    row["wake_s"].append(took_s)
                row["memory_bytes"] = engine_memory_bytes(engine.pid, before)
                row["answers"].append(await _answer(engine))
    finally:
        if engine is not None:
            await engine.stop()
        await loader.keep(())
    for row in found.values():
        answers = row.pop("answers")
        row["same_answers"] = len(set(answers)) == 1
        row["ratio"] = row["load_s"] / statistics.median(row["wake_s"]) if row["wake_s"] else None
    return {"models": found, "really_sleeps": not alone.is_cpu}


async def _answer(engine: Engine) -> str:
    """A greedy answer: the same weights give the same text."""
    body = {"prompt": CHARS, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    return "".join([chunk.text async for chunk in DirectCaller(engine).stream(body)])


# g


async def adapters(alone: Alone, seed: int) -> dict[str, Any]:
    """Decode steps of batches without adapters, with one, and mixed; weights are random."""
    source = model_path(alone.model.source)
    if not Path(source).is_dir():
        raise InputError(f"{source} is not a folder: adapters are made from a model's config.json")
    made = tuple(
        AdapterSpec(
            ModelName(f"adapter-{i}"),
            str(write_adapter(alone.folder / f"adapter-{i}", i, ADAPTER_RANK, source)),
        )
        for i in range(ADAPTERS)
    )
    tuned = replace(alone, model=replace(alone.model, adapters=made))
    async with tuned.engine() as engine:
        callers = [DirectCaller(engine, adapter) for adapter in made]
        most = engine.facts.max_running
        batches = [b for b in alone.form.batches if b <= most]
        rows = await adapter_steps(
            DirectCaller(engine), callers, batches, alone.form.adapter_rounds, seed
        )
    return {"adapters": ADAPTERS, "rank": ADAPTER_RANK, "steps": [asdict(r) for r in rows]}


# h


async def host_memory(alone: Alone, seed: int) -> dict[str, Any]:
    """TTFT of prompts that are computed, cached, and evicted from the cache by others.

    On an accelerator evicted blocks are offloaded to host memory; vLLM cannot do so on a CPU.
    """
    context = min(alone.profile.context_tokens, alone.deployment.engine.max_model_len or math.inf)
    lengths = [n for n in alone.form.lengths if n + 2 <= context]
    if not lengths:
        raise InputError(f"a context of {context:.0f} tokens has no room for {alone.form.lengths}")
    block = CPU_BLOCK if alone.is_cpu else CARD_BLOCK
    # vLLM requires room for one whole context.
    blocks = math.ceil(max(CACHE_PROMPTS * max(lengths), context + block) / block)
    own = alone.deployment.engine.args
    args = (*own, "--num-gpu-blocks-override", str(blocks))
    host_bytes = 0 if alone.is_cpu else OFFLOADED_GIB * GIB
    small = alone.with_engine(prefix_caching=True, host_memory=host_bytes, args=args)
    draw = random.Random(seed)
    rows = []
    async with small.engine() as engine:
        caller = DirectCaller(engine)
        for tokens in lengths:
            found = []
            for _ in range(alone.form.length_rounds):
                prompt = random_prompt(draw, tokens)
                computed = await first_token(caller, prompt)
                cached = await first_token(caller, prompt)
                for _ in range(math.ceil(blocks * block / max(lengths)) + 1):
                    await first_token(caller, random_prompt(draw, max(lengths)))
                found.append((computed, cached, await first_token(caller, prompt)))
            computed_s, cached_s, back_s = (
                statistics.median(x.duration_s for x in kind) for kind in zip(*found, strict=True)
            )
            rows.append(
                {
                    "tokens": tokens,
                    "computed_s": computed_s,
                    "cached_s": cached_s,
                    "pushed_out_s": back_s,
                    "cached_tokens": found[-1][1].cached_tokens,
                    "pushed_out_cached_tokens": found[-1][2].cached_tokens,
                }
            )
    return {
        "host_gib": 0 if alone.is_cpu else OFFLOADED_GIB,
        "cache_tokens": blocks * block,
        "prompts": rows,
    }
