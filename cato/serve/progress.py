"""How far the streams of a replica are, and which of them its pool takes back."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping

from cato.control.links import Told
from cato.core.events import ReplicaProgressed
from cato.core.ids import InvocationId, ReplicaId

# Tokens of a stream between two reports of progress, as in the simulator, and the least time from
# one report to the next: streams that began at different moments share one.
PROGRESS_TOKENS = 20
PROGRESS_EVERY_S = 0.1
# Orders that came before their calls, which travel another way.
MAX_EARLY = 1000


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
