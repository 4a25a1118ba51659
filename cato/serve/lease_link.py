"""The links of an ingress replica to the router shards of one pool, through their restarts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cato.control.links import RETRY_S, Follow, Leased, Left, Offer, Told
from cato.core.errors import CapacityError, LinkError, PrefixUnknownError
from cato.core.events import InvocationWithdrawn
from cato.core.ids import InvocationId, PoolName
from cato.core.pool.prefixes import difference
from cato.core.profile import UNMEASURED, Profile
from cato.core.shards import ShardChoice, ShardLoad
from cato.core.snapshot import Invocation
from cato.wire.link.connection import Connection, Handler, Passive

log = logging.getLogger("cato.pools")

# An actor that was killed answers again after a second, on a busy machine after several.
PATIENCE_S = 10.0
RETRY_AFTER_S = 5.0
# Calls of which it is known which shard has them; a note about another goes to all.
MAX_KNOWN = 20_000

Dial = Callable[[int, Handler], Awaitable[tuple[Connection, bytes]]]
"""Makes a link to a shard, and knows the pool's secret; raises `LinkError`."""


class _Shard(Passive):
    """The link to one shard, and the offers that wait there."""

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
        """A try to connect; one for all that ask for it."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        return self._connecting

    def open(self) -> None:
        """Begin to connect, unless there is a link."""
        if not self.is_open:
            self.connect()

    def tell(self, note: Told | Left | Follow) -> None:
        if self.link is not None:
            self.link.note(note)

    def note(self, peer: Connection, note: object) -> None:
        assert isinstance(note, ShardLoad)
        self._told(self.number, note)

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


class LeaseLink:
    """Opened by `open` or the first offer; offers under way when a link ended are made again, to
    another shard where there is one. The router of a shared pool leases for all of its models."""

    def __init__(self, pool: PoolName, dial: Dial, more_patience_s: float = 0.0) -> None:
        """A router that has to be told its pools first is waited for `more_patience_s`."""
        self._pool, self._dial = pool, dial
        self._more_patience_s = more_patience_s
        self._shards = [_Shard(0, dial, self._hear)]
        self._choice = ShardChoice(1)
        self._profile = UNMEASURED
        self._where: OrderedDict[InvocationId, int] = OrderedDict()  # where there are several

    @property
    def secret(self) -> bytes:
        """Of all links of the pool."""
        return next((s.secret for s in self._shards if s.secret), b"")

    def resize(self, shards: int, profile: Profile) -> None:
        """The pool's router has so many shards; `profile` says what it costs to move a call."""
        self._profile = profile
        if shards == len(self._shards):
            return
        for gone in self._shards[shards:]:
            if gone.link is not None:
                gone.link.close("the pool has fewer shards")
        more = range(len(self._shards), shards)
        added = [_Shard(number, self._dial, self._hear) for number in more]
        was_alone, self._shards = len(self._shards) == 1, [*self._shards[:shards], *added]
        for shard in self._shards:
            shard.has_others = shards > 1
        if was_alone or shards == 1:  # a single shard need not tell its load
            self._shards[0].tell(Follow(shards > 1))
        self._choice.resize(shards)

    async def lease(self, invocation: Invocation, model: str = "") -> Leased:
        """A lease; raise `CapacityError` when the router refuses, or is not there for long, and
        `SupersededError`. To cancel the wait is to withdraw the invocation."""
        was_taken = False
        began_s = away_since_s = time.monotonic()
        while (now_s := time.monotonic()) - away_since_s < PATIENCE_S + self._more_patience_s:
            shard = self._shard_for(invocation)
            if shard is None:
                await self._connected()
                continue
            assert shard.link is not None
            mine = replace(invocation.on_clock(began_s - now_s), was_taken=was_taken)
            try:
                if len(self._shards) == 1:
                    return await _offered(shard.link, mine, model)
                return await self._offered_to(shard, shard.link, mine, model)
            except (LinkError, _MovedError):
                # The life that answers next, of the router or of the link, has never heard of it.
                was_taken, away_since_s = True, time.monotonic()
        raise CapacityError(self._pool, "its router does not answer", RETRY_AFTER_S)

    def open(self) -> None:
        """Begin to connect, so that the first offer need not."""
        for shard in self._shards:
            shard.open()

    def withdraw(self, id: InvocationId, attempt: int, reason: str) -> None:
        """The ingress gives up an attempt that waits or runs."""
        note = InvocationWithdrawn(0.0, id, attempt, reason)
        at = self._where.pop(id, None)
        if at is None or at >= len(self._shards):
            self.tell(note)
        else:
            self._shards[at].tell(note)

    def tell(self, note: Told | Left) -> None:
        """To all shards, before the next offer. One that is not there knows nothing of it."""
        for shard in self._shards:
            shard.tell(note)

    def ended(self, id: InvocationId) -> None:
        """The call has its whole answer."""
        if self._where:
            self._where.pop(id, None)

    def close(self) -> None:
        """Its pool is there no more."""
        for shard in self._shards:
            if shard.link is not None:
                shard.link.close("the pool was removed")

    def _shard_for(self, invocation: Invocation) -> _Shard | None:
        """The shard that gets the call, of those that are connected; None when none is."""
        if len(self._shards) == 1:
            return self._shards[0] if self._shards[0].is_open else None
        reached = [shard.number for shard in self._shards if shard.is_open]
        if len(reached) < len(self._shards):
            self.open()
        if not reached:
            return None
        return self._shards[self._choice.choose(invocation, reached, self._profile)]

    async def _offered_to(
        self, shard: _Shard, link: Connection, mine: Invocation, model: str
    ) -> Leased:
        """As `_offered`, and moved when the shard turns out to have no replica."""
        asking = asyncio.get_running_loop().create_task(_offered(link, mine, model))
        shard.waiting.add(asking)
        self._where[mine.id] = shard.number
        if len(self._where) > MAX_KNOWN:
            self._where.popitem(last=False)
        try:
            return await asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
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
        """Return after a try to connect to any shard."""
        tries = [shard.connect() for shard in self._shards]
        await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)


class _MovedError(Exception):
    """An offer that another shard gets instead."""


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
