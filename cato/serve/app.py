"""Builders of the two Ray Serve applications; deployment files name them as `import_path`.

No `from __future__ import annotations` here: Serve reads the pydantic model from them.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from cato.config.deployments import ray_actor_options
from cato.config.paths import resolve, resolve_index
from cato.config.places import run_dir, state_dir
from cato.config.schema import EnginesArgs, IngressArgs
from cato.control.memory import spare_collector
from cato.control.ray_private import (
    bound,
    check_ray_version,
    http_host,
    keep_requests_retryable,
)
from cato.core.errors import ConfigError
from cato.core.follow_ups import CallsBefore, calls_before
from cato.core.ids import DeploymentName, NodeId, TaskName
from cato.core.profile import UNMEASURED, Profile
from cato.core.topology import (
    RAY_SERVE,
    BatchSpec,
    DeploymentSpec,
    HostedModel,
    IngressSpec,
    SharedPoolSpec,
)
from cato.profiles.load import check_profiles, load_profiles
from cato.serve.access.addresses import is_loopback
from cato.serve.access.control import AccessControl, KeyRule
from cato.serve.access.sign_in import SignIn
from cato.serve.batches.folder import BatchRoom
from cato.serve.batches.runner import BatchRunner
from cato.serve.control_plane import ControlPlane
from cato.serve.draining import Drain
from cato.serve.engine_replica import EngineReplica
from cato.serve.ingress.app import create_app
from cato.serve.ingress.forwarded import Proxies
from cato.serve.ingress.pages import Pages
from cato.serve.nodes.code_index import CodeIndex
from cato.serve.nodes.index_following import IndexFollower
from cato.serve.nodes.runner import NodeRunner
from cato.serve.one_write import join_heads
from cato.serve.ray_pools import RayPools
from cato.serve.ray_records import RayRecords
from cato.serve.service import TaskService
from cato.serve.workflow_files import WorkflowFiles, Workflows
from cato.telemetry import logs
from cato.telemetry.tracing import from_environment
from cato.workflows.load import load_workflows

# High enough that nothing waits in Serve's queues: invocations wait in the pool's.
MAX_ONGOING = 10_000
# Longer than the longest generation, so that a stopping replica ends its streams.
DRAIN_S = 600.0
DRAIN_POLL_S = 0.2
# Of the target number, rounded up: one replica more, while an update starts new ones first.
SURGE_PERCENT = 1
# For the last usage of an ingress replica to reach the Profiler.
STOP_FLUSH_S = 5.0
PINNED = RequestRouterConfig(request_router_class="cato.control.ray_private:PinnedRouter")


def build_engines(args: EnginesArgs) -> Application:
    """The `engines` application: one deployment per resource shape, under the control plane."""
    check_ray_version()
    profiles = load_profiles(resolve(args.profiles))
    topology = args.to_topology(profiles.get)
    check_profiles(topology, profiles)
    engines = {}
    for pool in topology.pools:
        by_serve = pool.policies.scheduler == RAY_SERVE
        for spec in pool.deployments:
            options = _left_to_serve(spec) if by_serve else _led_by_cato(spec)
            engines[spec.name] = bound(
                _replicas_of(spec, options),
                pool.name,
                (pool.model.of_engine,),
                spec.of_replica,
                _profile(spec, profiles),
            )
    for shared in topology.shared_pools:
        for spec in shared.deployments:
            # A slot loads what it is ordered to; it has these so that their change restarts it.
            models = tuple(h.model.of_engine for h in shared.models if h.fits(spec))
            engines[spec.name] = bound(
                _replicas_of(spec, _led_by_cato(spec)),
                shared.name,
                models,
                spec.of_replica,
                UNMEASURED,
                may_change=True,
            )
    control = serve.deployment(
        ControlPlane, name="control-plane", ray_actor_options={"num_cpus": 0}
    )
    measured = {d.name: _profile(d, profiles) for p in topology.pools for d in p.deployments}
    hosted = {
        shared.name: {m.model.name: _hosted_profiles(shared, m, profiles) for m in shared.models}
        for shared in topology.shared_pools
    }
    return control.bind(topology, measured, engines, hosted)


def _replicas_of(spec: DeploymentSpec, options: dict[str, Any]) -> Any:
    """The Serve deployment of `spec`; `options` say who leads it."""
    return serve.deployment(
        EngineReplica,
        name=spec.name,
        ray_actor_options=ray_actor_options(spec),
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        health_check_period_s=2.0,
        max_surge_percent=SURGE_PERCENT if spec.start_first else 0,
        **options,
    )


def _led_by_cato(spec: DeploymentSpec) -> dict[str, Any]:
    """Options of a deployment with leased calls, scaled by CATO's provisioner."""
    return {
        "num_replicas": max(1, spec.initial_replicas),
        "max_ongoing_requests": MAX_ONGOING,
        "request_router_config": PINNED,
    }


