"""Replica of a single-model pool: restarts its engine when that dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cato.core.errors import CatoError
from cato.core.events import ReplicaReported
from cato.core.pool.hosted import STEADY_AFTER_S
from cato.core.profile import Profile
from cato.core.slots import SlotOrder
from cato.core.topology import DeploymentSpec, ModelSpec
from cato.engines.base import Engine, EngineState
from cato.serve.replica import Replica

log = logging.getLogger("cato.engine_replica")

# The first restart is immediate. After the last one fails, Serve replaces the replica.
# A restart has failed, too, if its engine dies within STEADY_AFTER_S and before its first whole
# answer. Engines that answer are restarted at once: drills kill them every few seconds.
RESTART_BACKOFF_S = (0.0, 1.0, 5.0, 15.0)


class OwnModel:
    """See `cato.serve.replica.Holding`."""

    def __init__(
        self,
        model: ModelSpec,
        spec: DeploymentSpec,
        profile: Profile,
        start: Callable[[], Awaitable[Engine]],
    ) -> None:
        """`start` returns a ready engine."""
        self._model, self._spec, self._profile, self._start = model, spec, profile, start
        self._replica: Replica
        self.broken = ""  # why the engine cannot be restarted
        self.restarts = 0
        self.lost = ""  # how the last engine ended, in one line
        self._tries = 0  # restarts in a row that failed
        self._ready_at_s = 0.0
        self._answered = 0  # by earlier engines

    def join(self, replica: Replica) -> None:
        self._replica = replica
        replica.model, replica.profile = self._model.name, self._profile

    async def start(self) -> Engine:
        """Start the first engine; raise what `start` raises."""
        self._replica.engine = engine = await self._start()
        self._is_ready()
        return engine

    def _is_ready(self) -> None:
        self._ready_at_s = asyncio.get_running_loop().time()
        self._answered = self._replica.calls.answered

    def _was_steady(self) -> bool:
        """Whether the engine that just died had lived for long, or answered a call."""
        lived_s = asyncio.get_running_loop().time() - self._ready_at_s
        return lived_s >= STEADY_AFTER_S or self._replica.calls.answered > self._answered

    @property
    def _engine(self) -> Engine:
        assert self._replica.engine is not None, "the first engine has been started"
        return self._replica.engine

    def report(self) -> ReplicaReported:
        replica, facts = self._replica, self._engine.facts
        is_ready = self._engine.state is EngineState.READY
        return ReplicaReported(
            now_s=0.0,
            replica_id=replica.id,
            deployment=self._spec.name,
            profile=replace(
                self._profile,
                context_tokens=facts.context_tokens or self._profile.context_tokens,
                max_running=facts.max_running,
                kv_capacity_tokens=facts.kv_capacity_tokens or self._profile.kv_capacity_tokens,
            ),
            max_running=facts.max_running,
            standby=self._spec.standby,
            accepting=is_ready and not replica.is_draining,
            held=tuple(replica.calls.attempts),
            # A dead engine has lost its prefix cache.
            prefix_caching=self._spec.engine.prefix_caching and is_ready,
            step_tokens=self._spec.engine.max_num_batched_tokens or 0,
            host_tokens=facts.host_tokens_by(self._profile),
            mixes_prompts=self._spec.engine.mixes_prompts,
        )

    def obey(self, order: SlotOrder) -> None:
        log.error("replica %s has one model; ignoring an order to load another", self._replica.id)

    async def keep_forever(self) -> None:
        while True:
            why = await self._engine.wait_dead()
            log.error("engine of %s died: %s", self._replica.id, why)
            self.lost = why.partition("; last lines of ")[0]
            if self._was_steady():
                self._tries = 0
            self._replica.report()
            await self._restart(why)
            self._replica.report()

    async def _restart(self, why: str) -> None:
        while self._tries < len(RESTART_BACKOFF_S):
            delay_s = RESTART_BACKOFF_S[self._tries]
            self._tries += 1
            await asyncio.sleep(delay_s)
            try:
                await self._engine.stop()
                self._replica.engine = await self._start()
            except Exception as error:
                # A full disk, a missing folder or host agent: the cause may be temporary.
                why, id = str(error) or type(error).__name__, self._replica.id
                is_ours = isinstance(error, CatoError)
                log.error("engine of %s did not come back: %s", id, why, exc_info=not is_ours)
            else:
                self.restarts += 1
                self.broken = ""
                self._is_ready()
                return
        self.broken = f"engine did not come back to stay in {self._tries} tries: {why}"
        # Serve's health check sees it meanwhile.
        await asyncio.sleep(RESTART_BACKOFF_S[-1])
        self._tries = 0

    async def stop(self) -> None:
        if self._replica.engine is not None:
            await self._replica.engine.stop()
