"""vLLM's own KV offloading: how much host memory an engine gets, and how many tokens fit.

vLLM maps that memory as one file in `/dev/shm`, fills it at startup (62 GiB in 54 s beside an H100)
and unlinks the file at once, so nothing is left behind however the engine ends.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cato.core.topology import EngineSpec

GIB = 1 << 30
# Share of the host's memory and of /dev/shm; the rest is for weights being loaded, the page
# cache, Ray's object store and CATO itself.
HOST_SHARE = 0.5
# Less holds only a prompt or two: not worth copying every computed block.
LEAST_BYTES = 2 * GIB

_SHM = Path("/dev/shm")
_CARDS = Path("/proc/driver/nvidia/gpus")
_CGROUP = Path("/sys/fs/cgroup")
_BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2}
_DEFAULT_BYTES = 2


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that this host has for offloading: RAM (up to a container's limit) and `/dev/shm`."""

    total_bytes: int
    free_bytes: int
    shm_total_bytes: int
    shm_free_bytes: int


def share_of(memory: HostMemory, engines: int) -> int:
    """Bytes for each of the `engines` that this host may run at a time; 0 if too little is free.

    A share of the total, so that each engine gets the same whenever it starts, but never more than
    that share of the memory that is free now.
    """
    most = min(
        memory.total_bytes / engines,
        memory.shm_total_bytes / engines,
        memory.free_bytes,
        memory.shm_free_bytes,
    )
    size = int(HOST_SHARE * most) // GIB * GIB
    return size if size >= LEAST_BYTES else 0


def host_memory_now() -> HostMemory:
    """Read from this machine."""
    memory, shm = psutil.virtual_memory(), shutil.disk_usage(_SHM)
    total, free = int(memory.total), int(memory.available)
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None:
        total = min(total, limit)
        free = min(free, max(0, limit - (used or 0)))
    return HostMemory(total, free, shm.total, shm.free)


def engines_on_host(cards_each: int) -> int:
    """Number of engines with `cards_each` accelerators that fit this host, at least 1."""
    try:
        cards = sum(1 for _ in _CARDS.iterdir())
    except OSError:
        cards = 0
    return max(1, cards // max(1, cards_each))


@dataclass(frozen=True, slots=True)
class Offloading:
    """Host memory that one engine uses for KV blocks; `tokens` is 0 when unknown."""

    size_bytes: int = 0
    tokens: int = 0

    @property
    def argv(self) -> list[str]:
        """vLLM's flags; the size is in GiB, for all accelerators of an engine together."""
        if not self.size_bytes:
            return []
        size = f"{self.size_bytes / GIB:g}"
        return ["--kv-offloading-size", size, "--kv-offloading-backend", "native"]

    @property
    def words(self) -> str:
        """Description for the log, at the engine's start."""
        if not self.size_bytes:
            return (
                "too little of the host's memory or of /dev/shm is free to keep KV blocks there "
                "(in a container --shm-size sets the latter)"
            )
        tokens = f"{self.tokens} tokens" if self.tokens else "an unknown number of tokens"
        return (
            f"KV blocks that leave the cache stay in {self.size_bytes / GIB:g} GiB of the host's "
            f"memory, {tokens}; filling it delays the start by about a second per GiB"
        )


def offloading_of(spec: EngineSpec, accelerator: str, cards: int, model_path: str) -> Offloading:
    """For a vLLM engine that starts now: the spec's size, or a share of the free memory."""
    wanted = spec.on(accelerator).host_memory
    if wanted is True:
        wanted = share_of(host_memory_now(), engines_on_host(cards))
    token_bytes = kv_token_bytes(model_path) if wanted else 0
    return Offloading(int(wanted or 0), int(wanted or 0) // token_bytes if token_bytes else 0)


def kv_token_bytes(model_path: str) -> int:
    """Bytes of KV per token, from the model's config.json; 0 when unknown."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        return _token_bytes(config.get("text_config", config))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _token_bytes(config: Mapping[str, Any]) -> int:
    layers = int(config["num_hidden_layers"])
    value_bytes = _BYTES_OF.get(str(config.get("torch_dtype", config.get("dtype"))), _DEFAULT_BYTES)
    if config.get("kv_lora_rank"):  # DeepSeek's latent attention stores one vector for all heads
        width = int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)
        return layers * width * value_bytes
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return layers * 2 * int(config.get("num_key_value_heads") or heads) * head * value_bytes


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None if there is no such file or no limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
