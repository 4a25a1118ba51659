"""The host agent: one actor per host. It owns the processes that engines are forked from."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Awaitable
from typing import Any

from cato.config.places import run_dir
from cato.control import actors
from cato.core.ids import HostId
from cato.core.topology import EngineSpec
from cato.engines.vllm.host import Zygote


class HostAgent:
    """Starts a zygote per interpreter on first use, and restarts one that died."""

    def __init__(self) -> None:
        self._zygotes: dict[str, Zygote] = {}
        # One each: an interpreter that hangs must not keep the engines of others waiting.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def zygote_socket(self, python: str, within_s: float) -> str:
        """Path of the socket of a zygote for the interpreter `python`; raise `EngineError` when it
        is not ready `within_s`."""
        async with self._locks[python]:
            zygote = self._zygotes.get(python)
            if zygote is None:
                socket = run_dir() / f"zygote-{os.getpid()}-{len(self._zygotes)}.sock"
                zygote = self._zygotes[python] = Zygote(socket, python=python)
            await zygote.ready(within_s)
            return zygote.socket


def zygote_socket_of(host: HostId, engine: EngineSpec) -> Awaitable[str]:
    """Path of the socket of a ready zygote for `engine` on `host`; starts the host's agent if
    needed."""
    agent: Any = actors.create(HostAgent, actors.host_agent_name(host), host=host)
    python = engine.python or sys.executable
    socket: Awaitable[str] = agent.zygote_socket.remote(python, engine.start_timeout_s)
    return socket
