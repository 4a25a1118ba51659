"""One replica of a pool: its running calls and the engine that serves them.

Independent of Ray: `cato.serve.engine_replica` is the Serve deployment around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from cato.control.messages import Generate, Left, Stop, Told
from cato.core.errors import ReplicaLostError
from cato.core.events import ReplicaReported
from cato.core.ids import ModelName, ReplicaId
from cato.core.profile import UNMEASURED
from cato.core.slots import SlotOrder, SlotReport
from cato.engines.base import Engine, EngineChunk
from cato.serve.held_calls import HeldCalls

Report = ReplicaReported | SlotReport | Left


class Holding(Protocol):
    """Decides which model the replica holds: `OwnModel` or `OrderedModels`."""

    def join(self, replica: Replica) -> None:
        """Called once, first; sets the engine, model and profile of `replica`."""
        ...

    def report(self) -> Report:
        """The state report for the pool's router."""
        ...

    def obey(self, order: SlotOrder) -> None:
        """Take the router's order of what to hold."""
        ...

    async def keep_forever(self) -> None:
        """Watch the engine and carry out orders."""
        ...

    async def stop(self) -> None:
        """Stop the engine."""
        ...


class Replica:
    """Belongs to one asyncio loop."""

    def __init__(
        self, id: ReplicaId, holding: Holding, tell: Callable[[Told | Report], None]
    ) -> None:
        """`tell` sends notes to the pool's router."""
        self.id, self._tell = id, tell
        self.calls = HeldCalls(id, tell)
        self._engine: Engine | None = None
        self.model: ModelName | None = None
        self.profile = UNMEASURED
        self.is_draining = False
        self._holding = holding
        holding.join(self)

    @property
    def engine(self) -> Engine | None:
        return self._engine

    @engine.setter
    def engine(self, engine: Engine | None) -> None:
        if engine is not self._engine:
            self.calls.cache.watch(engine)
        self._engine = engine

    def report(self) -> None:
        """Report the current state to the router."""
        self._tell(self._holding.report())

    def introduce(self) -> None:
        """Report to a router that knows nothing of this replica."""
        self.report()
        self.calls.cache.tell_whole()

    def note(self, note: Stop | SlotOrder) -> None:
        """Handle a note from the router."""
        if isinstance(note, Stop):
            self.calls.progress.stop(note.invocation_id, note.attempt)
        else:
            self._holding.obey(note)

    async def generate(self, asked: Generate) -> AsyncGenerator[EngineChunk, None]:
        """Stream the tokens of one invocation: the first at once, later ones batched under load.

        Raise `ReplicaLostError` when the replica drains or holds another model or none.
        """
        if self.is_draining:
            raise ReplicaLostError(self.id, "it is shutting down", was_reached=False)
        if self.engine is None:
            raise ReplicaLostError(self.id, "no model is loaded", was_reached=False)
        if asked.model not in ("", self.model):
            problem = f"it holds {self.model}, not {asked.model}"
            raise ReplicaLostError(self.id, problem, was_reached=False)
        id, attempt = asked.invocation_id, asked.attempt
        stream = self.calls.stream(self.engine, self.profile, asked.request, id, attempt)
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    async def drain(self) -> None:
        """Accept no more calls, and return when the running ones have ended."""
        self.is_draining = True
        self.report()
        await self.calls.is_idle.wait()
