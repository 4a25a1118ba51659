"""Makes engines, and puts the models of a shared pool into the engine of a slot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cato.config.places import model_path
from cato.control.staged import Staged
from cato.core.errors import EngineError, InputError
from cato.core.profile import Profile
from cato.core.slots import SlotOrder
from cato.core.topology import DeploymentSpec, HostedModel, ModelSpec
from cato.engines.base import Engine, EngineState
from cato.engines.simulated import SimulatedEngine, simulated_seed
from cato.engines.vllm.process import VllmEngine
from cato.serve.engine_start import started
from cato.serve.staging import measured

log = logging.getLogger("cato.engine_loader")


class EngineLoader:
    """Makes engines of the kind that the slots have; `zygote_socket` is asked when they fork."""

    def __init__(
        self,
        slots: DeploymentSpec,
        socket_dir: str,
        zygote_socket: Callable[[], Awaitable[str]],
    ) -> None:
        self._slots = slots
        self._socket_dir = socket_dir
        self._zygote_socket = zygote_socket

    async def load(self, order: SlotOrder, previous: Engine | None) -> Engine:
        """A ready engine that holds what `order` says; raise `EngineError`, or `ConfigError` for a
        source that is not there.

        It is `previous` with other weights where that can be, else a new one; `previous` is ended.
        """
        if previous is not None and await self._is_swapped(order, previous):
            return previous
        if previous is not None:
            await asyncio.shield(previous.stop())  # a newer order must not leave it half stopped
        return await started(await self._make(order))

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        """See `cato.serve.staging.measured`."""
        return await measured(self, self._slots, hosted, profile)

    async def _is_swapped(self, order: SlotOrder, engine: Engine) -> bool:
        assert order.model is not None, "there is something to load"
        is_ready = engine.state is EngineState.READY
        if not (self._slots.engine.swap and isinstance(engine, VllmEngine) and is_ready):
            return False
        model = order.model.model
        try:
            await engine.swap(model, model_path(model.source))
        except InputError as problem:
            log.info("%s; another engine is started", problem)
            return False
        except EngineError as error:
            log.warning("%s was not swapped in, another engine is started: %s", model.name, error)
            return False
        except asyncio.CancelledError:
            await asyncio.shield(engine.stop())  # nobody knows which weights it has now
            raise
        return True

    async def _make(self, order: SlotOrder) -> Engine:
        assert order.model is not None, "there is something to load"
        assert order.profile is not None, "whoever hosts a model knows its profile"
        spec, model = self._slots.engine, order.model.model
        # The profile's load is the one from storage.
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
    """An engine of the kind that `deployment` has, not started; raise `ConfigError` for a source
    that is not there. `profile` is what a simulated one keeps to.
    """
    spec = deployment.engine
    if spec.kind == "simulated":
        return SimulatedEngine(profile, spec, model.name)
    return VllmEngine(
        spec,
        model,
        model_path(model.source),
        socket_dir,
        await zygote_socket() if spec.zygote else None,
        accelerator=deployment.accelerator,
        cards=deployment.cards,
    )
