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
        await asyncio.shield(engine.stop())  # whoever cancels must not leave it half stopped
        raise
    return engine


async def _warm_up(engine: Engine) -> None:
    """Let it answer once: the first answer of all takes half a second more."""
    id = f"warm-up.{time.monotonic()}"
    generate = EngineRequest(id, Endpoint.COMPLETIONS, {"prompt": "#", "max_tokens": 2})
    embed = EngineRequest(id, Endpoint.EMBEDDINGS, {"input": "#"}, stream=False, raw=True)
    try:
        async for _ in engine.generate(generate):
            pass
    except EngineError as error:
        if error.status != 404:
            raise
        async for _ in engine.generate(embed):  # a model that does not generate
            pass
