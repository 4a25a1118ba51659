"""Creates engines, and loads the models of a shared pool into a slot: swap, wake or start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cato.config.places import model_path
from cato.control.staged import Staged
from cato.core.errors import EngineError, InputError
from cato.core.hung import HungRule
from cato.core.ids import ModelName
from cato.core.profile import Profile
from cato.core.slots import SlotOrder
from cato.core.topology import DeploymentSpec, HostedModel, ModelSpec
from cato.engines.base import Engine, EngineState
from cato.engines.scripted.engine import ScriptedEngine
from cato.engines.simulated import SimulatedEngine, simulated_seed
from cato.engines.vllm.process import VllmEngine
from cato.serve.engine_start import started
from cato.serve.staging import measured

log = logging.getLogger("cato.engine_loader")


class EngineLoader:
    """Loads models into one slot; `zygote_socket` finds the zygote when engines fork from one."""

    def __init__(
        self, slots: DeploymentSpec, socket_dir: str, zygote_socket: Callable[[], Awaitable[str]]
    ) -> None:
        self._slots = slots
        self._socket_dir = socket_dir
        self._zygote_socket = zygote_socket
        self._asleep: dict[ModelSpec, VllmEngine] = {}
        # A cancelled load may still be putting an engine away when the next one begins.
        self._retiring = asyncio.Lock()

    async def load(self, order: SlotOrder, previous: Engine | None) -> Engine:
        """Return a ready engine with the ordered model; raise `EngineError`, or `ConfigError` for a
        missing source.

        Swaps the weights of `previous` if possible, else wakes a sleeping engine, else starts a new
        one. In the last two cases `previous` is put to sleep or stopped.
        """
        assert order.model is not None, "there is something to load"
        if previous is not None and await self._is_swapped(order, previous):
            return previous
        # A newer order must not leave an engine half stopped.
        await asyncio.shield(self._retire(order, previous))
        woken = await self._woken(order.model.model)
        if woken is not None:
            return woken
        try:
            return await started(await self._make(order))
        except EngineError as error:
            if not self._asleep or "memory" not in str(error).lower():
                raise
            # Sleeping engines keep some accelerator memory.
            log.warning("%s; trying again without the sleeping engines", error)
            await self.keep(())
            return await started(await self._make(order))

    @property
    def asleep(self) -> tuple[ModelName, ...]:
        """Models with a sleeping engine."""
        alive = (m for m, e in self._asleep.items() if e.state is EngineState.READY)
        return tuple(sorted(m.name for m in alive))

    async def keep(self, models: tuple[ModelName, ...]) -> None:
        """Stop all sleeping engines except those of `models`."""

        async def end_others() -> None:
            async with self._retiring:
                await self._end_others(models)

        await asyncio.shield(end_others())

    async def _end_others(self, models: tuple[ModelName, ...]) -> None:
        for model in [m for m in self._asleep if m.name not in models]:
            await self._asleep[model].stop()
            del self._asleep[model]

    async def _retire(self, order: SlotOrder, previous: Engine | None) -> None:
        """Put `previous` to sleep, else stop it. Makes room in the host's memory first."""
        async with self._retiring:
            await self._end_others(order.remembered)
            if previous is None:
                return
            try:
                if self._may_sleep(order, previous):
                    assert isinstance(previous, VllmEngine)
                    await previous.sleep()
                    self._asleep[previous.model] = previous
                    return
            except EngineError as error:
                log.warning("%s could not be put to sleep: %s", previous.facts.served_model, error)
            finally:
                if previous not in self._asleep.values():
                    await previous.stop()

    def _may_sleep(self, order: SlotOrder, engine: Engine) -> bool:
        return (
            self._slots.engine.sleep
            and isinstance(engine, VllmEngine)
            and engine.state is EngineState.READY
            and engine.model.name in order.remembered
            and engine.model not in self._asleep
        )

    async def _woken(self, model: ModelSpec) -> Engine | None:
        engine = self._asleep.pop(model, None)
        if engine is None:
            return None
        try:
            await engine.wake()
        except EngineError as error:
            log.warning("%s did not wake, starting another engine: %s", model.name, error)
            await asyncio.shield(engine.stop())
            return None
        except BaseException:
            await asyncio.shield(engine.stop())  # its state is unknown
            raise
        return engine

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        """See `cato.serve.staging.measured`."""
        return await measured(self, self._slots, hosted, profile)

    async def _is_swapped(self, order: SlotOrder, engine: Engine) -> bool:
        assert order.model is not None, "there is something to load"
        is_ready = engine.state is EngineState.READY
        if not (self._slots.engine.swap and isinstance(engine, VllmEngine) and is_ready):
            return False
        model = order.model.model
        if model.adapters or engine.model.adapters:
            return False  # adapters are arguments of the server
        try:
            await engine.swap(model, model_path(model.source))
        except InputError as problem:
            log.info("%s; starting another engine", problem)
            return False
        except EngineError as error:
            log.warning("%s was not swapped in, starting another engine: %s", model.name, error)
            return False
        except asyncio.CancelledError:
            await asyncio.shield(engine.stop())  # its weights are unknown
            raise
        except Exception:  # an unreadable source, say; the new engine will report it
            log.exception("%s was not swapped in, starting another engine", model.name)
            return False
        return True

    async def _make(self, order: SlotOrder) -> Engine:
        assert order.model is not None, "there is something to load"
        assert order.profile is not None, "the host of a model knows its profile"
        spec, model = self._slots.engine, order.model.model
        # The profile's own load time is from storage.
        profile = replace(order.profile, load_s=order.expected_s)
        seeded = replace(spec, seed=simulated_seed(spec.seed, model.name))
        slots = replace(self._slots, engine=seeded)
        return await new_engine(slots, model, profile, self._socket_dir, self._zygote_socket)


async def new_engine(
    deployment: DeploymentSpec,
    model: ModelSpec,
    profile: Profile,
    socket_dir: str,
    zygote_socket: Callable[[], Awaitable[str]],
) -> Engine:
    """Create an engine of the deployment's kind, not started; raise `ConfigError` for a missing
    source. `profile` sets the speed of a simulated engine, and how long a real one may be silent
    before it counts as hung.
    """
    spec = deployment.engine
    if spec.kind == "simulated":
        return SimulatedEngine(profile, spec, model.name)
    if spec.kind == "scripted":
        return ScriptedEngine(profile, spec, model.name)
    return VllmEngine(
        spec,
        model,
        model_path(model.source),
        socket_dir,
        await zygote_socket() if spec.zygote else None,
        accelerator=deployment.accelerator,
        cards=deployment.cards,
        hung=HungRule(profile),
    )
