"""The Eviction Manager actor: which model sits on which card.

In this version it keeps the book of loaded models and guards the minimum of copies; policies
that pick a victim come on top of it.
"""

from __future__ import annotations

import time

from cato.core.ids import ReplicaId
from cato.core.residency import Residency, Resident

SILENCE_S = 10.0


class EvictionManager:
    """Residency of models, as replicas report it."""

    def __init__(self) -> None:
        self._book = Residency()

    async def report(self, resident: Resident) -> None:
        self._book.report(time.monotonic(), resident)

    async def remove(self, replica_id: ReplicaId) -> None:
        self._book.remove(replica_id)

    async def residents(self) -> tuple[Resident, ...]:
        self._book.forget_silent(time.monotonic(), SILENCE_S)
        return self._book.all()

    async def why_not_unload(self, replica_id: ReplicaId, min_copies: int) -> str | None:
        """Why a copy must stay; None when it may be unloaded."""
        self._book.forget_silent(time.monotonic(), SILENCE_S)
        return self._book.why_not_unload(replica_id, min_copies)
