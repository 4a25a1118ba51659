"""Engines on asyncio in virtual time: what they sleep passes at once, and exactly."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from cato.core.profile import Profile
from cato.core.topology import EngineSpec
from cato.engines.base import Endpoint, EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes while nothing is to do, and at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now_s += timeout or 0.0
        return super().select(0)


class LocalCaller:
    """A simulated engine, asked directly; `others` pretends work of someone else."""

    def __init__(self, engine: SimulatedEngine, others: int = 0) -> None:
        self.engine = engine
        self._others = others
        self.bodies: list[Mapping[str, object]] = []

    async def stream(self, body: Mapping[str, object]) -> AsyncGenerator[EngineChunk, None]:
        self.bodies.append(body)
        request = EngineRequest(str(len(self.bodies)), Endpoint.COMPLETIONS, body)
        async for chunk in self.engine.generate(request):
            yield chunk

    async def held(self) -> int:
        return self._others


def asked(
    profile: Profile,
    spec: EngineSpec,
    ask: Callable[[LocalCaller], Awaitable[T]],
    others: int = 0,
) -> tuple[T, LocalCaller]:
    """What `ask` finds out of a simulated engine, and the caller that it used."""

    async def run() -> tuple[T, LocalCaller]:
        engine = SimulatedEngine(profile, spec)
        await engine.start()
        caller = LocalCaller(engine, others)
        try:
            return await ask(caller), caller
        finally:
            await engine.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())
