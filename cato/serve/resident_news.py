"""Reports a replica's loaded model to the Eviction Manager."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from cato.control import actors
from cato.core.residency import Resident

log = logging.getLogger("cato.engine_replica")

# Repeat interval: a restarted manager knows all loaded models after this time.
EVERY_S = 2.0
POLL_S = 0.5


class ResidentNews:
    def __init__(self, now: Callable[[], Resident]) -> None:
        """`now` returns what is loaded."""
        self._now = now
        self._told: Resident | None = None
        self._manager: Any = None

    async def tell_forever(self) -> None:
        """Report every change, and repeat every `EVERY_S`."""
        told_s = -EVERY_S
        while True:
            resident, now_s = self._now(), time.monotonic()
            if resident != self._told or now_s - told_s >= EVERY_S:
                try:
                    if self._manager is None:
                        self._manager = actors.get(actors.EVICTION_MANAGER)
                    self._manager.report.remote(resident)
                except (ValueError, RayError) as error:
                    log.info("the Eviction Manager was not reached: %s", error)
                else:
                    self._told, told_s = resident, now_s
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Tell the manager that nothing is loaded any more."""
        if self._manager is not None and self._told is not None:
            self._manager.remove.remote(self._told.replica_id)
