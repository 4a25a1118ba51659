"""Progress of a replica's streams, and preemption orders from the pool's router."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping

from cato.control.messages import Told
from cato.core.events import REPORT_STEPS, ReplicaProgressed
from cato.core.ids import InvocationId, ReplicaId

# Reports are at least this far apart: streams share one.
PROGRESS_EVERY_S = 0.1
# Preemption orders may arrive before their calls, which travel over another link.
MAX_EARLY = 1000


class Progress:
    """Reports generated tokens to the pool's router, and takes its preemption orders."""

    def __init__(
        self, replica: ReplicaId, attempts: Mapping[InvocationId, int], tell: Callable[[Told], None]
    ) -> None:
        self._replica, self._attempts, self._tell_router = replica, attempts, tell
        self._tokens: dict[InvocationId, int] = {}
        self._reported: dict[InvocationId, int] = {}
        self._preempted: set[InvocationId] = set()
        self._early: OrderedDict[InvocationId, int] = OrderedDict()
        self._stops: dict[InvocationId, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = 0.0

    def begin(self, id: InvocationId) -> None:
        """Begin counting the current attempt of `id`."""
        self.end(id)
        self._tokens[id] = self._reported[id] = 0
        if self._early.pop(id, None) == self._attempts.get(id):
            self._preempted.add(id)

    def stop_of(self, id: InvocationId) -> asyncio.Event:
        """An event set when the router preempts the call; for non-streamed calls."""
        stop = self._stops.setdefault(id, asyncio.Event())
        if id in self._preempted:
            stop.set()
        return stop

    def stop(self, id: InvocationId, attempt: int) -> None:
        """The router preempts this attempt."""
        if self._attempts.get(id) != attempt:
            self._early[id] = attempt
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return
        self._preempted.add(id)
        if id in self._stops:
            self._stops[id].set()

    def end(self, id: InvocationId) -> None:
        self._tokens.pop(id, None)
        self._reported.pop(id, None)
        self._preempted.discard(id)
        self._stops.pop(id, None)

    def note(self, id: InvocationId, attempt: int, tokens: int) -> bool:
        """Note progress; return True if the stream must stop: the router has preempted it, or this
        replica has had a later attempt since."""
        if self._attempts.get(id) != attempt:
            return True
        self._tokens[id] = tokens
        if tokens - self._reported[id] >= REPORT_STEPS and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._last_s + PROGRESS_EVERY_S, self._tell)
        return id in self._preempted

    def _tell(self) -> None:
        self._timer = None
        self._last_s = asyncio.get_running_loop().time()
        self._reported = dict(self._tokens)
        # Of a preempted call the router may have leased the next attempt here already.
        told, left_out = self._reported.items(), self._preempted
        report = tuple((id, n) for id, n in told if n > 0 and id not in left_out)
        self._tell_router(ReplicaProgressed(0.0, self._replica, report))
