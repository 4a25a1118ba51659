"""Links of a replica: to its pool's router, and from ingresses that read its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from cato.control.links import DOOR_TRIES, RETRY_S, link_to_router, take
from cato.control.messages import Generate, Joined, Stop, Told
from cato.core.errors import LinkError
from cato.core.ids import DeploymentName, PoolName
from cato.core.shards import homes_of
from cato.core.slots import SlotOrder
from cato.core.topology import ONE_SHARD, Shards
from cato.engines.base import EngineChunk
from cato.serve.replica import Replica, Report
from cato.wire.link.connection import Connection, Passive
from cato.wire.link.endpoints import Listener

log = logging.getLogger("cato.engine_replica")

REPORT_S = 0.5
# Longest wait between tries of a replica that cannot accept links; each failure doubles it.
MAX_RETRY_S = 5.0
# A restarting shard answers after a second; until then its replicas join other shards.
GO_HOME_S = 2.0


class ReplicaLink(Passive):
    """Notes are lost while no router is connected; later reports repeat what the replica holds.

    The replica has a home shard, and joins another one while that does not answer: first one that
    stands by.
    """

    def __init__(
        self,
        pool: PoolName,
        deployment: DeploymentName,
        rank: Callable[[], int],
        *,
        is_shared: bool = False,
    ) -> None:
        """`rank` is the replica's number in its deployment, from 0."""
        self._pool, self._deployment, self._rank = pool, deployment, rank
        self._is_shared = is_shared
        self._replica: Replica
        self._shards, self._shard = ONE_SHARD, 0
        self._home_at_s = 0.0  # when to ask for the home shard again
        self._router: Connection | None = None
        self._is_known = False  # the current router has had a report
        self._is_over = asyncio.Event()  # set when the current link to the router has ended
        self._listener: Listener | None = None
        self._secret = b""
        self._retry_s = RETRY_S

    async def keep_forever(self, replica: Replica) -> None:
        """Stay connected to the router through its restarts, and report to it."""
        self._replica = replica
        while True:
            if not await self._join(self._homes()):
                await asyncio.sleep(self._retry_s)
                continue
            while not self._is_over.is_set():
                if self._is_known:
                    replica.report()
                else:
                    self._is_known = True
                    replica.introduce()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_over.wait(), REPORT_S)
                await self._go_home()

    def tell(self, told: Told | Report) -> None:
        if self._router is not None:
            self._router.note(told)

    @property
    def frames(self) -> int:
        """Frames sent to ingresses and received from them so far."""
        return 0 if self._listener is None else self._listener.frames.count

    def close(self) -> None:
        """Accept no more links, and close the link to the router."""
        if self._listener is not None:
            self._listener.close()
        if self._router is not None:
            self._router.close("the replica has ended")

    def _homes(self) -> list[int]:
        """All shards: the home shard first, one whose link has just ended last."""
        homes = homes_of(self._deployment, self._rank(), self._shards)
        if self._is_over.is_set() and self._shard in homes:
            homes.remove(self._shard)
            homes.append(self._shard)
        return homes

    async def _join(self, shards: list[int]) -> bool:
        """Join the first of `shards` that answers; False when none does."""
        for shard in shards:
            try:
                await self._connect(shard, 1 if self._shards.count > 1 else DOOR_TRIES)
            except LinkError as error:
                log.info("replica %s: %s", self._replica.id, error)
            except OSError as error:
                self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
                log.error("replica %s cannot accept links: %s", self._replica.id, error)
                break  # the same at every shard
            else:
                self._retry_s = RETRY_S
                return True
        return False

    async def _go_home(self) -> None:
        """Return to the home shard, if it answers."""
        home = homes_of(self._deployment, self._rank(), self._shards)[0]
        now_s = asyncio.get_running_loop().time()
        if home == self._shard or self._is_over.is_set() or now_s < self._home_at_s:
            return
        self._home_at_s = now_s + GO_HOME_S
        before = self._router
        if await self._join([home]) and before is not None:
            before.close("the replica belongs to another shard")

    async def _connect(self, shard: int, tries: int) -> None:
        link, secret = await link_to_router(
            self._pool, self, shard, tries, is_shared=self._is_shared
        )
        try:
            listener = await self._listening(secret)
        except BaseException:
            link.close("the replica cannot accept links")
            raise
        self._router, self._shard, self._is_known = link, shard, False
        self._is_over.clear()
        if not link.is_open:  # it has ended already
            self._is_over.set()
        link.note(Joined(self._replica.id, listener.address))

    async def _listening(self, secret: bytes) -> Listener:
        """The listener of links with that secret; raise OSError when none can be opened."""
        if self._listener is not None and secret == self._secret:
            return self._listener
        listener = await take(self, secret, f"a reader of {self._replica.id}")
        if self._listener is not None:
            # The router of a pool that was removed and created again has another secret.
            self._listener.close()
        self._listener, self._secret = listener, secret
        return listener

    # Calls and notes from peers

    async def stream(self, peer: Connection, asked: object) -> AsyncGenerator[EngineChunk, None]:
        assert isinstance(asked, Generate)
        async with contextlib.aclosing(self._replica.generate(asked)) as chunks:
            async for chunk in chunks:
                yield chunk

    def note(self, peer: Connection, note: object) -> None:
        if isinstance(note, Shards):
            if peer is self._router:
                self._shards, self._home_at_s = note, 0.0
            return
        assert isinstance(note, Stop | SlotOrder)
        self._replica.note(note)

    def ended(self, peer: Connection) -> None:
        if peer is self._router:
            self._is_over.set()
