"""The Resource Provisioner actor: scales the number of replicas of each deployment.

At every interval it asks the pools' routers for their demand and Serve for its replicas, and sends
Serve the targets that `cato.core.provisioning` computes. Serve starts replicas and drains those
that leave: they finish their streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray.exceptions import RayError

from cato.control import actors, ray_private
from cato.control.demands import Demands
from cato.core.errors import UnknownNameError
from cato.core.fleet import ScaleTo, ServedFleet
from cato.core.follow_ups import CallsBefore
from cato.core.ids import DeploymentName, ModelName, PoolName, ReplicaId, TaskName
from cato.core.profile import Profile
from cato.core.provisioning import FleetOrchestrator
from cato.core.topology import AdapterSpec, PoolScaling, Topology
from cato.policies.scaling.registry import scaling_policy
from cato.store.errors import StoreError
from cato.store.in_thread import with_store
from cato.store.records import AddedAdapter

log = logging.getLogger("cato.provisioner")

RETRY_S = 2.0
# Serve chooses the replicas to stop one round of its control loop after the order.
LEAVING_WITHIN_S = 1.0
LEAVING_POLL_S = 0.1


class ResourceProvisioner:
    """Targets of all deployments, within bounds, through Serve's external scaler."""

    def __init__(self) -> None:
        self._fleet: FleetOrchestrator | None = None
        self._demands = Demands()
        self._looking: asyncio.Task[None] | None = None
        # Adapters added to a base model since the deployment; None until the store was read.
        self._adapters: tuple[AddedAdapter, ...] | None = None
        self._reading = asyncio.Lock()
        self._topology: Topology | None = None  # known before `_fleet`, which waits for a read
        self._refusals: tuple[str, ...] = ()  # of deployment files, by Serve
        self._config_problem = ""

    async def register(
        self,
        topology: Topology,
        profiles: Mapping[DeploymentName, Profile],
        scaling: Mapping[PoolName, PoolScaling],
        config_problem: str = "",
    ) -> None:
        """Set the deployment file's pools and their current scaling. May be called again; a changed
        file resets the targets. `config_problem`: why the latest `user_config` is not used. Raise
        `UnknownNameError` for an unknown policy.
        """
        self._config_problem = config_problem
        policies = {pool: scaling_policy(s) for pool, s in scaling.items()}
        self._topology = topology
        if self._adapters is None:  # first: ingresses forget adapters that the topology lacks
            try:
                await self.read_adapters()
            except StoreError as error:
                log.error("added adapters are not served yet: cannot read the store: %s", error)
        if self._fleet is None or topology != self._fleet.topology:
            self._fleet = FleetOrchestrator(topology, profiles)
        for pool, policy in policies.items():
            self._fleet.configure(pool, scaling[pool], policy)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_forever())

    async def announce(self, tasks: Mapping[TaskName, CallsBefore]) -> Topology | None:
        """The LLM calls of these tasks, in order: a call to one pool announces calls to others.
        Answered with `topology`."""
        if self._fleet is not None:
            self._fleet.announce(tasks)
        return await self.topology()

    async def topology(self) -> Topology | None:
        """The deployed topology, with the adapters that were added to it."""
        if self._fleet is None:
            return None
        added: dict[ModelName, list[AdapterSpec]] = {}
        for one in self._adapters or ():
            added.setdefault(one.base, []).append(one.adapter)
        return self._fleet.topology.with_adapters(added)

    async def read_adapters(self) -> None:
        """Reload the callable adapters from the metadata store; raise `StoreError`."""
        async with self._reading:  # an earlier read must not end last
            if self._topology is not None:
                self._adapters = await _adapters_in(self._topology.store)

    async def scale(self, deployment: str, replicas: int) -> int:
        """Ask for `replicas`; returns the number within bounds.

        It lasts only in a pool with the scaling policy `none`; other policies soon override it.
        """
        if self._fleet is None:
            raise UnknownNameError("deployment", deployment, ())
        goal = self._fleet.ask(deployment, replicas)
        await self._order(self._fleet, DeploymentName(deployment), goal)
        return goal

    async def state(self) -> dict[str, dict[str, Any]]:
        """The fields of `DeploymentState`, by deployment."""
        return {} if self._fleet is None else {n: asdict(s) for n, s in self._fleet.state().items()}

    async def warnings(self) -> tuple[str, ...]:
        """What is wrong with the latest deployment file or `user_config`, for operators; only the
        first line of each is for others."""
        return tuple(filter(None, (*self._refusals, self._config_problem)))

    async def _look_forever(self) -> None:
        while True:
            fleet = self._fleet
            assert fleet is not None, "the loop starts with the first topology"
            delay_s = fleet.every_s
            try:
                await self._look(fleet)
            except Exception:
                # Serve restarts its controller now and then; the next round reaches it again.
                delay_s = max(delay_s, RETRY_S)
                log.exception("scaling round failed; trying again in %.0f s", delay_s)
            await asyncio.sleep(delay_s)

    async def _look(self, fleet: FleetOrchestrator) -> None:
        pools = fleet.topology.pools
        await self._demands.ask(pools)
        served = await ray_private.fleet(actors.ENGINES_APP, actors.INGRESS_APP)
        self._note_refusals(served.problems)
        if not pools:
            return  # shared pools are not scaled
        hosts = ray_private.hosts()
        demands = self._demands.take(pools)
        orders = fleet.look(time.monotonic(), time.time(), served, hosts, demands)
        for order in orders:
            log.info("scale %s to %d: %s", order.deployment, order.replicas, order.reason)
            await self._order(fleet, order.deployment, order.replicas)
        fewer = [o for o in orders if o.replicas < len(served.running(o.deployment))]
        if fewer:
            await _tell_who_leaves(fleet.topology, fewer, served)

    async def _order(self, fleet: FleetOrchestrator, name: DeploymentName, replicas: int) -> None:
        await ray_private.scale(actors.ENGINES_APP, name, replicas)
        fleet.ordered(name, replicas)

    def _note_refusals(self, refusals: tuple[str, ...]) -> None:
        """Keep them for operators; log each once."""
        for refusal in refusals:
            if refusal not in self._refusals:
                log.error("%s", refusal)
        self._refusals = refusals


