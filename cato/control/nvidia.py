"""NVIDIA GPUs of this host, as their driver reports them (NVML).

NVML is used through the module that Ray ships and detects its own GPUs with. Without a driver the
list is empty. It covers all GPUs of the host, whatever `CUDA_VISIBLE_DEVICES` says.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_NVML = "ray._private.thirdparty.pynvml"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
# Ray's label of a GPU: "NVIDIA H100 80GB HBM3" is an H100, "Tesla V100-SXM2-16GB" a V100.
_TYPE = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU; `processes` maps process ids to bytes, if the driver reports them.

    In a container the driver may report other ids than the processes see, or none.
    """

    index: int
    uuid: str
    name: str
    driver: str
    total_bytes: int
    used_bytes: int
    processes: Mapping[int, int]

    @property
    def type(self) -> str:
        """As Ray calls it in `accelerator_type`."""
        found = _TYPE.match(self.name)
        return found[1] if found else self.name


def cards(nvml: Any = None) -> tuple[Card, ...]:
    """GPUs that this process may use, none without a driver; `nvml` replaces the NVML module."""
    nvml = nvml or import_module(_NVML)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        count = nvml.nvmlDeviceGetCount()
        found = [_card(nvml, i, driver) for i in range(count)]
    except nvml.NVMLError:
        return ()
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return visible(found, os.environ.get(VISIBLE_VARIABLE))


def _card(nvml: Any, index: int, driver: str) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not always permitted
        running = []
    held = {p.pid: int(p.usedGpuMemory) for p in running if p.usedGpuMemory is not None}
    return Card(
        index,
        _text(nvml.nvmlDeviceGetUUID(handle)),
        _text(nvml.nvmlDeviceGetName(handle)),
        driver,
        int(memory.total),
        int(memory.used),
        held,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible(found: Sequence[Card], named: str | None) -> tuple[Card, ...]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` names, by number or UUID; all when it is None."""
    if named is None:
        return tuple(found)
    wanted = [name.strip() for name in named.split(",") if name.strip()]
    return tuple(
        card
        for name in wanted
        for card in found
        if name == str(card.index) or (not name.isdigit() and card.uuid.startswith(name))
    )


def held_bytes(now: Sequence[Card], pids: Iterable[int], before: Sequence[Card]) -> int:
    """Bytes that the processes `pids` hold on the GPUs.

    If the driver does not report these processes: the growth in used memory since `before`, when
    they had not started.
    """
    ours = set(pids)
    known = [held for card in now for pid, held in card.processes.items() if pid in ours]
    if known:
        return sum(known)
    used = {card.uuid: card.used_bytes for card in before}
    return max(0, sum(card.used_bytes - used.get(card.uuid, 0) for card in now))


def described(cards: Sequence[Card], pids: Sequence[int], count: int) -> str:
    """The GPU and its driver and, where it can be told, the memory that the engine holds on it."""
    card = cards[0]
    said = f"{card.name}, driver {card.driver}"
    knows = any(pid in c.processes for c in cards for pid in pids)
    if not knows and len(cards) != count:  # would include other engines' memory
        return said
    held = held_bytes(cards, pids, ())
    return f"{said}; weights, KV cache and graphs hold {held / 1e9:.1f} GB"
