"""A slot of a shared pool: holds the model that it is ordered to hold, and serves it.

Nothing here knows Ray: `cato.serve.slot_replica` is the Serve deployment around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Protocol

from cato.control.links import Told
from cato.control.staged import Staged
from cato.core.errors import CatoError, EngineError, ReplicaLostError
from cato.core.eviction import CopyId
from cato.core.ids import HostId, InvocationId, ModelName, ReplicaId
from cato.core.profile import UNMEASURED, Profile
from cato.core.slots import SlotOrder, SlotReport, SlotState, StopCalls
from cato.core.topology import HostedModel
from cato.engines.base import Engine, EngineChunk, EngineRequest
from cato.serve.held_calls import HeldCalls
from cato.telemetry.tracing import from_environment

log = logging.getLogger("cato.card_slot")

# What still runs when another model is ordered ends at once: the order came because nothing should.
# A cancelled stream needs a moment; what was never cancelled is cut off.
DRAIN_S = 5.0
# The keeper of the books is being restarted.
RETRY_S = 0.3
# Minutes of work are told more than once.
TELL_TRIES = 10


class KeeperGoneError(Exception):
    """The keeper of the books does not answer now."""


class Keeper(Protocol):
    """The books of the pool, as a slot reaches them. All methods raise `KeeperGoneError`."""

    async def attend(self, report: SlotReport) -> SlotOrder | StopCalls | None: ...

    async def report(self, report: SlotReport) -> None: ...

    async def tell(self, slot: ReplicaId, model: ModelName, told: tuple[Told, ...]) -> None: ...

    async def leave(self, slot: ReplicaId) -> None: ...

    async def measured(
        self, slot: ReplicaId, copy_id: CopyId, found: Staged | CatoError
    ) -> None: ...


class Loader(Protocol):
    """Puts a model into an engine."""

    async def load(self, order: SlotOrder, previous: Engine | None) -> Engine:
        """A ready engine that holds what `order` says; raise a `CatoError` or `OSError`.

        `previous` is the slot's engine so far. Whatever happens, it is stopped, unless it is the
        one that is returned, or sleeps.
        """
        ...

    @property
    def asleep(self) -> tuple[ModelName, ...]:
        """Models whose engines sleep."""
        ...

    async def keep(self, models: tuple[ModelName, ...]) -> None:
        """Of what sleeps end all but those."""
        ...

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        """Load a model, measure it, and end its engine."""
        ...


class CardSlot:
    """One slot. Call `attend_forever` once; belongs to one asyncio loop."""

    def __init__(self, id: ReplicaId, host: HostId, keeper: Keeper, loader: Loader) -> None:
        self._id, self._host = id, host
        self._keeper, self._loader = keeper, loader
        self._state = SlotState.EMPTY
        self._copy_id: CopyId | None = None
        self._model: ModelName | None = None
        self._problem = ""
        self._load_s = 0.0
        self._tracing = from_environment()
        self._reports = 0
        self._engine: Engine | None = None
        self._profile = UNMEASURED
        self._calls = HeldCalls(id, self._note)
        self._news: list[Told] = []
        self._changing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def engine(self) -> Engine | None:
        return self._engine

    def as_report(self) -> SlotReport:
        self._reports += 1
        return SlotReport(
            slot=self._id,
            number=self._reports,
            host=self._host,
            state=self._state,
            copy_id=self._copy_id,
            model=self._model,
            problem=self._problem,
            held=tuple(self._calls.attempts.items()),
            load_s=self._load_s,
            pid=None if self._engine is None else self._engine.pid,
            asleep=self._loader.asleep,
            template=None if self._engine is None else self._engine.facts.template,
        )

    async def attend_forever(self) -> None:
        """Ask for orders, and begin to carry out each at once."""
        while True:
            try:
                order = await self._keeper.attend(self.as_report())
            except KeeperGoneError as error:
                log.info("slot %s has no orders: %s", self._id, error)
                await asyncio.sleep(RETRY_S)
                continue
            if order is None:
                continue
            if isinstance(order, StopCalls):
                for id, attempt in order.calls:
                    self._calls.progress.stop(id, attempt)
                continue
            if order.copy_id != self._copy_id:
                await self._begin(order)
            elif self._state is not SlotState.LOADING:
                await self._loader.keep(order.remembered)

    async def generate(
        self, model: ModelName, request: EngineRequest, id: InvocationId, attempt: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """Tokens of one invocation; raise `ReplicaLostError` when the slot holds another model."""
        engine = self._engine
        if self._state is not SlotState.READY or model != self._model or engine is None:
            holds = f"it holds {self._model} ({self._state})" if self._model else "it is empty"
            raise ReplicaLostError(self._id, f"{holds}, not {model}", was_reached=False)
        chunks = self._calls.stream(engine, self._profile, request, id, attempt)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def shutdown(self) -> None:
        """Leave the pool and stop the engine."""
        tasks = [t for t in (self._changing, self._watching) if t is not None]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(KeeperGoneError):
            await self._keeper.leave(self._id)
        if tasks:  # an engine that loads or is measured is theirs to stop
            await asyncio.wait(tasks)
        await self._drop_engine()
        await self._loader.keep(())

    # What it holds

    async def _begin(self, order: SlotOrder) -> None:
        """Carry out `order` from now on, in place of what was ordered before."""
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait((self._changing,))
        self._copy_id, self._state, self._problem = order.copy_id, SlotState.LOADING, ""
        self._model = None if order.model is None else order.model.model.name
        self._changing = asyncio.get_running_loop().create_task(self._change(order))

    async def _change(self, order: SlotOrder) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        await self._drain()
        started_s = time.monotonic()
        try:
            if order.model is None:
                await self._drop_engine()
                await self._loader.keep(())
                self._state = SlotState.EMPTY
            elif order.measure:
                await self._drop_engine()
                found = await self._measure(order.model, order.profile)
                await self._tell_measured(order.copy_id, found)
                self._state, self._model = SlotState.EMPTY, None
            else:
                previous, self._engine = self._engine, None
                self._profile = order.profile or UNMEASURED
                self._engine = await self._loader.load(order, previous)
                self._state = SlotState.READY
                self._load_s = time.monotonic() - started_s
                if self._tracing is not None:
                    self._tracing.loaded(order.model.model.name, self._id, self._load_s)
                self._watching = asyncio.get_running_loop().create_task(self._watch(self._engine))
        except Exception as error:
            # Whatever a checkpoint makes of its engine, a slot that loads for ever serves nobody.
            is_foreseen = isinstance(error, CatoError | OSError)
            problem = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
            exc_info = not is_foreseen
            log.error(
                "slot %s could not load %s: %s", self._id, self._model, problem, exc_info=exc_info
            )
            self._state, self._problem = SlotState.EMPTY, problem
        await self._tell()

    async def _measure(self, model: HostedModel, profile: Profile | None) -> Staged | CatoError:
        try:
            return await self._loader.measure(model, profile)
        except CatoError as error:
            return error
        except Exception as error:
            # Whatever a model does to its engine, callers that wait for the answer are told.
            log.exception("slot %s could not measure %s", self._id, model.model.name)
            return EngineError(f"{type(error).__name__}: {error}")

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._calls.is_idle.wait()
        except TimeoutError:
            log.error("slot %s unloads while %s run", self._id, ", ".join(self._calls.attempts))

    async def _watch(self, engine: Engine) -> None:
        why = await engine.wait_dead()
        log.error("engine of slot %s died: %s", self._id, why)
        self._state, self._problem = SlotState.EMPTY, why
        await self._drop_engine()
        await self._tell()

    async def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.shield(engine.stop())  # a newer order must not leave it half stopped

    # What it tells

    async def _tell_measured(self, copy_id: CopyId, found: Staged | CatoError) -> None:
        for _ in range(TELL_TRIES):
            try:
                await self._keeper.measured(self._id, copy_id, found)
                return
            except KeeperGoneError as error:
                log.warning("slot %s could not tell what it measured: %s", self._id, error)
                await asyncio.sleep(RETRY_S)

    async def _tell(self) -> None:
        with contextlib.suppress(KeeperGoneError):  # the next question says it too
            await self._keeper.report(self.as_report())

    def _note(self, told: Told) -> None:
        """Tell the keeper; what comes up at once goes together, in order."""
        self._news.append(told)
        if len(self._news) == 1:
            task = asyncio.get_running_loop().create_task(self._tell_news())
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_news(self) -> None:
        news, self._news = tuple(self._news), []
        if self._model is not None:
            with contextlib.suppress(KeeperGoneError):  # the next report says what is held
                await self._keeper.tell(self._id, self._model, news)
