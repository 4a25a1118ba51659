"""The start of a new engine, to its first answer."""

from __future__ import annotations

import asyncio
import time

from cato.core.errors import EngineError
from cato.engines.base import Endpoint, Engine, EngineRequest


async def started(engine: Engine) -> Engine:
    """`engine`, ready and warm; it is stopped when it does not get there."""
    try:
        await engine.start()
        if not engine.facts.simulated:
            await _warm_up(engine)
    except BaseException:
        await asyncio.shield(engine.stop())  # a cancellation must not leave it half stopped
        raise
    return engine


# Prompts of a screen of code, sampled as editors ask for it: a long prompt's first run is slow even
# after a short one. Each begins differently, so that none is cached.
WARM_UPS = 2
WARM_UP_TEXT = "def first(x):\n    return x[0]\n\n"
WARM_UP_REPEATS = 12
# More than a repetition of the text has in any tokenizer.
REPEAT_TOKENS = 40


async def _warm_up(engine: Engine) -> None:
    """Let it answer: the first answer of all takes half a second more."""
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
