"""The links of a replica: to its pool's router, and those of ingresses that read its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from cato.control.links import RETRY_S, Generate, Joined, Stop, Told, link_to_router, take
from cato.core.errors import LinkError
from cato.core.ids import PoolName
from cato.core.slots import SlotOrder
from cato.engines.base import EngineChunk
from cato.serve.replica import Replica, Report
from cato.wire.link.connection import Connection, Passive
from cato.wire.link.endpoints import Listener

log = logging.getLogger("cato.engine_replica")

REPORT_S = 0.5


class ReplicaLink(Passive):
    """What a replica tells is lost while there is no router; reports say what it holds."""

    def __init__(self, pool: PoolName, *, is_shared: bool) -> None:
        self._pool, self._is_shared = pool, is_shared
        self._replica: Replica
        self._router: Connection | None = None
        self._is_over = asyncio.Event()  # the present link to the router
        self._listener: Listener | None = None
        self._secret = b""

    async def keep_forever(self, replica: Replica) -> None:
        """Stay connected to whichever life of the router there is, and report to it."""
        self._replica = replica
        while True:
            try:
                await self._connect()
            except (LinkError, OSError) as error:
                log.info("replica %s: %s", replica.id, error)
                await asyncio.sleep(RETRY_S)
                continue
            while not self._is_over.is_set():
                replica.report()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_over.wait(), REPORT_S)

    def tell(self, told: Told | Report) -> None:
        if self._router is not None:
            self._router.note(told)

    def close(self) -> None:
        """Take no more links, and leave the router's."""
        if self._listener is not None:
            self._listener.close()
        if self._router is not None:
            self._router.close("the replica has ended")

    async def _connect(self) -> None:
        link, secret = await link_to_router(self._pool, self, is_shared=self._is_shared)
        if self._listener is None or secret != self._secret:
            # The router of a pool that was removed and is there again has another.
            if self._listener is not None:
                self._listener.close()
            self._listener = await take(self, secret, f"a reader of {self._replica.id}")
            self._secret = secret
        self._router = link
        self._is_over.clear()
        if not link.is_open:  # it ended meanwhile
            self._is_over.set()
        link.note(Joined(self._replica.id, self._listener.address))

    # The other ends

    async def stream(self, peer: Connection, asked: object) -> AsyncGenerator[EngineChunk, None]:
        assert isinstance(asked, Generate)
        async with contextlib.aclosing(self._replica.generate(asked)) as chunks:
            async for chunk in chunks:
                yield chunk

    def note(self, peer: Connection, note: object) -> None:
        assert isinstance(note, Stop | SlotOrder)
        self._replica.note(note)

    def ended(self, peer: Connection) -> None:
        if peer is self._router:
            self._is_over.set()
