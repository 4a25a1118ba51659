"""Offers of ingresses that wait for a lease from the pool's orchestrator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from cato.core.commands import Dispatch, Refuse
from cato.core.errors import CapacityError, CatoError, SupersededError
from cato.core.events import Event, InvocationOffered, InvocationWithdrawn
from cato.core.ids import InvocationId, PoolName
from cato.core.pool.prefixes import SessionPrefixes
from cato.core.record import changed
from cato.core.snapshot import Invocation


@dataclass(slots=True, eq=False)
class _Asked:
    """A pending offer: one attempt of an invocation, waiting for its lease."""

    answer: asyncio.Future[Dispatch | Refuse]
    attempt: int
    is_over: bool = False  # withdrawn, or offered once more


class Leases:
    """Offers of one pool. All methods are safe to call again with the same ids."""

    def __init__(self, pool: PoolName, handle: Callable[[Event], object]) -> None:
        """`handle` passes an event to the orchestrator, whose answers come to `answer`."""
        self._pool, self._handle = pool, handle
        self._prefixes = SessionPrefixes()
        self._asked: dict[InvocationId, _Asked] = {}

    async def offer(self, invocation: Invocation, shared_blocks: int = 0) -> Dispatch:
        """Wait for a lease; raise `CapacityError` when the queue is full, `SupersededError` when a
        newer run of its buffer takes its place, and `PrefixUnknownError` when its prefix omits the
        `shared_blocks` that it shares with the previous prompt, and those are not known here.

        Times of `invocation` count from the moment of the call; here they are converted to this
        clock. Cancelling the call withdraws the offer, unless it was offered again by then.
        """
        now_s = time.monotonic()
        prefix = self._prefixes.whole(invocation.session, shared_blocks, invocation.prefix)
        mine = invocation.on_clock(now_s)
        if shared_blocks:
            mine = changed(mine, prefix=prefix)
        asked = _Asked(asyncio.get_running_loop().create_future(), mine.attempt)
        earlier, self._asked[mine.id] = self._asked.get(mine.id), asked
        if earlier is not None:  # its ingress ended, not detected yet
            earlier.is_over = True
            earlier.answer.cancel()
        self._handle(InvocationOffered(now_s, mine))
        try:
            command = await asked.answer
        except asyncio.CancelledError:
            if not asked.is_over:
                self.withdraw(mine.id, mine.attempt, "its ingress gave up waiting")
            raise
        if isinstance(command, Refuse) and command.superseded:
            raise SupersededError(command.reason)
        if isinstance(command, Refuse):
            raise CapacityError(self._pool, command.reason, command.retry_after_s)
        return command

    def withdraw(self, id: InvocationId, attempt: int, reason: str) -> None:
        """Its ingress gives up `attempt`; a no-op if the ingress has offered a newer attempt."""
        asked = self._asked.get(id)
        if asked is not None and asked.attempt > attempt:
            return
        self._handle(InvocationWithdrawn(time.monotonic(), id, attempt, reason))
        if asked is not None:
            self._asked.pop(id, None)
            asked.is_over = True
            asked.answer.cancel()

    def answer(self, command: Dispatch | Refuse) -> None:
        # An invocation preempted and leased again before its ingress asks gets the lease then.
        asked = self._asked.pop(command.invocation_id, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(command)

    def fail(self, id: InvocationId, error: CatoError) -> None:
        """The invocation cannot be served: `error` is raised to its ingress."""
        asked = self._asked.pop(id, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_exception(error)
