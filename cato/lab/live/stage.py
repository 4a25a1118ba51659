"""The application under test in live benchmarks: our own, or one that already runs.

Importing this module imports Ray, which then reads its settings: set the environment first.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import ray
from ray import serve
from ray.exceptions import RayError

from cato.config.deploy_file import DeployFile
from cato.config.schema import EnginesArgs, IngressArgs
from cato.control import actors
from cato.core.deployment_state import DeploymentState
from cato.core.ids import DeploymentName, PoolName
from cato.core.topology import RAY_SERVE, DeploymentSpec, PoolPolicies, PoolScaling
from cato.lab.bench.local_ray import Hosts, start_hosts, start_ray, wait_until_answered
from cato.lab.client import BenchError
from cato.lab.live import serve_llm
from cato.lab.live.experiment import Arm
from cato.lab.live.rounds import ReplicaPoint
from cato.policies.schedulers import FORESIGHT
from cato.serve.app import build_engines, build_ingress

READY_TIMEOUT_S = 600.0
# Ray logs complaints about its own shutdown after it.
LAST_WORDS_S = 0.5
CALL_TIMEOUT_S = 30.0
POLL_S = 0.2
# Serve's own autoscaler waits 600 s before it removes replicas.
RESET_TIMEOUT_S = 900.0
RESET_POLL_S = 1.0
_STILL = PoolScaling("none")
_ANY: Mapping[str, object] = {"scheduler": FORESIGHT}


class Stage:
    """The application on which `arm`s take turns. Use it as a context manager."""

    def __init__(self, deploy: DeployFile, say: Callable[[str], None]) -> None:
        self.url = ""
        self._deploy = deploy
        self._say = say
        self._close = contextlib.ExitStack()
        self._pools: tuple[PoolName, ...] = tuple(
            p.name for p in deploy.topology.pools if p.policies.scheduler != RAY_SERVE
        )

    def __enter__(self) -> Self:
        try:
            with _quiet():
                self._start()
        except BaseException:
            self._close.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._say("stopping Ray")
        with _quiet():
            self._close.close()
            time.sleep(LAST_WORDS_S)

    def _start(self) -> None:
        raise NotImplementedError

    def configure(self, arm: Arm) -> None:
        """Switch all CATO pools to `arm`; returns when their routers have switched.

        Like a Serve update of the control plane's `user_config`: nothing restarts.
        """
        if not arm.policies:
            return
        self._reconfigure({name: arm.user_config() for name in self._pools})
        for name in self._pools:
            router: Any = actors.get(actors.router_name(name))
            now: PoolPolicies = ray.get(router.policies.remote(), timeout=CALL_TIMEOUT_S)
            if now != arm.pool_policies():
                raise BenchError(f"pool {name} decides by {now}, not as {arm.name}")

    def _reconfigure(self, pools: Mapping[str, object]) -> None:
        handle: Any = serve.get_deployment_handle("control-plane", app_name=actors.ENGINES_APP)
        handle.change.remote({"pools": dict(pools)}).result(timeout_s=CALL_TIMEOUT_S)

    def reset(self, arm: Arm) -> None:
        """Bring every pool back to its initial replicas; `arm` is about to run.

        Pools that Serve scales follow Serve's schedule, ten minutes after their last work.
        """
        self.configure(replace(arm, policies=arm.policies or _ANY, scaling=_STILL))
        provisioner: Any = actors.get(actors.PROVISIONER)
        specs = {d.name: d for p in self._deploy.topology.pools for d in p.deployments}
        for pool in self._deploy.topology.pools:
            for spec in pool.deployments if pool.name in self._pools else ():
                asked = provisioner.scale.remote(spec.name, spec.initial_replicas)
                ray.get(asked, timeout=CALL_TIMEOUT_S)
        deadline_s = time.monotonic() + RESET_TIMEOUT_S
        while others := [n for n, s in deployment_states().items() if _differs(s, specs[n])]:
            if time.monotonic() > deadline_s:
                raise BenchError(
                    f"replicas of {', '.join(others)} did not return to the initial number"
                )
            time.sleep(RESET_POLL_S)

    def forget_sessions(self) -> None:
        """Restart the pools' routers; returns when they know their replicas again.

        A router counts the sessions of the arms before for ten minutes, and would place those of
        the next arm around them.
        """
        for name in self._pools:
            router: Any = actors.get(actors.router_name(name))
            door, replicas = _door_and_replicas(router)
            ray.kill(router, no_restart=False)
            deadline_s = time.monotonic() + READY_TIMEOUT_S
            while True:
                with contextlib.suppress(RayError):
                    now = _door_and_replicas(router)
                    if now[0] != door and now[1] >= replicas:
                        break
                if time.monotonic() > deadline_s:
                    raise BenchError(f"the router of {name} did not find its replicas again")
                time.sleep(POLL_S)

    def replicas(self, since_s: float) -> dict[PoolName, list[ReplicaPoint]]:
        """The provisioner's looks after the Unix time `since_s`, by pool."""
        found: dict[PoolName, list[ReplicaPoint]] = {}
        for state in deployment_states().values():
            points = [p for p in state.history if p.at_s >= since_s]
            found[state.pool] = [
                ReplicaPoint(p.at_s - since_s, p.ready, p.wanted, p.queued + p.running)
                for p in points
            ]
        return found