async def _adapters_in(store: str | None) -> tuple[AddedAdapter, ...]:
    """The callable adapters in the metadata store at that location; raise `StoreError`."""
    return await with_store(store, lambda s: s.adapters())


async def _tell_who_leaves(topology: Topology, orders: list[ScaleTo], before: ServedFleet) -> None:
    """Tell the routers which replicas drain, so that they get no new leases.

    The ingresses tell it too, seconds later; a call sent to such a replica meanwhile needs another
    lease.
    """
    pool_of = {d.name: p for p in topology.pools for d in p.deployments}
    waiting = {o.deployment: o.replicas for o in orders}
    deadline_s = time.monotonic() + LEAVING_WITHIN_S
    while waiting and time.monotonic() < deadline_s:
        await asyncio.sleep(LEAVING_POLL_S)
        now = await ray_private.fleet(actors.ENGINES_APP)
        for name in sorted(waiting):
            running = now.running(name)
            if len(running) > waiting[name]:
                continue  # Serve has not chosen the replicas yet
            del waiting[name]
            gone = before.running(name) - running
            if gone:
                routers = actors.routers_of(pool_of[name])
                await asyncio.gather(*(_tell_left(router, gone) for router in routers))


async def _tell_left(router: str, gone: frozenset[ReplicaId]) -> None:
    """One that does not answer must not keep the others, and the next round, waiting."""
    try:
        async with asyncio.timeout(LEAVING_WITHIN_S):
            await actors.get(router).left.remote(gone)
    except (ValueError, TimeoutError, RayError) as error:
        log.warning("router %s was not told which replicas leave: %r", router, error)