def _left_to_serve(spec: DeploymentSpec) -> dict[str, Any]:
    """Options of the baseline: Serve's own router and queue, and its autoscaler with default
    thresholds if the number of replicas may vary.
    """
    options: dict[str, Any] = {"max_ongoing_requests": spec.engine.max_num_seqs}
    if spec.min_replicas == spec.max_replicas:
        return {**options, "num_replicas": spec.max_replicas}
    scaling = AutoscalingConfig(
        min_replicas=spec.min_replicas,
        initial_replicas=spec.initial_replicas,
        max_replicas=spec.max_replicas,
    )
    return {**options, "autoscaling_config": scaling}


def _profile(spec: DeploymentSpec, profiles: dict[str, Profile]) -> Profile:
    """The deployment's measured profile; the unmeasured default when it names none."""
    name = spec.engine.profile or spec.profile
    return UNMEASURED if name is None else profiles[name]


def _hosted_profiles(
    shared: SharedPoolSpec, model: HostedModel, profiles: dict[str, Profile]
) -> dict[DeploymentName, Profile]:
    """The model's profile on each deployment where it fits."""
    named = {d.name: model.at(d.name).profile for d in shared.where_fits(model)}
    return {d: UNMEASURED if name is None else profiles[name] for d, name in named.items()}


