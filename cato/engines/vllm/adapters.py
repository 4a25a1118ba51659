"""LoRA adapters of vLLM's server: as arguments, and loaded while it runs."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

from cato.config.places import model_path
from cato.core.errors import EngineDeadError, EngineError
from cato.core.topology import AdapterSpec, ModelSpec

# Allowed values of `--max-lora-rank`; every adapter takes the memory of one of that rank.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_RANK = 16
# Lets the server load adapters at runtime, and drop what it cached under an adapter's name.
ADAPTER_ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
# Maximum number of adapters in one batch, with memory reserved for each; further ones take turns.
MOST_IN_BATCH = 8
# Preempts running calls, which compute their prompts again: without that, running calls prevent it.
_RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
_RESETS = 5
_RESET_AGAIN_S = 0.2


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


class AddedAdapters:
    """Adapters that an engine has loaded since its start.

    vLLM tells cached blocks apart by an adapter's name and path. Each version of a folder therefore
    has a path of its own, a link in `links`: blocks of old weights answer no call of new ones.
    """

    def __init__(self, post: Callable[[str, bytes | None], Awaitable[bytes]], links: Path) -> None:
        self._post = post
        self._links = links
        self._held: dict[str, AdapterSpec] = {}
        self._lock = asyncio.Lock()

    async def hold(self, adapter: AdapterSpec, places: int | None) -> None:
        """Load an adapter added after the start; raise `EngineError` if it is not an adapter.

        `places`: most adapters that the engine can take; None for any number, one by one.
        """
        if adapter.version == 0 or self._held.get(adapter.name) == adapter:
            return
        # The server finishes a load whose caller leaves, and takes no adapter twice.
        await asyncio.shield(self._hold(adapter, places))

    async def _hold(self, adapter: AdapterSpec, places: int | None) -> None:
        async with self._lock:
            all_held = self._held  # of this server; the next one has none of them
            held = all_held.get(adapter.name)
            if held is not None and held.version >= adapter.version:
                return
            had = len(all_held)
            if held is None and places is not None and had >= places:
                # vLLM would apply one more to calls without an adapter: see `adapter_argv`.
                raise EngineError(
                    f"this engine has had {had} adapters since its start, of {places} places on a "
                    f"CPU, so {adapter.name} needs new replicas: `serve deploy` starts some"
                )
            await self._load(adapter, is_held=held is not None)
            all_held[adapter.name] = adapter

    def forget(self) -> None:
        """The server has ended."""
        self._held = {}
        shutil.rmtree(self._links, ignore_errors=True)

    async def _load(self, adapter: AdapterSpec, *, is_held: bool) -> None:
        source = model_path(adapter.source)
        path = self._link(adapter, source) if Path(source).is_dir() else source
        body = {"lora_name": adapter.name, "lora_path": path, "load_inplace": is_held}
        try:
            await self._post("/v1/load_lora_adapter", json.dumps(body).encode())
        except EngineError as error:
            problem = error.problem.replace(path, source)
            raise type(error)(problem, error.status, error.param) from error
        if is_held and path == source:  # a Hugging Face id stands for all versions
            await self._drop_blocks(adapter)

    def _link(self, adapter: AdapterSpec, folder: str) -> str:
        """The path of this version. vLLM may read it as long as the server runs."""
        self._links.mkdir(mode=0o700, exist_ok=True)
        name = sha256(adapter.name.encode()).hexdigest()[:16]  # of any length and letters
        link = self._links / f"{name}-{adapter.version}"
        if not link.is_symlink():  # it is there after a load that failed
            link.symlink_to(Path(folder).absolute(), target_is_directory=True)
        return str(link.absolute())

    async def _drop_blocks(self, adapter: AdapterSpec) -> None:
        why = "it answered no success"
        for _ in range(_RESETS):
            try:
                if json.loads(await self._post(_RESET, None))["success"]:
                    return
            except EngineDeadError:
                raise
            except EngineError as error:
                why = error.problem
            await asyncio.sleep(_RESET_AGAIN_S)  # blocks are on their way to or from host memory
        raise EngineError(f"{adapter.name}: the engine keeps KV of the old weights: {why}", 503)
