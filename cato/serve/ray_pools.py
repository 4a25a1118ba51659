"""Pools on Ray, as seen by an ingress replica: leases, token streams and pool state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException

from cato.control import actors, ray_private, replica_sets
from cato.control.links import link_to_router
from cato.control.messages import Left
from cato.core.commands import Dispatch
from cato.core.errors import (
    CapacityError,
    CatoError,
    EngineDeadError,
    ReplicaLostError,
    StartingError,
    UnknownNameError,
)
from cato.core.events import StreamLost
from cato.core.follow_ups import CallsBefore
from cato.core.ids import InvocationId, PoolName, ReplicaId, TaskName
from cato.core.orchestrator import PoolPicture
from cato.core.profile import UNMEASURED, Profile
from cato.core.shards import merged
from cato.core.slots import HostedPart
from cato.core.snapshot import Invocation
from cato.core.topology import (
    RAY_SERVE,
    DeploymentSpec,
    ModelSpec,
    PoolSpec,
    TemplateFacts,
    Topology,
    model_called,
)
from cato.engines.base import PREEMPTED, EngineChunk, EngineRequest
from cato.serve.cancelled import is_this_task_cancelled
from cato.serve.engines_app import ServedApplication, why_unplaceable
from cato.serve.lease_link import REMOVED, RETRY_AFTER_S, LeaseLink
from cato.serve.pools import PoolInfo
from cato.serve.token_streams import TokenStreams
from cato.wire.link.connection import Connection, Handler

log = logging.getLogger("cato.pools")

REFRESH_S = 1.0
TEMPLATE_EVERY_S = 60.0
# An actor that does not answer within this time is asked again at the next refresh.
ANSWER_WITHIN_S = 2.0
# Extra wait after a restart of the Eviction Manager, until the control plane has sent it its pools.
KNOWN_WITHIN_S = 5.0


class RayPools:
    """Gets leases and tokens over links, or through Ray Serve handles."""

    def __init__(self, calls: Mapping[TaskName, CallsBefore]) -> None:
        """`calls` of all workflows tell the provisioner which calls are followed by others."""
        self._calls = calls
        self._specs: dict[PoolName, PoolSpec] = {}
        self._parts: dict[PoolName, HostedPart] = {}  # models of shared pools
        # Names of the shared pools in the topology; None until the topology is known.
        self._shared: frozenset[PoolName] | None = None
        self._pictures: dict[PoolName, PoolPicture] = {}
        self._models: dict[PoolName, ModelSpec] = {}
        self._pool_by_model: dict[str, PoolName] = {}
        self._profiles: dict[PoolName, Profile] = {}  # as last reported by replicas
        self._templates: dict[PoolName, TemplateFacts | None] = {}
        # Every request looks at all pools: made once between changes of the above.
        self._infos: dict[PoolName, PoolInfo] = {}
        self._ask_template_at_s: dict[PoolName, float] = {}
        self._app: ServedApplication | None = None  # Serve's last status, while not ready
        self._unplaceable = ""
        self.warnings: tuple[str, ...] = ()  # about the latest deployment file or `user_config`
        self._unlisted: dict[PoolName, frozenset[ReplicaId]] = {}  # at the last refresh
        self._shapes: dict[PoolName, tuple[DeploymentSpec, ...]] = {}
        self._routers: dict[str, Any] = {}  # by the actors' names
        self._links: dict[PoolName, LeaseLink] = {}
        self._streams = TokenStreams()
        self._refresher: asyncio.Task[None] | None = None

    def follow(self, calls: Mapping[TaskName, CallsBefore]) -> None:
        """Use the `calls` of changed workflows."""
        self._calls = calls

    def start(self) -> None:
        """Start following the control plane; call once, inside the event loop."""
        loop = asyncio.get_running_loop()
        self._refresher = loop.create_task(self._refresh_forever())

    # Pools

    def all(self) -> Sequence[PoolInfo]:
        if not self._infos:
            names = sorted((*self._specs, *self._parts))
            self._infos = {name: self._info(name) for name in names}
        return tuple(self._infos.values())

    def pool_of(self, model: str) -> PoolInfo:
        name = self._pool_by_model.get(model)
        if name is not None:
            if name not in self._infos:
                self.all()
            return self._infos[name]
        spec = model_called(model, self._models.values())
        if spec is not None:
            return self.pool_of(spec.name)
        if unknown := self._unknown():
            raise StartingError(unknown)
        raise UnknownNameError("model", model, tuple(sorted(self._pool_by_model)))

    def _unknown(self) -> str:
        """Which part of the deployment's pools is not known yet; empty when all are.

        The Provisioner tells the pools and the Eviction Manager the models of shared pools. Either
        may have been lost when this ingress starts; the other's half is served meanwhile.
        """
        if self._shared is None:
            return "the pools are not known yet" if self._parts else "no pool is known yet"
        silent = self._shared - {part.pool for part in self._parts.values()}
        return f"models are not known yet of: {', '.join(sorted(silent))}" if silent else ""

    def pictures(self) -> Sequence[PoolPicture]:
        return list(self._pictures.values())

    def shards(self) -> Mapping[PoolName, int]:
        """Number of router shards of each pool with a known picture."""
        return {name: self._specs[name].shards.count for name in self._pictures}

    @property
    def deployed_args(self) -> Mapping[str, object] | None:
        """The engines' `args` in the deployment file; None until known."""
        return None if self._app is None else self._app.args

    def why_stuck(self) -> tuple[str, str]:
        """Why the engines will not start (final), and what currently delays them."""
        if self._app is None:
            return "", ""
        return self._app.failure or self._unplaceable, self._app.trouble

    def why_not_ready(self) -> str:
        """What every pool still needs before it can serve; empty when ready."""
        if not self._specs and not self._parts:
            return "the engines application has not started"
        if unknown := self._unknown():
            return unknown
        waiting = [
            p.name for p in self.all() if p.ready_replicas == 0 and not self._may_be_empty(p.name)
        ]
        return f"no replica is ready in: {', '.join(waiting)}" if waiting else ""

    def _may_be_empty(self, pool: PoolName) -> bool:
        return pool not in self._parts and self._specs[pool].may_be_empty

    async def lease(self, pool: PoolName, invocation: Invocation) -> Dispatch:
        spec, part = self._specs.get(pool), self._parts.get(pool)
        if spec is None and part is None:
            raise CapacityError(pool, REMOVED, RETRY_AFTER_S)
        if spec is not None and spec.policies.scheduler == RAY_SERVE:
            return _left_to_serve(spec, invocation)
        link = self._lease_link(pool)
        try:
            leased = await link.lease(invocation, self._model_in(pool))
            return await self._streams.reach(leased.dispatch, leased.address, link.secret)
        except asyncio.CancelledError:
            self._withdraw(pool, invocation.id, invocation.attempt, "the ingress gave up waiting")
            raise

    async def stream(
        self, pool: PoolName, lease: Dispatch, request: EngineRequest
    ) -> AsyncGenerator[EngineChunk, None]:
        has_ended = is_preempted = False
        stream = self._streams.stream(lease, request, self._model_in(pool))
        try:
            async with contextlib.aclosing(stream) as chunks:
                async for chunk in chunks:
                    has_ended = has_ended or chunk.finish_reason is not None
                    is_preempted = chunk.finish_reason == PREEMPTED
                    yield chunk
            has_ended = True
        except (ReplicaLostError, EngineDeadError) as error:
            self._tell_lost(pool, lease, str(error))
            raise
        finally:
            link = self._links.get(self._led_by(pool))
            if not has_ended:
                self._withdraw(pool, lease.invocation_id, lease.attempt, "the reader left")
            elif link is not None and not is_preempted:  # else its shard has queued it again
                link.ended(lease.invocation_id)

    def _tell_lost(self, pool: PoolName, lease: Dispatch, why: str) -> None:
        """Tell the router that the call's stream is lost, so that the retry goes elsewhere."""
        if (link := self._links.get(self._led_by(pool))) is not None:
            # A draining replica still reports, which would bring it back: send `Left`.
            id = lease.replica_id
            if replica_sets.has_left(lease.deployment, id):
                link.tell(Left(id))
            else:
                link.tell(StreamLost(0.0, id, lease.invocation_id, lease.attempt, why))

    def _withdraw(self, pool: PoolName, id: InvocationId, attempt: int, reason: str) -> None:
        if (link := self._links.get(self._led_by(pool))) is not None:
            link.withdraw(id, attempt, reason)

    def _led_by(self, pool: PoolName) -> PoolName:
        """The pool whose router grants leases: for a model of a shared pool, the shared pool."""
        return self._parts[pool].pool if pool in self._parts else pool

    def _model_in(self, pool: PoolName) -> str:
        """The model of a shared pool; empty for a pool of one model."""
        return self._parts[pool].model.name if pool in self._parts else ""

    def _lease_link(self, pool: PoolName) -> LeaseLink:
        name = self._led_by(pool)
        if name not in self._links:
            is_shared = name != pool
            dial = partial(_link_to_shard, name, is_shared)
            self._links[name] = LeaseLink(name, dial, KNOWN_WITHIN_S if is_shared else 0.0)
        return self._links[name]

    def _routers_of(self, pool: PoolSpec) -> list[Any]:
        """Router actors of all shards."""
        names = actors.routers_of(pool)
        for name in names:
            if name not in self._routers:
                self._routers[name] = actors.get(name)
        return [self._routers[name] for name in names]

    def _info(self, name: PoolName) -> PoolInfo:
        if (part := self._parts.get(name)) is not None:
            return PoolInfo(
                name,
                part.model,
                part.profile,
                part.simulated,
                ready_replicas=part.slots,  # each can load it
                template=part.template,
            )
        spec, picture = self._specs[name], self._pictures.get(name)
        replicas = [r for r in picture.replicas if r.accepting] if picture else []
        if replicas:
            told = (r.profile for r in replicas)
            self._profiles[name] = min(told, key=attrgetter("typical_call_s"))
        return PoolInfo(
            name=name,
            model=spec.model,
            profile=self._profiles.get(name, UNMEASURED),
            simulated=all(d.engine.is_simulated for d in spec.deployments),
            ready_replicas=len(replicas),
            queued_per_place=0.0 if picture is None else picture.queued_per_place,
            is_measured=name in self._profiles,
            template=self._templates.get(name),
        )

    # Following the control plane

    async def _refresh_forever(self) -> None:
        while True:
            for ask in (self._refresh, self._ask_serve):
                try:
                    await ask()
                except (ValueError, RayError, TimeoutError) as error:
                    # Starting or restarting: the last known state stays valid.
                    log.info("control plane: %s", error)
                except asyncio.CancelledError:
                    if is_this_task_cancelled():
                        raise
                    log.info("control plane: a call was cancelled on its other side")
                except Exception:
                    log.exception("refreshing from the control plane failed; trying again")
            await asyncio.sleep(REFRESH_S)

    async def _ask_serve(self) -> None:
        """Ask Serve why the engines are not ready; skipped once they are."""
        if not self.why_not_ready():
            self._app = None
            return
        async with asyncio.timeout(ANSWER_WITHIN_S):
            self._app = await ray_private.application(actors.ENGINES_APP)
        totals = [host.total for host in ray_private.hosts()]
        self._unplaceable = why_unplaceable(self._shapes, totals) if totals else ""

    async def _refresh(self) -> None:
        # An actor that does not answer must not block the others.
        (problem,) = await asyncio.gather(self._refresh_topology(), return_exceptions=True)
        told = [self._refresh_pool(pool) for pool in self._specs.values()]
        others = await asyncio.gather(*told, self._refresh_shared(), return_exceptions=True)
        for outcome in (problem, *others):
            if outcome is not None:
                raise outcome

    async def _refresh_topology(self) -> None:
        provisioner = actors.get(actors.PROVISIONER)
        async with asyncio.timeout(ANSWER_WITHIN_S):
            told: Any = (provisioner.announce.remote(self._calls), provisioner.warnings.remote())
            topology: Topology | None
            topology, self.warnings = await asyncio.gather(*told)
        if topology is None:
            return  # a restarted provisioner knows no topology yet
        before, self._specs = self._specs, {pool.name: pool for pool in topology.pools}
        self._shared = frozenset(pool.name for pool in topology.shared_pools)
        gone = (before.keys() | self._links.keys()) - self._specs.keys() - self._shared
        self._shapes = {pool.name: pool.deployments for pool in topology.pools}
        self._shapes |= {pool.name: pool.deployments for pool in topology.shared_pools}
        for name in gone:
            self._pictures.pop(name, None)
            self._profiles.pop(name, None)
            self._templates.pop(name, None)
            self._ask_template_at_s.pop(name, None)
            self._unlisted.pop(name, None)
            if name in before:
                self._forget_routers(before[name])
            link = self._links.pop(name, None)
            if link is not None:
                link.close()
        self._name_models()

    async def _refresh_pool(self, pool: PoolSpec) -> None:
        routers = self._routers_of(pool)
        if pool.policies.scheduler != RAY_SERVE:
            link = self._lease_link(pool.name)
            link.resize(pool.shards, self._profiles.get(pool.name, UNMEASURED))
            link.open()
        async with asyncio.timeout(ANSWER_WITHIN_S):
            try:
                told = await asyncio.gather(*(router.picture.remote() for router in routers))
            except RayActorError:
                # A pool that was removed and created again has another actor.
                self._forget_routers(pool)
                raise
            self._pictures[pool.name] = merged(pool.name, told)
            self._infos = {}
            await self._tell_listing(pool, routers)
            await self._learn_template(pool)
            for deployment in pool.deployments:
                self._streams.handle(deployment.name)

    async def _tell_listing(self, pool: PoolSpec, routers: Sequence[Any]) -> None:
        """Serve's listing decides which replicas the routers may use.

        It is compared with the picture at every refresh. So the routers also hear of a change when
        they restart, or when another ingress that has told them of an unlisted replica ends before
        Serve lists it again.

        Serve unlists healthy replicas for a moment while it reconfigures them: only those unlisted
        at two refreshes in a row count as gone. The Provisioner tells of a scale-in at once.
        """
        known = frozenset(r.id for r in self._pictures[pool.name].replicas)
        unlisted: set[ReplicaId] = set()
        unknown: set[ReplicaId] = set()
        for deployment in pool.deployments:
            unlisted |= {ReplicaId(r) for r in replica_sets.left(deployment.name)}
            unknown |= {ReplicaId(r) for r in replica_sets.listed(deployment.name)} - known
        gone = known & unlisted & self._unlisted.get(pool.name, frozenset())
        self._unlisted[pool.name] = frozenset(unlisted)
        told: list[Any] = []
        if gone:
            told += [router.left.remote(gone) for router in routers]
        if unknown:
            told += [router.listed.remote(frozenset(unknown)) for router in routers]
        await asyncio.gather(*told)

    def _forget_routers(self, pool: PoolSpec) -> None:
        for name in actors.routers_of(pool):
            self._routers.pop(name, None)

    async def _learn_template(self, pool: PoolSpec) -> None:
        """Ask one replica of the pool from time to time; an update may change the template."""
        ready = [r for r in self._pictures[pool.name].replicas if r.accepting]
        now_s = time.monotonic()
        if not ready or now_s < self._ask_template_at_s.get(pool.name, 0.0):
            return
        handle = self._streams.handle(ready[0].deployment).options(stream=False)
        try:
            self._templates[pool.name] = await handle.template.remote(cato={"replica": ready[0].id})
            self._ask_template_at_s[pool.name] = now_s + TEMPLATE_EVERY_S
            self._infos = {}
        except (RayActorError, RayServeException, CatoError) as error:
            log.info("the chat template of pool %s is not known yet: %s", pool.name, error)

    async def _refresh_shared(self) -> None:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            manager = actors.get(actors.EVICTION_MANAGER)
            parts: tuple[HostedPart, ...] | None = await manager.parts.remote()
        if parts is not None:  # a restarted manager knows no pools yet
            self._parts = {part.name: part for part in parts}
        for part in self._parts.values():
            for deployment in part.deployments:
                self._streams.handle(deployment)
            self._lease_link(part.name).open()
        self._name_models()

    def _name_models(self) -> None:
        """Rebuild the model names: adapters and models of shared pools change at run time."""
        self._models = {pool.name: pool.model for pool in self._specs.values()}
        self._models |= {part.name: part.model for part in self._parts.values()}
        named = self._models.items()
        self._pool_by_model = {name: pool for pool, model in named for name in model.names}
        self._infos = {}


def _link_to_shard(
    pool: PoolName, is_shared: bool, shard: int, handler: Handler
) -> Awaitable[tuple[Connection, bytes]]:
    return link_to_router(pool, handler, shard, is_shared=is_shared)


def _left_to_serve(spec: PoolSpec, invocation: Invocation) -> Dispatch:
    """A dispatch without a replica: the call waits in Ray Serve's own router."""
    return Dispatch(
        invocation_id=invocation.id,
        attempt=invocation.attempt,
        replica_id=ReplicaId(""),
        deployment=spec.deployments[0].name,
        priority=0,
        queue_s=-invocation.arrived_at_s,
        slack_s=invocation.deadline_s,
        remaining_s=0.0,
        reason="Ray Serve's own router decides",
    )
