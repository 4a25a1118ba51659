"""Control plane: creates the control actors and keeps sending them their configuration."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ray.exceptions import RayError

from cato.config.control import control_problems, pool_changes, shared_pool_changes
from cato.control import actors, ray_private
from cato.control.eviction import EvictionManager
from cato.control.profiler import Profiler
from cato.control.provisioner import ResourceProvisioner
from cato.control.router import ReplicaRouter
from cato.core.errors import ConfigError
from cato.core.ids import DeploymentName, ModelName, PoolName
from cato.core.profile import Profile
from cato.core.residency import card_time
from cato.core.topology import PoolPolicies, PoolScaling, PoolSpec, Topology
from cato.core.usage_outbox import UsageOutbox

log = logging.getLogger("cato.control_plane")
ASSERT_S = 2.0
COUNT_S = 60.0
ANSWER_WITHIN_S = 10.0
START_WITHIN_S = 60.0
"""Time for the control actors to start; on a busy host each takes most of a minute."""

NOT_USED = "the latest user_config is wrong and not used: the policies stay as they are"


class ControlPlane:
    """Root deployment of the `engines` application.

    A restarted actor knows only its constructor arguments; it gets later changes from here, every
    `ASSERT_S`. Policies can be changed at run time through this deployment's `user_config`, without
    a restart. `engines` are handles of the engine deployments: binding them here makes them part of
    the application. `hosted` are the profiles of models in shared pools.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        topology: Topology,
        profiles: dict[DeploymentName, Profile],
        engines: dict[str, Any],
        hosted: dict[PoolName, dict[ModelName, dict[DeploymentName, Profile]]],
    ) -> None:
        self._topology = topology
        self._hosted = hosted
        self._profiles = profiles
        self._engines = engines
        self._policies: dict[PoolName, PoolPolicies] = {p.name: p.policies for p in topology.pools}
        self._scaling: dict[PoolName, PoolScaling] = {p.name: p.scaling for p in topology.pools}
        self._shared = {p.name: p.policies for p in topology.shared_pools}
        self._config_problem = ""
        actors.create(Profiler, actors.PROFILER, topology.store)
        # An existing actor keeps its own secret.
        actors.create(EvictionManager, actors.EVICTION_MANAGER, secrets.token_bytes(32))
        actors.create(ResourceProvisioner, actors.PROVISIONER)
        for pool in topology.pools:
            await self._create_routers(pool)
        try:  # ingresses learn of new pools before old routers end
            await self._assert(START_WITHIN_S)
        except TimeoutError:
            # One that hangs must not keep the others from their configuration after a restart.
            log.warning(
                "a control actor has not answered in %.0f s; all are told again", START_WITHIN_S
            )
        actors.remove_routers_but([n for p in topology.pools for n in actors.routers_of(p)])
        self._counted_at_s = time.monotonic()
        self._held = UsageOutbox(secrets.token_hex(8))  # time for which models held accelerators
        self._task = asyncio.get_running_loop().create_task(self._assert_forever())

    async def _create_routers(self, pool: PoolSpec) -> None:
        """Create all router shards with one secret; an existing actor keeps its own."""
        secret = secrets.token_bytes(32)
        for shard, name in enumerate(actors.routers_of(pool)):
            router = actors.create(
                ReplicaRouter,
                name,
                pool.name,
                self._policies_of_shard(pool),
                pool.fastest(self._profiles),
                self._topology.event_log,
                secret,
                shard,
                pool.shards,
            )
            if shard == 0 and pool.shards.count > 1:
                secret = (await router.door.remote()).secret

    def _policies_of_shard(self, pool: PoolSpec) -> PoolPolicies:
        return replace(pool, policies=self._policies[pool.name]).of_shard

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls this with `user_config`; an invalid one changes nothing, and is shown.

        It must not raise: Serve then ends the replica, and gives up when the next ones fail at the
        same `user_config`. Without a control plane, a restarted control actor never gets its
        configuration again.
        """
        try:
            with _missing_answers_logged():
                await self.change(user_config)
        except ConfigError as error:
            self._config_problem = f"{NOT_USED}\n{error}"
            log.error("%s", self._config_problem)

    async def change(self, user_config: dict[str, Any]) -> None:
        """Apply a `user_config` until the next one; raise `ConfigError` with all its problems.

        Returns when all control actors have it; raise if one does not answer. Such an actor gets it
        later, as every `ASSERT_S`.
        """
        of_file = {pool.name: pool.policies for pool in self._topology.pools}
        problems = control_problems(user_config, of_file, tuple(self._shared))
        if problems:
            raise ConfigError(problems)
        policies, scaling = pool_changes(user_config, tuple(self._policies))
        for pool in self._topology.pools:
            self._policies[pool.name] = replace(pool.policies, **policies.get(pool.name, {}))
            self._scaling[pool.name] = replace(pool.scaling, **scaling.get(pool.name, {}))
        shared = shared_pool_changes(user_config, tuple(self._shared))
        for spec in self._topology.shared_pools:
            self._shared[spec.name] = replace(spec.policies, **shared.get(spec.name, {}))
        self._config_problem = ""
        await self._assert(ANSWER_WITHIN_S)

    async def _assert(self, within_s: float | None = None) -> None:
        """Send the configuration to all actors; one that fails or hangs does not block others."""

        async def tell(actor: str, method: str, *args: object) -> None:
            async with asyncio.timeout(within_s):
                await getattr(actors.get(actor), method).remote(*args)

        hosted = [(spec, self._hosted[spec.name]) for spec in self._topology.shared_pools]
        told = [
            tell(
                actors.PROVISIONER,
                "register",
                self._topology,
                self._profiles,
                self._scaling,
                self._config_problem,
            ),
            *(
                tell(
                    router,
                    "configure",
                    self._policies_of_shard(pool),
                    pool.fastest(self._profiles),
                    pool.shards,
                )
                for pool in self._topology.pools
                for router in actors.routers_of(pool)
            ),
            tell(actors.PROFILER, "keep", self._topology.kept),
            tell(
                actors.EVICTION_MANAGER,
                "register",
                hosted,
                self._shared,
                self._topology.store,
                self._topology.event_log,
            ),
        ]
        for outcome in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _count_cards(self) -> None:
        """Tell the Profiler about once a minute how long models held accelerators."""
        now_s = time.monotonic()
        since_s = now_s - self._counted_at_s
        if since_s < COUNT_S:
            return
        async with asyncio.timeout(ANSWER_WITHIN_S):
            residents = await actors.get(actors.EVICTION_MANAGER).residents.remote()
            self._held.hold(card_time(residents, datetime.now(UTC).date().isoformat(), since_s))
            self._counted_at_s = now_s  # from here on, what is lost is sent again
            profiler = actors.get(actors.PROFILER)
            to, number = await profiler.kept.remote(self._held.sender)
            self._held.kept(to, number)
            parcels = self._held.parcels()
            self._held.sent(parcels, to, await profiler.record.remote((), parcels, to))

    async def _is_replaced(self) -> bool:
        """Whether Serve stops this replica. It drains for up to half a minute, while the next one
        has told the control actors a newer configuration."""
        try:
            async with asyncio.timeout(ASSERT_S):
                return await ray_private.is_stopping()
        except Exception as error:  # whatever it answers, the actors need their configuration
            log.warning("Serve's controller does not tell whether this replica stays: %r", error)
            return False

    async def _assert_forever(self) -> None:
        while True:
            await asyncio.sleep(ASSERT_S)
            if await self._is_replaced():
                return
            with _missing_answers_logged():
                await self._assert(ANSWER_WITHIN_S)
                await self._count_cards()


@contextmanager
def _missing_answers_logged() -> Iterator[None]:
    """For what is tried again in `ASSERT_S`."""
    try:
        yield
    except (RayError, ValueError, TimeoutError) as error:
        log.warning("a control actor does not answer: %r", error)
