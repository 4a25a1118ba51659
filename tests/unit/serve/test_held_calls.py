"""What a replica tells of a call whose next attempt it runs already."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest
from kits.builders import a_profile
from virtual_time_kit import VirtualLoop

from cato.control.messages import Told
from cato.core.events import FirstTokenSent
from cato.core.ids import InvocationId, ReplicaId
from cato.engines.base import Endpoint, Engine, EngineChunk, EngineRequest, EngineState
from cato.serve.held_calls import HeldCalls

ID, PROFILE = InvocationId("i"), a_profile()
PROMPT_TOKENS = 10_000
FIRST_TOKEN_S = PROFILE.first_token_s(PROMPT_TOKENS, 1)


class Slow:
    """An engine whose answers begin when their prompt is computed, and do not end."""

    state = EngineState.READY

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        await asyncio.sleep(FIRST_TOKEN_S)
        if request.stream:
            yield EngineChunk("x", 1)
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_first_token_of_an_attempt_is_not_the_next_one_s(is_streamed: bool) -> None:
    """Otherwise the router takes a prompt for computed that has just begun."""
    told_s: list[float] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def tell(told: Told) -> None:
            if isinstance(told, FirstTokenSent):
                told_s.append(loop.time())

        calls = HeldCalls(ReplicaId("r"), tell)
        request = EngineRequest(
            "c", Endpoint.COMPLETIONS, {}, stream=is_streamed, prompt_tokens=PROMPT_TOKENS
        )

        async def read(attempt: int) -> None:
            async for _ in calls.stream(cast("Engine", Slow()), PROFILE, request, ID, attempt):
                pass

        first = asyncio.create_task(read(1))
        await asyncio.sleep(FIRST_TOKEN_S / 2)
        second = asyncio.create_task(read(2))
        await asyncio.sleep(2 * FIRST_TOKEN_S)
        for task in (first, second):
            task.cancel()
        await asyncio.wait((first, second))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    assert told_s[0] == pytest.approx(1.5 * FIRST_TOKEN_S, rel=0.1)
    assert len(told_s) == 1
