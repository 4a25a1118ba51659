"""A trace collector that discards everything, in its own process.

`python -m cato.lab.bench.otlp_sink` answers OTLP over HTTP on a free loopback port, prints the
port, and runs until stdin closes.
"""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

from cato.serve.ports import free_port


async def serve() -> None:
    async def traces(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    app = web.Application(client_max_size=64_000_000)
    app.router.add_post("/v1/traces", traces)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve())
