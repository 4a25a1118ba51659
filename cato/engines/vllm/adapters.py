"""LoRA adapters as arguments of vLLM's server."""

from __future__ import annotations

import json
from pathlib import Path

from cato.config.places import model_path
from cato.core.errors import EngineError
from cato.core.topology import ModelSpec

# What `--max-lora-rank` may be; each adapter takes the memory of one so large.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_RANK = 16
# Lets the server take adapters while it runs, and forget what it cached under one of their names.
ADAPTER_ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
# That one batch may mix; more take turns. Memory is set aside for so many.
MOST_IN_BATCH = 8


def adapter_argv(model: ModelSpec, accelerator: str) -> list[str]:
    """Nothing for a model without adapters and places for more; raise `ConfigError` for a source
    that is not there, `EngineError` for one that is no adapter.

    The rank of one that is not on this host, or comes later, is not known: `args` of the engine can
    name it.
    """
    adapters = model.adapters
    count = len(adapters) + model.adapter_places
    if not count:
        return []
    paths = [model_path(a.source) for a in adapters]
    rank = max(_rank(path) for path in paths) if paths else DEFAULT_RANK
    if model.adapter_places:
        rank = max(rank, DEFAULT_RANK)
    in_batch = min(count, MOST_IN_BATCH)
    if accelerator == "cpu":
        # There a call without an adapter is given what is in the last place, beside calls that have
        # one (vLLM's pull request 48421): it must stay empty, and nobody takes turns.
        in_batch = count + 1
    modules = [f"{a.name}={path}" for a, path in zip(adapters, paths, strict=True)]
    argv = [
        "--enable-lora",
        "--max-loras", str(in_batch),
        "--max-cpu-loras", str(max(in_batch, count)),
        "--max-lora-rank", str(next(r for r in RANKS if r >= rank)),
    ]  # fmt: skip
    return [*argv, "--lora-modules", *modules] if modules else argv


def _rank(path: str) -> int:
    if not Path(path).is_dir():
        return DEFAULT_RANK
    config = Path(path) / "adapter_config.json"
    try:
        rank = int(json.loads(config.read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path} is not a LoRA adapter: {config.name}: {error!r}") from error
    if not 1 <= rank <= RANKS[-1]:
        raise EngineError(f"{path}: vLLM serves adapters of rank 1 to {RANKS[-1]}, not {rank}")
    return rank
