"""A slot of a shared pool: loads, unloads and measures models as the pool's router orders."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from cato.control.messages import Left
from cato.control.staged import Staged
from cato.core.errors import CatoError, EngineError
from cato.core.eviction import CopyId
from cato.core.ids import DeploymentName, HostId, ModelName
from cato.core.profile import UNMEASURED, Profile
from cato.core.slots import SlotOrder, SlotReport, SlotState
from cato.core.topology import HostedModel
from cato.engines.base import Engine
from cato.serve.replica import Replica
from cato.telemetry.tracing import from_environment

log = logging.getLogger("cato.slot")

# A model is replaced only when no call should be running. Cancelled streams get this long to end;
# others are cut off.
DRAIN_S = 5.0
# Pause before telling a restarting Eviction Manager again.
RETRY_S = 0.3
# A measurement takes minutes: try several times to deliver it.
TELL_TRIES = 10


class KeeperGoneError(Exception):
    """The Eviction Manager does not answer now."""


Measured = Callable[[CopyId, Staged | CatoError], Awaitable[None]]
"""Sends a measurement to the Eviction Manager; raises `KeeperGoneError`."""


class Loader(Protocol):
    """Puts a model into an engine."""

    async def load(self, order: SlotOrder, previous: Engine | None) -> Engine:
        """Return a ready engine that holds the ordered model; raise `CatoError` or `OSError`.

        `previous` is the slot's engine so far. It is stopped in every case, unless it is returned
        or put to sleep.
        """
        ...

    @property
    def asleep(self) -> tuple[ModelName, ...]:
        """Models with a sleeping engine."""
        ...

    async def keep(self, models: tuple[ModelName, ...]) -> None:
        """Stop all sleeping engines except those of `models`."""
        ...

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        """Load a model, measure it, and stop its engine."""
        ...


class OrderedModels:
    """See `cato.serve.replica.Holding`."""

    def __init__(
        self, host: HostId, deployment: DeploymentName, loader: Loader, measured: Measured
    ) -> None:
        self._host, self._deployment = host, deployment
        self._loader, self._measured = loader, measured
        self._replica: Replica
        self._orders: asyncio.Queue[SlotOrder] = asyncio.Queue()
        self._state = SlotState.EMPTY
        self._copy_id: CopyId | None = None
        self._problem = ""
        self._load_s = 0.0
        self._tracing = from_environment()
        self._reports = 0
        self._engine: Engine | None = None  # also set on the replica while it may serve
        self._changing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def join(self, replica: Replica) -> None:
        self._replica = replica

    def report(self) -> SlotReport | Left:
        engine = self._engine
        if self._replica.is_draining:
            return Left(self._replica.id)
        self._reports += 1
        return SlotReport(
            slot=self._replica.id,
            number=self._reports,
            host=self._host,
            deployment=self._deployment,
            state=self._state,
            copy_id=self._copy_id,
            model=self._replica.model,
            problem=self._problem,
            held=tuple(self._replica.calls.attempts.items()),
            load_s=self._load_s,
            pid=None if engine is None else engine.pid,
            asleep=self._loader.asleep,
            template=None if engine is None else engine.facts.template,
        )

    def obey(self, order: SlotOrder) -> None:
        self._orders.put_nowait(order)

    async def keep_forever(self) -> None:
        """Start each order at once; a newer one replaces it. A repeated order changes nothing."""
        while True:
            order = await self._orders.get()
            if order.copy_id != self._copy_id:
                await self._begin(order)
                self._replica.report()
            elif self._state is not SlotState.LOADING:
                await self._loader.keep(order.remembered)

    async def stop(self) -> None:
        tasks = [t for t in (self._changing, self._watching) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:  # they stop an engine that is loading or being measured
            await asyncio.wait(tasks)
        await self._drop_engine()
        await self._loader.keep(())

    async def _begin(self, order: SlotOrder) -> None:
        """Start `order` in place of the previous one."""
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait((self._changing,))
        if self._watching is not None:  # a death that it has yet to tell is not the new copy's
            self._watching.cancel()
            self._watching = None
        self._copy_id, self._state, self._problem = order.copy_id, SlotState.LOADING, ""
        self._replica.model = None if order.model is None else order.model.model.name
        self._replica.engine = None
        self._changing = asyncio.get_running_loop().create_task(self._change(order))

    async def _change(self, order: SlotOrder) -> None:
        replica = self._replica
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
                self._state, replica.model = SlotState.EMPTY, None
            else:
                replica.profile = order.profile or UNMEASURED
                previous, self._engine = self._engine, None
                replica.engine = self._engine = engine = await self._loader.load(order, previous)
                self._state = SlotState.READY
                self._load_s = time.monotonic() - started_s
                if self._tracing is not None:
                    self._tracing.loaded(order.model.model.name, replica.id, self._load_s)
                self._watching = asyncio.get_running_loop().create_task(self._watch(engine))
        except Exception as error:
            # A checkpoint may raise anything; the slot must still leave the state LOADING.
            is_foreseen = isinstance(error, CatoError | OSError)
            problem = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
            model, exc_info = replica.model, not is_foreseen
            log.error(
                "slot %s could not load %s: %s", replica.id, model, problem, exc_info=exc_info
            )
            self._state, self._problem = SlotState.EMPTY, problem
        replica.report()

    async def _measure(self, model: HostedModel, profile: Profile | None) -> Staged | CatoError:
        try:
            return await self._loader.measure(model, profile)
        except CatoError as error:
            return error
        except Exception as error:
            # A model may raise anything; callers waiting for the measurement need an answer.
            log.exception("slot %s could not measure %s", self._replica.id, model.model.name)
            return EngineError(f"{type(error).__name__}: {error}")

    async def _tell_measured(self, copy_id: CopyId, found: Staged | CatoError) -> None:
        for _ in range(TELL_TRIES):
            try:
                await self._measured(copy_id, found)
                return
            except KeeperGoneError as error:
                log.warning("slot %s could not send its measurement: %s", self._replica.id, error)
                await asyncio.sleep(RETRY_S)

    async def _drain(self) -> None:
        calls = self._replica.calls
        try:
            async with asyncio.timeout(DRAIN_S):
                await calls.is_idle.wait()
        except TimeoutError:
            held = ", ".join(calls.attempts)
            log.error("slot %s unloads its model while %s still run", self._replica.id, held)

    async def _watch(self, engine: Engine) -> None:
        why = await engine.wait_dead()
        log.error("engine of slot %s died: %s", self._replica.id, why)
        self._state, self._problem = SlotState.EMPTY, why
        await self._drop_engine()
        self._replica.report()

    async def _drop_engine(self) -> None:
        engine, self._engine, self._replica.engine = self._engine, None, None
        if engine is not None:
            await asyncio.shield(engine.stop())  # a newer order must not leave it half stopped
