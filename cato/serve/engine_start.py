"""Starts and warms up a new engine."""

from __future__ import annotations

import asyncio
import time

from cato.core.errors import EngineError
from cato.engines.base import Endpoint, Engine, EngineRequest


async def started(engine: Engine) -> Engine:
    """Start `engine` and warm it up; stop it if that fails or is cancelled."""
    try:
        await engine.start()
        if not engine.facts.simulated:
            await _warm_up(engine)
    except BaseException:
        await asyncio.shield(engine.stop())  # a cancellation must not leave it half stopped
        raise
    return engine


# Warm-up prompts are a screen of code, as editors send it: the first long prompt is slow even
# after a short one. Each begins differently, so that none is cached.
WARM_UPS = 2
WARM_UP_TEXT = "def first(x):\n    return x[0]\n\n"
WARM_UP_REPEATS = 12
# Upper bound on the tokens of one repetition, for any tokenizer.
REPEAT_TOKENS = 40


async def _warm_up(engine: Engine) -> None:
    """Run warm-up prompts: an engine's first answer takes half a second longer."""
    context = engine.facts.context_tokens or WARM_UP_REPEATS * REPEAT_TOKENS
    repeats = max(1, min(WARM_UP_REPEATS, context // REPEAT_TOKENS - 1))
    for number in range(WARM_UPS):
        await _answer(engine, f"# {number}\n{WARM_UP_TEXT * repeats}")


async def _answer(engine: Engine, prompt: str) -> None:
    id = f"warm-up.{time.monotonic()}"
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    generate = EngineRequest(id, Endpoint.COMPLETIONS, body)
    embed = EngineRequest(id, Endpoint.EMBEDDINGS, {"input": "#"}, stream=False, raw=True)
    try:
        async for _ in engine.generate(generate):
            pass
    except EngineError as error:
        if error.status != 404:
            raise
        async for _ in engine.generate(embed):  # a model that does not generate
            pass
