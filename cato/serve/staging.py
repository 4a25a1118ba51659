"""Measures a new model before it is served: load times, speed and memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from cato.config.places import model_path
from cato.control import nvidia
from cato.control.staged import Staged
from cato.core.errors import InputError
from cato.core.eviction import CopyId
from cato.core.profile import UNMEASURED, Profile
from cato.core.slots import SlotOrder
from cato.core.topology import AdapterSpec, DeploymentSpec, HostedModel
from cato.engines.base import Endpoint, Engine, EngineChunk, EngineRequest
from cato.engines.simulated import DEFAULT_BATCHED_TOKENS
from cato.engines.vllm.threads import family
from cato.measure.evaluation import evaluate
from cato.measure.points import Plan, Target
from cato.measure.sweep import Sweep
from cato.profiles.schema import ProfileFile, Provenance
from cato.serve.ordered_models import Loader

# Enough for a model's speed within a few percent; `cato profile` measures in full.
PLAN = Plan(
    prompt_tokens=(32, 128, 384, 896),
    cached_tokens=(),
    contexts=(64, 384),
    concurrencies=(1, 4),
    stalling_prompt_tokens=(64,),
    rounds=2,
    point_limit_s=2.0,
    total_s=20.0,
)
# In the order in which vLLM prefers them; it loads one format only.
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# The same weights once more, in Mistral's own layout.
_CONSOLIDATED = "consolidated"


async def measured(
    loader: Loader, slots: DeploymentSpec, hosted: HostedModel, profile: Profile | None
) -> Staged:
    """Load the model from storage and once more from memory, and measure its speed.

    `profile` sets the speed of a simulated engine. Raise `InputError` for an invalid source, and
    `EngineError` with the engine's message when the model does not load.
    """
    path = checked_path(hosted.model.source, slots.engine.kind)
    files = weight_files(path)
    order = SlotOrder(
        CopyId("staging"),
        hosted,
        profile or UNMEASURED,
        expected_s=profile.load_s if profile is not None else 0.0,
    )
    await asyncio.to_thread(_drop_from_page_cache, files)
    before = nvidia.cards() if slots.accelerator == "gpu" else ()
    engine = await loader.load(order, None)
    load_s = engine.facts.start_s
    engine = await loader.load(replace(order, remembered=(hosted.model.name,)), engine)
    try:
        return await _staged(engine, slots, hosted, load_s, files, before)
    finally:
        await asyncio.shield(engine.stop())


async def _staged(
    engine: Engine,
    slots: DeploymentSpec,
    hosted: HostedModel,
    load_s: float,
    files: list[Path],
    before: Sequence[nvidia.Card],
) -> Staged:
    facts, name = engine.facts, hosted.model.name
    target = Target(
        model=name,
        accelerator=slots.accelerator_type or slots.accelerator,
        engine=facts.kind,
        context_tokens=facts.context_tokens,
        max_running=facts.max_running,
        kv_capacity_tokens=facts.kv_capacity_tokens,
        load_s=load_s,
        step_tokens=slots.engine.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
        prompt_cap_tokens=slots.engine.long_prefill_token_threshold or 0,
        block_tokens=facts.block_tokens,
    )
    sweep = await Sweep(DirectCaller(engine), target, PLAN).run((), lambda *_: None)
    result = evaluate(target, sweep)
    provenance = Provenance(
        command="cato models",
        samples=result.samples,
        prefill_r2=result.prefill_r2,
        decode_r2=result.decode_r2,
        simulated=facts.simulated,
    )
    weights_bytes = sum(f.stat().st_size for f in files) or hosted.weights_bytes
    return Staged(
        replace(
            hosted, load_s=load_s, reload_s=min(load_s, facts.start_s), weights_bytes=weights_bytes
        ),
        ProfileFile.of(result.profile, provenance),
        engine_memory_bytes(engine.pid, before),
        on_card=bool(before),
    )


class DirectCaller:
    """Calls one engine directly; see `cato.measure.sweep.EngineCaller`."""

    def __init__(self, engine: Engine, adapter: AdapterSpec | None = None) -> None:
        self._engine = engine
        self._adapter = adapter
        self._name = f"direct-{secrets.token_hex(4)}"
        self._calls = 0

    async def stream(self, body: Mapping[str, object]) -> AsyncGenerator[EngineChunk, None]:
        self._calls += 1
        id = f"{self._name}.{self._calls}"
        request = EngineRequest(id, Endpoint.COMPLETIONS, body, adapter=self._adapter)
        async with contextlib.aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def held(self) -> int:
        load = await self._engine.load()
        return load.running + load.waiting


def checked_path(source: str, engine: str) -> str:
    """The path for the engine to load; raise `InputError` for a folder without a model."""
    if engine == "simulated":
        return source
    path = model_path(source)
    if os.path.isdir(path) and not Path(path, "config.json").is_file():
        raise InputError(f"{path} has no config.json: not a model in Hugging Face layout")
    return path


def weight_files(path: str) -> list[Path]:
    """Weight files in the model folder `path` that vLLM loads; empty if it is not a folder.

    Many folders hold the weights in several formats.
    """
    folder = Path(path)
    found = next((f for pattern in _WEIGHTS if (f := sorted(folder.glob(pattern)))), [])
    return [f for f in found if not f.name.startswith(_CONSOLIDATED)] or found


def _drop_from_page_cache(files: list[Path]) -> None:
    """Make the next load read from storage."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def engine_memory_bytes(pid: int | None, before: Sequence[nvidia.Card]) -> int:
    """Memory of the engine's processes: on the GPUs listed `before` its start or, without GPUs, in
    the host. 0 for an engine without a process or that has ended."""
    if pid is None:
        return 0
    pids = family(pid)
    if before:
        return nvidia.held_bytes(nvidia.cards(), pids, before)
    total = 0
    for each in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(each).memory_info().rss
    return total
