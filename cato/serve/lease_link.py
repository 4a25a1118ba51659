"""Links of an ingress replica to the router shards of one pool; they survive router restarts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cato.control.links import RETRY_S
from cato.control.messages import Follow, Leased, Left, Offer, Told
from cato.core.errors import CapacityError, LinkError, PrefixUnknownError, RouterAwayError
from cato.core.events import InvocationWithdrawn
from cato.core.ids import InvocationId, PoolName
from cato.core.pool.prefixes import difference
from cato.core.profile import UNMEASURED, Profile
from cato.core.record import changed
from cato.core.shards import NO_LOAD, ShardChoice, ShardLoad
from cato.core.snapshot import Invocation
from cato.core.topology import Shards
from cato.serve.cancelled import is_this_task_cancelled
from cato.wire.link.connection import Connection, Handler, Passive

log = logging.getLogger("cato.pools")

# A killed actor answers again after a second, on a busy machine after several.
PATIENCE_S = 10.0
RETRY_AFTER_S = 5.0
# Calls whose shard is remembered; notes about other calls go to all shards.
MAX_KNOWN = 20_000
REMOVED = "it was removed"

Dial = Callable[[int, Handler], Awaitable[tuple[Connection, bytes]]]
"""Connects to a shard; returns the link and the pool's secret. Raises `LinkError`."""


