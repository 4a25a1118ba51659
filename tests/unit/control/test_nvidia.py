"""What a model takes is read from its cards; the driver's module is replaced by one that tells."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cato.control import nvidia
from cato.control.nvidia import VISIBLE_VARIABLE, Card, cards, described, held_bytes, visible
from cato.serve.staging import engine_memory_bytes

CARD = Card(0, "GPU-aa", "NVIDIA H100 80GB HBM3", "580.1", 80 << 30, 1 << 30, {})
OTHER = replace(CARD, index=1, uuid="GPU-bb")


class NoDriverError(Exception):
    pass


def a_driver(count: int = 2, *, hides_processes: bool = False) -> Any:
    """NVML of `count` cards; process 7 holds 5 GiB on each."""

    def running(handle: int) -> list[Any]:
        if hides_processes:
            raise NoDriverError
        return [
            SimpleNamespace(pid=7, usedGpuMemory=5 << 30),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ]

    def init() -> None:
        if not count:
            raise NoDriverError

    return SimpleNamespace(
        NVMLError=NoDriverError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUUID=lambda i: f"GPU-{i}",
        nvmlDeviceGetName=lambda i: "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(total=141 << 30, used=6 << 30),
        nvmlDeviceGetComputeRunningProcesses=running,
    )


def test_without_a_driver_there_are_no_cards() -> None:
    assert cards(a_driver(0)) == ()


def test_cards_say_what_they_are_and_who_holds_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VISIBLE_VARIABLE, raising=False)
    first, second = cards(a_driver())
    assert (first.type, first.driver, first.used_bytes) == ("H200", "580.1", 6 << 30)
    assert second.processes == {7: 5 << 30}
    monkeypatch.setenv(VISIBLE_VARIABLE, "1")
    [only] = cards(a_driver(hides_processes=True))
    assert (only.index, only.processes) == (1, {})


@pytest.mark.parametrize(
    ("named", "indexes"),
    [(None, [0, 1]), ("", []), ("1,0", [1, 0]), ("GPU-b", [1]), ("NoDevFiles", []), ("2", [])],
)
def test_only_cards_that_the_process_may_use_count(named: str | None, indexes: list[int]) -> None:
    assert [c.index for c in visible([CARD, OTHER], named)] == indexes


@pytest.mark.parametrize(
    ("name", "type"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090"),
    ],
)
def test_a_card_has_the_type_that_ray_gives_it(name: str, type: str) -> None:
    assert replace(CARD, name=name).type == type


def test_a_model_holds_what_its_processes_hold() -> None:
    now = [replace(CARD, processes={7: 40, 8: 2, 9: 100}), replace(OTHER, processes={8: 3})]
    assert held_bytes(now, [7, 8], before=[]) == 45


def test_where_the_driver_knows_other_process_ids_the_growth_counts() -> None:
    now = [replace(CARD, used_bytes=5 << 30, processes={4711: 3})]
    assert held_bytes(now, [7], before=[CARD]) == 4 << 30
    assert held_bytes([CARD], [7], before=now) == 0


def test_a_model_without_cards_holds_the_memory_of_its_processes() -> None:
    ours = engine_memory_bytes(os.getpid(), before=())
    assert ours >= psutil.Process().memory_info().rss // 2
    assert engine_memory_bytes(None, before=()) == 0


def test_a_model_on_cards_is_not_measured_by_the_memory_of_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvidia, "cards", lambda: (replace(CARD, processes={os.getpid(): 9}),))
    assert engine_memory_bytes(os.getpid(), before=(CARD,)) == 9


def test_a_profile_says_its_card_and_no_other_engines_memory() -> None:
    used = replace(CARD, used_bytes=15_000_000_000)
    name = "NVIDIA H100 80GB HBM3, driver 580.1"
    assert described([used], [7], 1) == f"{name}; weights, KV cache and graphs hold 15.0 GB"
    assert described([used, OTHER], [7], 1) == name
    known = replace(used, processes={7: 4_000_000_000})
    assert described([known, OTHER], [7], 1).endswith("hold 4.0 GB")
