"""Staging slot: measures a model outside the pool, so that a failure does not affect serving."""

from __future__ import annotations

import os
import sys

from cato.config.places import run_dir
from cato.control.staged import Staged
from cato.core.profile import Profile
from cato.core.topology import DeploymentSpec, HostedModel
from cato.engines.vllm.host import Zygote
from cato.serve.engine_loader import EngineLoader


class StagingSlot:
    """A slot with the resources and engine of `slots`, outside any pool."""

    def __init__(self, slots: DeploymentSpec) -> None:
        self._slots = slots
        self._zygote: Zygote | None = None
        self._loader = EngineLoader(slots, str(run_dir()), self._zygote_socket)

    async def ready(self) -> None:
        """Return when this slot exists."""

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        """See `cato.serve.staging.measured`."""
        try:
            return await self._loader.measure(hosted, profile)
        finally:
            if self._zygote is not None:
                await self._zygote.stop()

    async def _zygote_socket(self) -> str:
        if self._zygote is None:
            socket = run_dir() / f"staging-{os.getpid()}.sock"
            self._zygote = Zygote(socket, python=self._slots.engine.python or sys.executable)
        await self._zygote.ready(self._slots.engine.start_timeout_s)
        return self._zygote.socket