class _Shard(Passive):
    """The link to one shard, and the offers waiting on it."""

    def __init__(self, number: int, dial: Dial, told: Callable[[int, ShardLoad], None]) -> None:
        self.number, self._dial, self._told = number, dial, told
        self.has_others = False
        self.link: Connection | None = None
        self.secret = b""
        self.waiting: set[asyncio.Task[Leased]] = set()
        self._connecting: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self.link is not None and self.link.is_open

    def connect(self) -> asyncio.Task[None]:
        """One attempt to connect, shared by all callers."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        return self._connecting

    def open(self) -> None:
        """Start connecting, unless the link is open."""
        if not self.is_open:
            self.connect()

    def tell(self, note: Told | Left | Follow) -> None:
        if self.link is not None:
            self.link.note(note)

    def note(self, peer: Connection, note: object) -> None:
        assert isinstance(note, ShardLoad)
        self._told(self.number, note)

    def ended(self, peer: Connection) -> None:
        if peer is self.link:
            self._told(self.number, NO_LOAD)
            if self.has_others:
                self.connect()

    def close(self, why: str) -> None:
        """End the link for good."""
        self.has_others = False
        if self.link is not None:
            self.link.close(why)

    async def _connect(self) -> None:
        try:
            self.link, self.secret = await self._dial(self.number, self)
            if self.has_others:
                self.link.note(Follow())
        except LinkError as error:
            log.info("%s", error)
            await asyncio.sleep(RETRY_S)
        finally:
            self._connecting = None
        if self.has_others:  # calls that wait in another shard may belong to this one
            self.open()


class LeaseLink:
    """Leases from one pool's router. Connects at `open` or the first offer.

    Offers that were pending when a link broke are repeated, to another shard if there is one. The
    router of a shared pool leases for all of its models.
    """

    def __init__(self, pool: PoolName, dial: Dial, more_patience_s: float = 0.0) -> None:
        """`more_patience_s`: extra wait for a router that must first be sent its pools."""
        self._pool, self._dial = pool, dial
        self._more_patience_s = more_patience_s
        self._shards = [_Shard(0, dial, self._hear)]
        self._choice = ShardChoice(1)
        self._profile = UNMEASURED
        self._is_closed = False
        self._where: OrderedDict[InvocationId, int] = OrderedDict()  # empty with a single shard

    @property
    def secret(self) -> bytes:
        """The secret of all links of the pool."""
        return next((s.secret for s in self._shards if s.secret), b"")

    def resize(self, shards: Shards, profile: Profile) -> None:
        """Set the pool's shards; `profile` gives the cost of moving a call between them."""
        self._profile = profile
        self._choice.resize(shards)
        count = shards.count
        if count == len(self._shards):
            return
        for gone in self._shards[count:]:
            gone.close("the pool has fewer shards")
        more = range(len(self._shards), count)
        added = [_Shard(number, self._dial, self._hear) for number in more]
        was_alone, self._shards = len(self._shards) == 1, [*self._shards[:count], *added]
        for shard in self._shards:
            shard.has_others = count > 1
        if was_alone or count == 1:  # a single shard need not tell its load
            self._shards[0].tell(Follow(count > 1))

    async def lease(self, invocation: Invocation, model: str = "") -> Leased:
        """Wait for a lease. Raise `CapacityError` when the router refuses or the pool was removed,
        `RouterAwayError` when the router stays unreachable, and `SupersededError` when a newer run
        of the buffer replaced the call. A caller that cancels the wait withdraws the invocation."""
        was_taken = False
        patience_s = PATIENCE_S + self._more_patience_s
        began_s = away_since_s = time.monotonic()
        while (now_s := time.monotonic()) - away_since_s < patience_s and not self._is_closed:
            shard = self._shard_for(invocation)
            if shard is None:
                await self._connected()
                continue
            assert shard.link is not None
            mine = invocation.on_clock(began_s - now_s)
            if was_taken:
                mine = changed(mine, was_taken=True)
            try:
                if len(self._shards) == 1:
                    return await _offered(shard.link, mine, model)
                return await self._offered_to(shard, shard.link, mine, model)
            except (LinkError, _MovedError):
                # The next incarnation of the router does not know this invocation: offer it again.
                was_taken, away_since_s = True, time.monotonic()
        if self._is_closed:
            raise CapacityError(self._pool, REMOVED, RETRY_AFTER_S)
        raise RouterAwayError(self._pool, "its router does not answer", RETRY_AFTER_S)

    def open(self) -> None:
        """Start connecting, so that the first offer need not wait."""
        for shard in self._shards:
            shard.open()

    def withdraw(self, id: InvocationId, attempt: int, reason: str) -> None:
        """Withdraw a waiting or running attempt."""
        note = InvocationWithdrawn(0.0, id, attempt, reason)
        at = self._where.pop(id, None)
        if at is None or at >= len(self._shards):
            self.tell(note)
        else:
            self._shards[at].tell(note)

    def tell(self, note: Told | Left) -> None:
        """Send `note` to all connected shards, ahead of the next offer."""
        for shard in self._shards:
            shard.tell(note)

    def ended(self, id: InvocationId) -> None:
        """The call's answer is complete, not only preempted: forget its shard."""
        if self._where:
            self._where.pop(id, None)

    def close(self) -> None:
        """Close all links: the pool was removed. Waiting calls are refused."""
        self._is_closed = True
        for shard in self._shards:
            shard.close("the pool was removed")

    def _shard_for(self, invocation: Invocation) -> _Shard | None:
        """The connected shard that gets the call; None when none is connected."""
        if len(self._shards) == 1:
            return self._shards[0] if self._shards[0].is_open else None
        reached = [shard.number for shard in self._shards if shard.is_open]
        if len(reached) < len(self._shards):
            self.open()
        if not reached:
            return None
        if invocation.attempt > 1 and (known := self._where.get(invocation.id)) is not None:
            if known in reached and not self._choice.is_stranded(known):
                return self._shards[known]  # it preempted the call, and has queued it again
            self.withdraw(invocation.id, invocation.attempt, "it is offered to another shard")
        return self._shards[self._choice.choose(invocation, reached, self._profile)]

    async def _offered_to(
        self, shard: _Shard, link: Connection, mine: Invocation, model: str
    ) -> Leased:
        """As `_offered`; raise `_MovedError` when the shard turns out to have no replica."""
        asking = asyncio.get_running_loop().create_task(_offered(link, mine, model))
        shard.waiting.add(asking)
        self._where[mine.id] = shard.number
        if len(self._where) > MAX_KNOWN:
            self._where.popitem(last=False)
        try:
            return await asking
        except asyncio.CancelledError:
            if is_this_task_cancelled():
                asking.cancel()
                raise
            raise _MovedError from None
        finally:
            shard.waiting.discard(asking)

    def _hear(self, number: int, load: ShardLoad) -> None:
        self._choice.tell(number, load)
        for shard in self._shards:
            if shard.waiting and self._choice.is_stranded(shard.number):
                for asking in shard.waiting:
                    asking.cancel()

    async def _connected(self) -> None:
        """Return after the first attempt to connect to any shard."""
        tries = [shard.connect() for shard in self._shards]
        await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)


class _MovedError(Exception):
    """The offer must go to another shard."""


async def _offered(link: Connection, invocation: Invocation, model: str) -> Leased:
    """Offer with only the new part of the session's prefix; with all of it if the router asks."""
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