def _door_and_replicas(router: Any) -> tuple[object, int]:
    """What distinguishes this incarnation of a router, and the replicas that it gives work."""
    door, picture = ray.get([router.door.remote(), router.picture.remote()], timeout=CALL_TIMEOUT_S)
    return door, sum(r.accepting for r in picture.replicas)


def deployment_states() -> dict[DeploymentName, DeploymentState]:
    """Deployment states in the provisioner of the connected cluster."""
    provisioner: Any = actors.get(actors.PROVISIONER)
    states = ray.get(provisioner.state.remote(), timeout=CALL_TIMEOUT_S)
    return {name: DeploymentState(**fields) for name, fields in states.items()}


def _differs(state: DeploymentState, spec: DeploymentSpec) -> bool:
    """Whether a deployment has other replicas than at the start, or some that are not ready."""
    first = spec.initial_replicas
    return (state.target, state.running, state.starting) != (first, first, 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Ray's logs of its processes and of calls that it broke; real failures raise."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


class OwnStage(Stage):
    """Our own Ray on loopback, with the deployment file's applications.

    `workflows` and `profiles` in `folder` replace those that the file names. The baseline
    `ray.serve.llm` is added when an arm needs it (`has_serve_llm`). With `others` there are more
    hosts, with those resources (see `cato.lab.bench.local_ray.Hosts`).
    """

    def __init__(
        self,
        deploy: DeployFile,
        folder: Path,
        say: Callable[[str], None],
        *,
        has_serve_llm: bool = False,
        others: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(deploy, say)
        self.hosts: Hosts | None = None
        self._folder = folder
        self._others = others
        self._has_serve_llm = has_serve_llm
        self._places: Mapping[str, dict[str, str]] = {
            actors.ENGINES_APP: {"profiles": str(folder / "profiles")},
            actors.INGRESS_APP: {"workflows": str(folder / "workflows")},
        }

    def _start(self) -> None:
        self._say("starting Ray")
        cpus = sum(
            d.cpus * d.max_replicas for p in self._deploy.topology.pools for d in p.deployments
        )
        if self._others:
            port, self.hosts = start_hosts(self._folder, self._close, self._others, round(cpus) + 2)
        else:
            port = start_ray(self._folder, self._close, round(cpus) + 2)
        self.url = f"http://127.0.0.1:{port}"
        replicas = [
            (d.max_replicas, d.initial_replicas)
            for p in self._deploy.topology.pools
            for d in p.deployments
        ]
        self._say(f"deploying {sum(initial for _, initial in replicas)} replicas")
        engines = EnginesArgs.model_validate(self._args(actors.ENGINES_APP))
        _run(build_engines(engines), actors.ENGINES_APP, None, external_scaler_enabled=True)
        ingress = IngressArgs.model_validate(self._args(actors.INGRESS_APP))
        _run(build_ingress(ingress), actors.INGRESS_APP, "/")
        if self._has_serve_llm:
            self._say("deploying ray.serve.llm")
            pool = self._deploy.topology.pools[0]
            app = serve_llm.application(pool.model, pool.deployments[0])
            _run(app, serve_llm.APP, serve_llm.ROUTE)
        self._say("waiting for the engines")
        wait_until_answered(f"{self.url}/readyz", READY_TIMEOUT_S)

    def _args(self, app: str) -> dict[str, Any]:
        applications = self._deploy.raw["applications"]
        assert isinstance(applications, list), "a checked deployment file has applications"
        args = next(a.get("args", {}) for a in applications if a["name"] == app)
        return {**args, **self._places[app]}


def _run(app: serve.Application, name: str, route: str | None, **options: Any) -> None:
    """Deploy and wait; raise `BenchError` with Serve's message on failure."""
    try:
        serve.run(app, name=name, route_prefix=route, **options)
    except RuntimeError as error:
        found = serve.status().applications.get(name)
        details = "" if found is None else "\n".join(d.message for d in found.deployments.values())
        raise BenchError(f"{error}\n{details}") from error


class RunningStage(Stage):
    """An application already running at `url`, on the Ray cluster of this host.

    It must have the workflows of the experiment, see `--export`. Its pools return to their
    deployment file's policies when the benchmark ends.
    """

    def __init__(
        self,
        deploy: DeployFile,
        url: str,
        needed: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(deploy, say)
        self.url = url.rstrip("/")
        self._needed = needed

    def _start(self) -> None:
        self._say(f"looking at {self.url}")
        wait_until_answered(f"{self.url}/readyz", READY_TIMEOUT_S)
        tasks = httpx.get(f"{self.url}/v1/tasks", timeout=CALL_TIMEOUT_S).json()["data"]
        found = {t["name"]: t["sla"] for t in tasks}
        for name, workflow in self._needed.items():
            target_ms = float(workflow["sla"]["target"].removesuffix("s")) * 1000
            if name not in found or abs(found[name]["target_ms"] - target_ms) > 0.01:
                raise BenchError(
                    f"{self.url} does not serve the task {name} with a target of "
                    f"{target_ms:.3f} ms: write them with --export FOLDER and the same "
                    "--slowdown, and deploy a file that names its `workflows` and `profiles`"
                )
        try:
            ray.init(address="auto", namespace="bench", logging_level="ERROR", log_to_driver=False)
        except ConnectionError as error:
            problem = f"no Ray cluster runs on this host: run this where {self.url} does"
            raise BenchError(problem) from error
        self._close.callback(ray.shutdown)
        self._close.callback(self._reconfigure, {})
