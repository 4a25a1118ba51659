"""The host agent: one actor a host, owner of the processes that engines are forked from."""

from __future__ import annotations

import asyncio
import os

from cato.config.places import run_dir
from cato.engines.vllm.host import Zygote


class HostAgent:
    """Starts a zygote per interpreter on first use, and again when it died."""

    def __init__(self) -> None:
        self._zygotes: dict[str, Zygote] = {}
        self._lock = asyncio.Lock()

    async def zygote_socket(self, python: str) -> str:
        """Path of the socket of a ready zygote for the interpreter `python`."""
        async with self._lock:
            zygote = self._zygotes.get(python)
            if zygote is None:
                socket = run_dir() / f"zygote-{os.getpid()}-{len(self._zygotes)}.sock"
                zygote = self._zygotes[python] = Zygote(socket, python=python)
            await zygote.ready()
            return zygote.socket
