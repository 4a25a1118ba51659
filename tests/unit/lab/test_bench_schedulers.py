"""`cato bench engine` on the simulated engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cato.core.errors import InputError
from cato.engines.base import EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.lab.bench import schedulers
from cato.lab.bench.schedulers import ARMS, Form
from cato.lab.client import BenchError

SMALL = Form(
    streams=2, longs=((0.0, 800), (0.01, 600)), shorts=((0.02, 50), (0.05, 50)), long_due_s=5.0
)


class Shown:
    """How far it is."""

    def __init__(self) -> None:
        self.steps, self.done = 0, 0

    def begin(self, what: str, steps: int) -> None:
        self.steps = steps

    def step(self) -> None:
        self.done += 1


def test_every_arm_is_measured_in_every_round(tmp_path: Path) -> None:
    shown = Shown()
    report = schedulers.measure("simulated", 2, 1, tmp_path, shown, form=SMALL)
    assert shown.steps == shown.done == 2 * len(ARMS)
    assert list(report["arms"]) == list(ARMS)
    for arm in report["arms"].values():
        assert len(arm["rounds"]) == 2
        for row in arm["rounds"]:
            assert 0.0 < row["itl_p50_ms"] <= row["itl_p95_ms"]
            assert 0.0 < row["long_ttft_s"] <= row["last_long_ttft_s"]
            assert 0.0 < row["short_ttft_ms"] <= row["last_short_ttft_ms"]
    console = Console(width=160)
    with console.capture() as text:
        console.print(schedulers.table(report))
    assert "simulated engine" in text.get()
    assert all(arm in text.get() for arm in ARMS)


@pytest.mark.parametrize(("engine", "arm"), [("gpu", "due-date"), ("simulated", "fastest")])
def test_an_unknown_engine_or_arm_is_named(tmp_path: Path, engine: str, arm: str) -> None:
    with pytest.raises(InputError, match=r"gpu|fastest"):
        schedulers.measure(engine, 1, 1, tmp_path, Shown(), (arm,))


def test_a_gap_counts_where_it_ends_and_a_stream_that_stands_still_has_one() -> None:
    assert schedulers.gaps_s([1.0, 4.0, 5.0, 9.0], 3.0, 6.0) == [3.0, 1.0]
    assert schedulers.gaps_s([1.0, 2.0, 9.0], 3.0, 6.0) == [4.0]


class Failing(SimulatedEngine):
    """Its calls of one kind end after `tokens`: with an error, or as if they were whole."""

    kind, tokens, error = "stream-1", 0, "the engine died"

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        async for chunk in super().generate(request):
            if request.id.startswith(self.kind) and chunk.output_tokens > self.tokens:
                if self.error:
                    raise BenchError(self.error)
                return
            yield chunk


@pytest.mark.parametrize(
    ("kind", "tokens", "error", "said"),
    [
        ("stream-1", 0, "the engine died", "the engine died"),
        ("stream-1", 8, "the engine died", "the engine died"),
        ("stream-1", 8, "", "stream-1 ended after 8 of"),
        ("long-0", 0, "", "answered long-0 without a token"),
    ],
)
def test_a_call_that_fails_ends_the_measurement(
    kind: str, tokens: int, error: str, said: str
) -> None:
    async def measured() -> None:
        engine = Failing(schedulers.PROFILE, replace(schedulers.SPEC, kind="simulated"))
        engine.kind, engine.tokens, engine.error = kind, tokens, error
        await engine.start()
        try:
            async with asyncio.timeout(20.0):
                await schedulers.run(engine, SMALL, 1)
        finally:
            await engine.stop()

    with pytest.raises(BenchError, match=said):
        asyncio.run(measured())
