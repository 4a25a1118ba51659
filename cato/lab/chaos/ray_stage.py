"""A drill on its own Ray cluster on loopback: processes and actors are really killed.

Importing this module imports Ray, which then reads its settings: set the environment first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.exceptions import RayError

from cato.config.deploy_file import DeployFile, load_deploy_file
from cato.config.paths import resolve
from cato.control import actors
from cato.core.ids import PoolName
from cato.core.orchestrator import PoolPicture
from cato.core.shards import merged
from cato.lab.bench.local_ray import Hosts
from cato.lab.chaos.clients import Target
from cato.lab.chaos.drill import MissedError
from cato.lab.chaos.local_stage import MODEL, TASK_MODEL, write_workflow
from cato.lab.chaos.plan import HOST_FAULTS, NEED_PROCESSES, Fault, Plan
from cato.lab.live.stage import OwnStage
from cato.profiles.load import load_profile_file, save_profile
from cato.profiles.schema import Provenance

POOL, DEPLOYMENT, PROFILE, INGRESSES = "drill", "drill-engines", "drill@none", 2
ROUTERS = 2  # one stands by
REAL_PROFILE = "demo-coder@cpu"
ANSWER_WITHIN_S = 10.0
# Notice period of a spot machine.
DRAINED_WITHIN_S = 30.0
FULL_BYTES = 4096
_ACTORS = {
    Fault.ROUTER_KILL: actors.router_name(POOL),
    Fault.PROFILER_KILL: actors.PROFILER,
    Fault.PROVISIONER_KILL: actors.PROVISIONER,
    Fault.EVICTION_KILL: actors.EVICTION_MANAGER,
}
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"
_RAY_PROCESS = "ray::"
_SERVERS = frozenset({"gcs_server", "raylet", "haproxy"})


class RayStage:
    """See `cato.lab.chaos.drill.Stage`."""

    def __init__(self, plan: Plan, url: str, store: Path, hosts: Hosts | None) -> None:
        self.target = Target(url, MODEL, TASK_MODEL, plan.seed)
        self.possible = frozenset(Fault) - {Fault.CLOCK_JUMP}  # cannot be set for other processes
        if not plan.is_real:
            self.possible -= NEED_PROCESSES
        if hosts is None or len(hosts.up()) < 2:
            self.possible -= HOST_FAULTS
        self._replicas = plan.replicas if plan.is_real else 2
        self._store = store
        self._hosts = hosts
        self._handle: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_mended: list[str] = []
        # Engines ended or stopped by a fault, by replica: a router may not know yet.
        self._struck: dict[str, int] = {}

    async def victims(self, fault: Fault) -> Sequence[str]:
        if fault in HOST_FAULTS:
            return [] if self._hosts is None else self._hosts.up()
        try:
            picture = await self._picture()
            ready = [r.id for r in picture.replicas if r.accepting]
            return ready if await self._are_whole(ready) else []
        except (RayError, TimeoutError, MissedError):
            return []  # the router or a replica is being restarted

    async def _are_whole(self, ready: Sequence[str]) -> bool:
        """Whether all planned replicas are there, none with a struck engine."""
        if len(ready) < self._replicas:
            return False
        for replica, struck in list(self._struck.items()):
            if replica in ready and await self._engine_id(replica) in (None, struck):
                return False
            del self._struck[replica]
        return True

    async def strike(self, fault: Fault, victim: str, pause_s: float) -> None:
        try:
            await self._strike(fault, victim, pause_s)
        except (RayError, ValueError, psutil.Error) as error:  # no actor of this name, no process
            raise MissedError(f"{fault}: {error!r}") from error

    async def _strike(self, fault: Fault, victim: str, pause_s: float) -> None:
        match fault:
            case Fault.ENGINE_CRASH | Fault.FAILED_START:
                if (pid := await self._engine_id(victim)) is not None:
                    self._struck[victim] = pid
                await self._ask(victim, "crash_engine", failed_starts=fault is Fault.FAILED_START)
            case Fault.REPLICA_KILL:
                await self._signal(victim, signal.SIGKILL)
            case Fault.REPLICA_PAUSE:
                await self._pause(victim, pause_s)
            case Fault.HOST_KILL:
                assert self._hosts is not None, "only possible with several hosts"
                await asyncio.to_thread(self._hosts.lose, victim)
                self._soon(self._replace_host(victim, pause_s))
            case Fault.HOST_DRAIN:
                assert self._hosts is not None, "only possible with several hosts"
                await asyncio.to_thread(self._hosts.drain, victim, DRAINED_WITHIN_S)
                self._soon(self._replace_host(victim, pause_s))
            case Fault.CONTROLLER_KILL:
                ray.kill(ray.get_actor(_CONTROLLER, namespace="serve"), no_restart=False)
            case Fault.ENGINE_STOP:
                engine = await self._engine(victim)
                self._struck[victim] = engine.pid
                engine.suspend()
            case Fault.ZYGOTE_KILL:
                await self._kill_zygote(victim)
            case Fault.HAPROXY_KILL:
                _kill_haproxy()
            case Fault.INGRESS_KILL:
                _kill_an_ingress()
            case Fault.STORE_LOCK:
                self._soon(_lock(self._store, pause_s))
            case Fault.STORE_FULL:
                self._soon(_fill(pause_s))
            case _:
                ray.kill(actors.get(_ACTORS[fault]), no_restart=False)

    async def queued(self) -> int:
        try:
            return (await self._picture()).queued
        except (RayError, TimeoutError):
            return 0  # unknown while the router is being restarted

    async def leaks(self) -> Sequence[str]:
        try:
            picture = await self._picture()
        except (RayError, TimeoutError) as error:
            return [f"the router does not answer: {error!r}"]
        held = [
            *self._not_mended,
            *(f"{r.held} leases of {r.id}" for r in picture.replicas if r.held),
        ]
        if picture.queued:
            held.append(f"{picture.queued} invocations wait")
        return held

    def memory(self) -> dict[str, int]:
        """Memory of Ray's own processes and their children; a restarted one gets another number."""
        found: dict[str, int] = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline()[:1]).split(".")[0]
                is_actor = title.startswith(_RAY_PROCESS) and title != "ray::IDLE"
                if process.name() in _SERVERS:
                    title = process.name()
                if is_actor or process.name() in _SERVERS:
                    found[f"{title} {process.pid}"] = process.memory_info().rss
        return found

    async def _picture(self) -> PoolPicture:
        routers: list[Any] = [actors.get(name) for name in actors.router_names(POOL, ROUTERS)]
        async with asyncio.timeout(ANSWER_WITHIN_S):
            pictures = await asyncio.gather(*(router.picture.remote() for router in routers))
        return merged(PoolName(POOL), pictures)

    async def _ask(self, replica: str, method: str, **fields: object) -> Any:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(DEPLOYMENT, app_name=actors.ENGINES_APP)
        call = getattr(self._handle, method).remote(cato={"replica": replica, **fields})
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await call
        except Exception as error:  # Serve's transports raise many kinds
            raise MissedError(f"{replica}: {error!r}") from error

    async def _kill_zygote(self, victim: str) -> None:
        """Kill the zygote on the host of `victim`; another host must have replicas."""
        zygote = (await self._engine(victim)).parent()
        assert zygote is not None, "an engine is a zygote's fork"
        replicas = await self.victims(Fault.ZYGOTE_KILL)
        engines = {replica: await self._engine(replica) for replica in replicas}
        hit = {r: e.pid for r, e in engines.items() if e.ppid() == zygote.pid}
        if len(hit) == len(engines):
            raise MissedError(f"all of {len(hit)} replicas are on one host")
        self._struck |= hit
        zygote.kill()

    async def _engine_id(self, replica: str) -> int | None:
        pid: int | None = await self._ask(replica, "engine_process_id")
        return pid

    async def _engine(self, replica: str) -> psutil.Process:
        pid = await self._engine_id(replica)
        if pid is None:
            raise MissedError(f"{replica}: its engine has no process now")
        return psutil.Process(pid)

    async def _signal(self, replica: str, number: signal.Signals) -> int:
        pid = int(await self._ask(replica, "process_id"))
        try:
            os.kill(pid, number)
        except ProcessLookupError as error:
            raise MissedError(f"{replica}: no process {pid}") from error
        return pid

    async def _replace_host(self, name: str, after_s: float) -> None:
        assert self._hosts is not None
        await asyncio.sleep(after_s)
        await asyncio.to_thread(self._hosts.add, name)

    async def _pause(self, replica: str, pause_s: float) -> None:
        pid = await self._signal(replica, signal.SIGSTOP)

        async def wake() -> None:
            await asyncio.sleep(pause_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._soon(wake())

    def _soon(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._is_done)

    def _is_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._not_mended.append(f"a fault was not repaired: {error!r}")


async def _lock(store: Path, for_s: float) -> None:
    """Lock a SQLite file, as another process with a long write would."""
    connection = sqlite3.connect(store, timeout=for_s)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        await asyncio.sleep(for_s)
        connection.rollback()
    finally:
        connection.close()


async def _fill(for_s: float) -> None:
    """Simulate a full disk for the Profiler: none of its files can grow."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] == [f"{_RAY_PROCESS}Profiler"]:
                soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
                process.rlimit(psutil.RLIMIT_FSIZE, (FULL_BYTES, hard))
                await asyncio.sleep(for_s)
                process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))


def _kill_an_ingress() -> None:
    names = [
        a["name"]
        for a in ray.util.list_named_actors(all_namespaces=True)
        if f"{actors.INGRESS_APP}#ingress#" in a["name"]
    ]
    if len(names) > 1:  # one must be left for the clients
        ray.kill(ray.get_actor(min(names), namespace="serve"), no_restart=True)


def _kill_haproxy() -> None:
    """Kill the listening HAProxy processes, and those finishing their last connections."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() == "haproxy":
                process.kill()


@contextlib.contextmanager
def ray_stage(plan: Plan, folder: Path, say: Any) -> Iterator[RayStage]:
    """A cluster with one pool, as `plan` describes."""
    deploy = _deployment(plan, folder)
    others: list[dict[str, Any]] = [{}] * (plan.hosts - 1)
    with OwnStage(deploy, folder, say, others=others) as stage:
        yield RayStage(plan, stage.url, folder / "metadata.db", stage.hosts)


def _engine_of(plan: Plan) -> dict[str, Any]:
    if not plan.is_real:
        return {"kind": "simulated", "max_num_seqs": plan.slots, "seed": plan.seed}
    return {
        "kind": "vllm",
        "zygote": True,
        "dtype": "float32",
        "max_num_seqs": plan.slots,
        "max_model_len": 1024,
        "kv_cache_memory": "256MiB",
    }


def _deployment(plan: Plan, folder: Path) -> DeployFile:
    import yaml

    write_workflow(plan, folder / "workflows")
    profiles = folder / "profiles"
    if plan.is_real:
        name = REAL_PROFILE
        file = load_profile_file(resolve(f"profiles/{name}.yaml"))
        save_profile(profiles / f"{name}.yaml", file.to_profile(), file.provenance)
    else:
        name = PROFILE
        save_profile(profiles / f"{name}.yaml", plan.profile(), Provenance(simulated=True))
    replicas = {"min": plan.replicas, "initial": plan.replicas, "max": plan.replicas}
    deployment = {
        "accelerator": "cpu",
        "cpus": 0.1,
        "replicas": replicas,
        "profile": name,
        "engine": _engine_of(plan),
    }
    engines = {
        "profiles": str(profiles),
        "store": str(folder / "metadata.db"),
        "models": {MODEL: {"source": "demo" if plan.is_real else "simulated", "family": "qwen"}},
        "pools": {
            POOL: {
                "model": MODEL,
                "router_standby": True,
                "deployments": {DEPLOYMENT: deployment},
                "policies": {
                    "max_queued": plan.policies.max_queued,
                    "refuse_late": plan.policies.refuse_late,
                },
            }
        },
    }
    applications = [
        {
            "name": actors.ENGINES_APP,
            "route_prefix": None,
            "import_path": "cato.serve.app:build_engines",
            "external_scaler_enabled": True,
            "args": engines,
        },
        {
            "name": actors.INGRESS_APP,
            "route_prefix": "/",
            "import_path": "cato.serve.app:build_ingress",
            "args": {"workflows": str(folder / "workflows"), "replicas": INGRESSES},
        },
    ]
    path = folder / "drill.yaml"
    path.write_text(yaml.safe_dump({"applications": applications}, sort_keys=False))
    return load_deploy_file(path)
