"""The links of a replica: to its pool's router, and those of ingresses that read its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping

from cato.control.links import RETRY_S, Generate, Joined, Stop, Told, link_to_router, take
from cato.core.errors import LinkError
from cato.core.events import ReplicaProgressed, ReplicaReported
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.engines.base import EngineChunk
from cato.wire.link.connection import Connection, Passive
from cato.wire.link.endpoints import Listener

log = logging.getLogger("cato.engine_replica")

REPORT_S = 0.5
# Tokens of a stream between two reports of progress, as in the simulator, and the least time from
# one report to the next: streams that began at different moments share one.
PROGRESS_TOKENS = 20
PROGRESS_EVERY_S = 0.1
# Orders that came before their calls, which travel another way.
MAX_EARLY = 1000


class ReplicaLink(Passive):
    """What a replica tells is lost while there is no router; reports say what it holds."""

    def __init__(
        self,
        replica: ReplicaId,
        pool: PoolName,
        attempts: Mapping[InvocationId, int],
        report: Callable[[], ReplicaReported],
        generate: Callable[[Generate], AsyncGenerator[EngineChunk, None]],
    ) -> None:
        """`attempts` are those of what the replica holds; `generate` answers ingresses."""
        self._replica, self._pool = replica, pool
        self._report, self._generate = report, generate
        self._router: Connection | None = None
        self._is_over = asyncio.Event()  # the present link to the router
        self._listener: Listener | None = None
        self._secret = b""
        self.progress = Progress(replica, attempts, self.tell)

    async def keep_forever(self) -> None:
        """Stay connected to whichever life of the router there is, and report to it."""
        while True:
            try:
                await self._connect()
            except (LinkError, OSError) as error:
                log.info("replica %s: %s", self._replica, error)
                await asyncio.sleep(RETRY_S)
                continue
            while not self._is_over.is_set():
                self.report()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_over.wait(), REPORT_S)

    def report(self) -> None:
        """Tell the router how the replica is, now."""
        self.tell(self._report())

    def tell(self, told: Told) -> None:
        if self._router is not None:
            self._router.note(told)

    def close(self) -> None:
        """Take no more links, and leave the router's."""
        if self._listener is not None:
            self._listener.close()
        if self._router is not None:
            self._router.close("the replica has ended")

    async def _connect(self) -> None:
        link, secret = await link_to_router(self._pool, self)
        if self._listener is None or secret != self._secret:
            # The router of a pool that was removed and is there again has another.
            if self._listener is not None:
                self._listener.close()
            self._listener = await take(self, secret, f"a reader of {self._replica}")
            self._secret = secret
        self._router = link
        self._is_over.clear()
        if not link.is_open:  # it ended meanwhile
            self._is_over.set()
        link.note(Joined(self._replica, self._listener.address))

    # The other ends

    async def stream(self, peer: Connection, asked: object) -> AsyncGenerator[EngineChunk, None]:
        assert isinstance(asked, Generate)
        async with contextlib.aclosing(self._generate(asked)) as chunks:
            async for chunk in chunks:
                yield chunk

    def note(self, peer: Connection, note: object) -> None:
        assert isinstance(note, Stop)
        self.progress.stop(note.invocation_id, note.attempt)

    def ended(self, peer: Connection) -> None:
        if peer is self._router:
            self._is_over.set()


class Progress:
    """What each stream has generated, told to the pool's router, and what the router takes back."""

    def __init__(
        self,
        replica: ReplicaId,
        attempts: Mapping[InvocationId, int],
        tell: Callable[[Told], None],
    ) -> None:
        self._replica, self._attempts, self._tell_router = replica, attempts, tell
        self._tokens: dict[InvocationId, int] = {}
        self._told: dict[InvocationId, int] = {}
        self._taken_back: set[InvocationId] = set()
        self._early: OrderedDict[InvocationId, int] = OrderedDict()
        self._stops: dict[InvocationId, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = 0.0

    def begin(self, id: InvocationId) -> None:
        """Of the attempt that the replica holds now."""
        self.end(id)
        self._tokens[id] = self._told[id] = 0
        if self._early.pop(id, None) == self._attempts.get(id):
            self._taken_back.add(id)

    def stop_of(self, id: InvocationId) -> asyncio.Event:
        """Set when the router wants the call to stop; for one that shows no progress."""
        stop = self._stops.setdefault(id, asyncio.Event())
        if id in self._taken_back:
            stop.set()
        return stop

    def stop(self, id: InvocationId, attempt: int) -> None:
        """The router takes this attempt back."""
        if self._attempts.get(id) != attempt:
            self._early[id] = attempt
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return
        self._taken_back.add(id)
        if id in self._stops:
            self._stops[id].set()

    def end(self, id: InvocationId) -> None:
        self._tokens.pop(id, None)
        self._told.pop(id, None)
        self._taken_back.discard(id)
        self._stops.pop(id, None)

    def note(self, id: InvocationId, tokens: int) -> bool:
        """True when the router wants the stream to stop here."""
        self._tokens[id] = tokens
        if tokens - self._told[id] >= PROGRESS_TOKENS and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._last_s + PROGRESS_EVERY_S, self._tell)
        return id in self._taken_back

    def _tell(self) -> None:
        self._timer = None
        self._last_s = asyncio.get_running_loop().time()
        self._told = dict(self._tokens)
        report = tuple((id, n) for id, n in self._told.items() if n > 0)
        self._tell_router(ReplicaProgressed(0.0, self._replica, report))
