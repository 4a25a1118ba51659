"""HTTP server around the simulated engine alone, in its own process.

The counterpart of vLLM's OpenAI server. `python -m cato.lab.bench.bare_server PROFILE.yaml SOCKET`
serves `POST /v1/completions` on the Unix socket and prints a line when ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from aiohttp import web

from cato.core.topology import EngineSpec
from cato.engines.base import Endpoint, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.profiles.load import load_profile

READY = "ready"


async def serve(profile: Path, socket: str, slots: int) -> None:
    """Serve until stdin closes: this process ends with the benchmark."""
    engine = SimulatedEngine(load_profile(profile), EngineSpec("simulated", max_num_seqs=slots))
    await engine.start()
    number = 0

    async def completions(request: web.Request) -> web.StreamResponse:
        nonlocal number
        number += 1
        body = json.loads(await request.read())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        asked = EngineRequest(str(number), Endpoint.COMPLETIONS, body, raw=True)
        async with contextlib.aclosing(engine.generate(asked)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is None:  # the last one is usage, which was not requested
                    await response.write(chunk.raw)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    print(READY, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
