"""The link of an ingress replica to the router of one pool, through the router's restarts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cato.control.links import RETRY_S, Leased, Left, Offer, Told
from cato.core.errors import CapacityError, LinkError, PrefixUnknownError
from cato.core.ids import PoolName
from cato.core.pool.prefixes import difference
from cato.core.snapshot import Invocation
from cato.wire.link.connection import Connection

log = logging.getLogger("cato.pools")

# An actor that was killed answers again after a second, on a busy machine after several.
PATIENCE_S = 10.0
RETRY_AFTER_S = 5.0


class LeaseLink:
    """Opened by `open` or the first offer; offers under way when it ended are made again.

    The router of a shared pool leases for all of its models.
    """

    def __init__(
        self,
        pool: PoolName,
        dial: Callable[[], Awaitable[tuple[Connection, bytes]]],
        more_patience_s: float = 0.0,
    ) -> None:
        """`dial` makes a link and knows the pool's secret; it raises `LinkError`. A router that has
        to be told its pools first is waited for `more_patience_s`."""
        self._pool, self._dial = pool, dial
        self._more_patience_s = more_patience_s
        self._link: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.secret = b""

    async def lease(self, invocation: Invocation, model: str = "") -> Leased:
        """A lease; raise `CapacityError` when the router refuses, or is not there for long, and
        `SupersededError`. To cancel the wait is to withdraw the invocation."""
        was_taken = False
        began_s = away_since_s = time.monotonic()
        while (now_s := time.monotonic()) - away_since_s < PATIENCE_S + self._more_patience_s:
            link = self._link
            if link is None or not link.is_open:
                await self._connected()
                continue
            mine = replace(invocation.on_clock(began_s - now_s), was_taken=was_taken)
            try:
                return await _offered(link, mine, model)
            except LinkError:
                # The life that answers next, of the router or of the link, has never heard of it.
                was_taken, away_since_s = True, time.monotonic()
        raise CapacityError(self._pool, "its router does not answer", RETRY_AFTER_S)

    def open(self) -> None:
        """Begin to connect, so that the first offer need not."""
        if self._connecting is None and (self._link is None or not self._link.is_open):
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def tell(self, note: Told | Left) -> None:
        """Before the next offer. A router that is not there has nothing in its books."""
        if self._link is not None:
            self._link.note(note)

    def close(self) -> None:
        """Its pool is there no more."""
        if self._link is not None:
            self._link.close("the pool was removed")

    async def _connected(self) -> None:
        """Return after a try to connect; one tries for all offers."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        try:
            self._link, self.secret = await self._dial()
        except LinkError as error:
            log.info("%s", error)
            await asyncio.sleep(RETRY_S)
        finally:
            self._connecting = None


async def _offered(link: Connection, invocation: Invocation, model: str) -> Leased:
    """Offer with what is new in the session's prefix; all of it where the rest is unknown."""
    rest, shared_blocks = difference(invocation)
    leased: Leased
    if shared_blocks:
        try:
            offer = Offer(replace(invocation, prefix=rest), shared_blocks, model)
            leased = await link.ask(offer)
        except PrefixUnknownError:
            pass
        else:
            return leased
    leased = await link.ask(Offer(invocation, 0, model))
    return leased
