"""LoRA adapters as arguments of vLLM's server."""

from __future__ import annotations

import json
from pathlib import Path

from cato.config.places import model_path
from cato.core.errors import EngineError
from cato.core.topology import ModelSpec

# Allowed values of `--max-lora-rank`; every adapter takes the memory of one of that rank.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_RANK = 16
# Lets the server load adapters at runtime, and drop what it cached under an adapter's name.
ADAPTER_ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
# Maximum number of adapters in one batch, with memory reserved for each; further ones take turns.
MOST_IN_BATCH = 8


def adapter_argv(model: ModelSpec, accelerator: str) -> list[str]:
    """Empty for a model without adapters or room for more; raise `ConfigError` for a source that
    does not exist, `EngineError` for one that is not an adapter.

    The rank of an adapter that is not on this host, or is added later, is unknown: set it in the
    engine's `args`.
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
        # On a CPU, vLLM applies the adapter in the last place to calls without an adapter when the
        # batch mixes both (vLLM's pull request 48421): keep that place empty, so none take turns.
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