class Ingress:
    """One ingress replica: HTTP, workflows, code indexes and access to the pools."""

    async def __init__(self, spec: IngressSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        logs.set_up()
        keep_requests_retryable()
        join_heads()
        self._files = WorkflowFiles(resolve(spec.workflows_dir))
        workflows = self._files.workflows
        self._pools = RayPools(_calls(workflows))
        self._is_private = is_loopback(await asyncio.to_thread(http_host))
        sign_in = None if spec.sign_in is None else SignIn(spec.sign_in)
        self._access = AccessControl(
            KeyRule(spec.keys),
            share=1 / spec.replicas,
            sign_in=sign_in,
            is_private=self._is_private,
        )
        records = RayRecords(self._pools, _nodes(workflows), self._access)
        indexes = {
            name: await asyncio.to_thread(_index, name, folder)
            for name, folder in spec.indexes.items()
        }
        self._followed = IndexFollower(tuple(indexes.values()))
        self._followed.start()
        self._spec = spec
        self._records = records
        runner = NodeRunner(indexes, spec.checkers)
        await runner.warm_up()
        self._service = TaskService(
            workflows,
            self._pools,
            runner,
            records,
            tracing=from_environment(),
            brownout=spec.brownout,
            reuse=spec.reuse,
            workflow_problem=self._files.problem,
        )
        self._pools.start()
        records.start()
        following = self._files.follow(self._take_workflows)
        self._following = asyncio.get_running_loop().create_task(following)
        self._drain = Drain(run_dir())
        self._draining = asyncio.get_running_loop().create_task(self._drain.follow())
        self._app = self._made_app()
        spare_collector()

    async def __del__(self) -> None:
        """Serve calls this when the replica stops in order: the last usage is not lost."""
        if records := getattr(self, "_records", None):
            with suppress(TimeoutError):
                await asyncio.wait_for(records.flush(), STOP_FLUSH_S)

    def _take_workflows(self) -> None:
        workflows = self._files.workflows
        self._pools.follow(_calls(workflows))
        self._records.follow(_nodes(workflows))
        self._service.follow(workflows, self._files.problem)

    def __serve_build_asgi_app__(self) -> Any:
        return _leaving_request_id_to_serve(self._app)

    def _made_app(self) -> FastAPI:
        """The FastAPI application; also starts the batch runner."""
        room = batch_room(self._spec.batches)
        app = create_app(
            self._service,
            max_body_bytes=self._spec.max_body_bytes,
            ready=self._ready,
            access=self._access,
            is_private=self._is_private,
            proxies=Proxies.of(self._spec.proxies),
            pages=Pages(self._spec.origins, self._spec.hosts),
            feedback=self._records,
            caps=self._spec.output_caps,
            prompt_rules_off=self._spec.prompt_rules_off,
            shared_prompts=self._spec.shared_prompts,
            prices=self._spec.prices,
            drain=self._drain,
            batches=room,
        )
        if room is not None:
            runner = BatchRunner(
                room,
                app.state.inside,
                self._access.renewed,
                max_line_bytes=self._spec.max_body_bytes,
                is_paused=lambda: self._drain.is_asked or not self._ready()[0],
            )
            self._batches = asyncio.get_running_loop().create_task(runner.run())
        return app

    def _ready(self) -> tuple[bool, str]:
        why_not = self._access.why_not_ready() or self._pools.why_not_ready()
        if not why_not:
            return True, "\n".join(self._pools.warnings)
        failure, trouble = self._pools.why_stuck()
        return False, failure or "\n".join(filter(None, (why_not, trouble)))


def batch_room(spec: BatchSpec | None) -> BatchRoom | None:
    """The batch files' folder and limits; None if batches are off."""
    if spec is None:
        return None
    folder = state_dir() / "batches" if spec.folder is None else Path(spec.folder).expanduser()
    return BatchRoom(folder, spec.limits, spec.at_once)


def _calls(workflows: Workflows) -> dict[TaskName, CallsBefore]:
    return {name: calls_before(w) for name, w in workflows.items()}


def _nodes(workflows: Workflows) -> dict[TaskName, tuple[NodeId, ...]]:
    return {name: tuple(n.id for n in w.nodes) for name, w in workflows.items()}


def _leaving_request_id_to_serve(app: Any) -> Any:
    """Drop our `x-request-id` when it is Serve's own, which Serve writes itself."""

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        mine = dict(scope.get("headers", ())).get(b"x-request-id")

        async def send_once(message: Any) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", mine)
                message["headers"] = [h for h in message.get("headers", ()) if tuple(h) != header]
            await send(message)

        await app(scope, receive, send_once)

    return asgi


def _index(name: str, folder: str) -> CodeIndex:
    try:
        found = resolve_index(folder)
    except ConfigError:  # `cato serve` has seen it: it is away
        found = Path(folder).expanduser()
    return CodeIndex.open_if_possible(found, run_dir() / "indexes" / name)


def build_ingress(args: IngressArgs) -> Application:
    """The `cato` application: HTTP in front of the workflows."""
    spec = args.to_ingress()
    load_workflows(resolve(spec.workflows_dir))  # an invalid file fails the deployment, no replica
    return ingress_application(spec, {})


def ingress_application(spec: IngressSpec, environment: Mapping[str, str]) -> Application:
    """The ingress alone; `environment` adds to what its replicas inherit."""
    options: dict[str, Any] = {"num_cpus": 0}  # cores are counted for engines
    if environment:
        options["runtime_env"] = {"env_vars": dict(environment)}
    deployment = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=spec.replicas,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options=options,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
    )
    return deployment.bind(spec)
