"""Real links on Unix sockets, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from cato.control.messages import CODEC, Joined, Shards
from cato.control.router import ReplicaRouter
from cato.core.ids import ReplicaId
from cato.wire.link.connection import Connection, Handler, Passive
from cato.wire.link.endpoints import Address, Listener, connect, listen

SECRET = b"s" * 32


async def taken(handler: Handler, folder: Path) -> Listener:
    """`handler` answers links from now on."""
    return await listen(
        CODEC, SECRET, handler, name="peer", host="h", ip="127.0.0.1", folder=folder / "links"
    )


async def dial(address: Address, secret: bytes, name: str, handler: Handler) -> Connection:
    return await connect(address, CODEC, secret, handler, name=name, host="h")


class Orders(Passive):
    """What a router tells its replica."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[object] = asyncio.Queue()

    def note(self, peer: Connection, note: object) -> None:
        if not isinstance(note, Shards):  # every replica is told it first
            self._told.put_nowait(note)

    async def next(self) -> object:
        return await asyncio.wait_for(self._told.get(), 5)


@contextlib.asynccontextmanager
async def joined(
    router: ReplicaRouter, replica: ReplicaId, folder: Path, own: Address | None = None
) -> AsyncIterator[Orders]:
    """While `replica` is connected to `router`; it takes links at `own`."""
    listener, orders = await taken(router.links, folder), Orders()
    link = await dial(listener.address, SECRET, "router", orders)
    link.note(Joined(replica, own or Address("h", "", "", 0)))
    while replica not in router.links._replicas:  # noqa: ASYNC110
        await asyncio.sleep(0)
    try:
        yield orders
    finally:
        link.close("the test is over")
        listener.close()
