"""The way of an ingress replica to an actor that leases replicas, through its restarts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError

from cato.core.errors import CapacityError, CatoError
from cato.core.ids import PoolName

log = logging.getLogger("cato.pools")
T = TypeVar("T")

# An actor that was killed answers again after a second, on a busy machine after several.
PATIENCE_S = 10.0
RETRY_AFTER_S = 5.0
POLL_S = 0.1
# An actor that kept an offer for so long was there.
WAS_THERE_S = 5.0
ANSWER_WITHIN_S = 0.5
# While calls wait, and while none does.
WATCH_S, IDLE_WATCH_S = 0.25, 1.0


class RouterLink:
    """Offers to one actor, repeated when it is another one than they were made to.

    A call that is under way when its actor dies is told so one to two seconds later (Ray waits
    for the reason of the death). The link therefore asks the actor again and again which life of
    it answers: `ping` returns its name.
    """

    def __init__(self, ping: Callable[[], Awaitable[str]]) -> None:
        self._ping = ping
        self._life = ""
        self._offers: set[asyncio.Future[Any]] = set()
        self._coming_back: asyncio.Task[None] | None = None
        self._watching = asyncio.get_running_loop().create_task(self._watch_forever())

    async def lease(self, pool: PoolName, offer: Callable[[float, bool], Awaitable[T]]) -> T:
        """What `offer` returns; raise `CapacityError` when the actor does not answer for long,
        however long the call had waited there before.

        `offer` is told how many seconds have passed since the call of this method, and whether an
        earlier life of the actor had taken what is offered.
        """
        was_taken = False
        began_s = away_since_s = time.monotonic()
        while (offered_at_s := time.monotonic()) - away_since_s < PATIENCE_S:
            offered = asyncio.ensure_future(offer(offered_at_s - began_s, was_taken))
            self._offers.add(offered)
            try:
                return await offered
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The actor that answers now has never heard of the offer.
                was_taken, away_since_s = True, time.monotonic()
            except (RayActorError, TaskCancelledError) as error:
                if time.monotonic() - offered_at_s >= WAS_THERE_S:
                    was_taken, away_since_s = True, time.monotonic()
                await self._until_back(pool, error)
            except RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, CatoError) else error from error
            finally:
                self._offers.discard(offered)
                offered.cancel()
        raise CapacityError(pool, "its router does not answer", RETRY_AFTER_S)

    def close(self) -> None:
        """Watch no more; its actor is not there any longer."""
        self._watching.cancel()

    async def _until_back(self, pool: PoolName, error: RayError) -> None:
        """Return when the actor answers again, or has not for long. One asks for all offers."""
        if self._coming_back is None:
            log.warning("router of pool %s: %s", pool, error)
            self._coming_back = asyncio.get_running_loop().create_task(self._ask(pool))
        await asyncio.shield(self._coming_back)

    async def _ask(self, pool: PoolName) -> None:
        began_s = time.monotonic()
        while (away_s := time.monotonic() - began_s) < PATIENCE_S:
            await asyncio.sleep(POLL_S)
            if await self._answers():
                log.info("router of pool %s answers again after %.1f s", pool, away_s)
                break
        self._coming_back = None

    async def _watch_forever(self) -> None:
        while True:
            await self._answers()
            await asyncio.sleep(WATCH_S if self._offers else IDLE_WATCH_S)

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                life = await self._ping()
        except (ValueError, RayError, TimeoutError):  # not made yet, being restarted, busy
            return False
        if self._life and life != self._life:
            for offered in self._offers:
                offered.cancel()
        self._life = life
        return True
