"""Runs live measurements in rounds: one seed per round, all workloads, all arms in turns."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

import psutil

from cato.core.ids import DeploymentName, PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.core.topology import Topology
from cato.lab.bench.cpu import cpu_s
from cato.lab.client import BenchError
from cato.lab.live import real
from cato.lab.live.client import Ask, Seen, TaskClient
from cato.lab.live.experiment import WARM_UP_SEED, Arm, LiveExperiment, scaled
from cato.lab.live.prediction import Prediction, router_profiles, simulated
from cato.lab.live.workflows import LiveTask, live_tasks, pool_named, workflow_name
from cato.sim.tasks import SimTask

CPU_EVERY_S = 1.0
# The Profiler learns every 5 s, and ingresses query it every second.
LEARN_S = 8.0
# Time for engines to report their last progress and for routers to see that nothing runs.
SETTLE_S = 1.0
# Warm-up of Ray Serve's arms: lengths are learned from CATO's arms, these only open connections.
SERVE_WARM_UPS = 12


@dataclass(frozen=True, slots=True)
class Settings:
    """Size of the measurement, and its slowdown relative to the experiment."""

    seeds: tuple[int, ...]
    tasks: int
    slowdown: float
    warm_up: int


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: the experiment, and the deployment with its profiles as they run.

    `engines` are the profiles that the deployments' engines keep.
    """

    experiment: LiveExperiment
    topology: Topology
    engines: Mapping[DeploymentName, Profile]

    @property
    def profiles(self) -> Mapping[PoolName, Profile]:
        """The profiles given to the pools' routers."""
        return router_profiles(self.topology, self.engines)

    def sim_tasks(self, workload: str, seed: int, settings: Settings, n: int) -> list[SimTask]:
        made = self.experiment.workloads[workload](seed, n)
        return [scaled(task, settings.slowdown) for task in made]

    @property
    def slots(self) -> int:
        """Concurrent calls in the engines of one arm."""
        return sum(
            d.engine.max_num_seqs * d.initial_replicas
            for p in self.topology.pools
            if p.name in self.used
            for d in p.deployments
        )

    @property
    def used(self) -> frozenset[PoolName]:
        """Pools that the tasks name; arms with separate pools use as many."""
        first = next(iter(self.experiment.workloads.values()))
        if self.experiment.sessions is not None:
            return frozenset({self.topology.pools[0].name})
        return frozenset(node.pool for task in first(WARM_UP_SEED, 100) for node in task.nodes)


@dataclass(slots=True)
class CpuLoad:
    """CPU load as fractions of all cores: every second, and of this benchmark alone (engines, CATO
    and client together)."""

    samples: list[float] = field(default_factory=list)
    own: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One arm with one seed of one workload."""

    workload: str
    arm: Arm
    seed: int
    seen: Sequence[Seen]
    predicted: Prediction | None
    cpu: CpuLoad
    replicas: Mapping[PoolName, Sequence[ReplicaPoint]] = field(default_factory=dict)


class ReplicaPoint(NamedTuple):
    """A pool's replicas, `at_s` after the first arrival; `calls` are waiting or running."""

    at_s: float
    ready: int
    wanted: int
    calls: int


class _Make(Protocol):
    """Gives tasks their prompts; called for the warm-up first."""

    async def __call__(
        self, sim: Sequence[SimTask], seed: int, done: Callable[[], None]
    ) -> list[LiveTask]: ...


@dataclass(slots=True)
class _Finder:
    """For simulated engines: finds prompts whose answers have the tasks' lengths."""

    subject: Subject

    async def __call__(
        self, sim: Sequence[SimTask], seed: int, done: Callable[[], None]
    ) -> list[LiveTask]:
        return live_tasks(sim, self.subject.topology, self.subject.profiles, seed, done)


@dataclass(slots=True)
class _Recorder:
    """For real engines: makes prompts, and records the lengths of the model's answers.

    The simulator's belief of each class is what the warm-up showed; the Profiler learns the same.
    Of a class that was not in it both know nothing.
    """

    subject: Subject
    mix: real.Mix
    url: str
    beliefs: Mapping[TaskName, LengthBelief] = field(default_factory=dict)

    async def __call__(
        self, sim: Sequence[SimTask], seed: int, done: Callable[[], None]
    ) -> list[LiveTask]:
        pool = pool_named(self.subject.topology, self.mix.pool)
        prompts = real.code_prompts(sim, self.subject.profiles[pool.name].chars_per_token, seed)
        found = await self.mix.recorded(sim, prompts, self.url, pool.model.name, done)
        if not self.beliefs:
            names = dict.fromkeys(task.name for task in found)
            self.beliefs = {
                n: LengthBelief.of(t.nodes[0].output_tokens for t in found if t.name == n)
                for n in names
            }
        return [
            LiveTask(real.with_belief(task, self.beliefs.get(task.name)), {"prompt_0": prompt})
            for task, prompt in zip(found, prompts, strict=True)
        ]


class Configurable(Protocol):
    """The part of a stage that the rounds use."""

    url: str

    def configure(self, arm: Arm) -> None: ...

    def reset(self, arm: Arm) -> None: ...

    def forget_sessions(self) -> None: ...

    def replicas(self, since_s: float) -> dict[PoolName, list[ReplicaPoint]]: ...


class Progress(Protocol):
    """Callback with the current activity and its number of steps."""

    def begin(self, what: str, steps: int) -> None: ...

    def step(self) -> None: ...


def order(arms: Sequence[Arm], number: int) -> tuple[Arm, ...]:
    """Order of the arms in round `number`: A B, then B A, then A B, ..."""
    return tuple(arms) if number % 2 == 0 else tuple(reversed(arms))


async def measure(
    subject: Subject,
    stage: Configurable,
    settings: Settings,
    progress: Progress,
    runs: list[Run],
) -> None:
    """All rounds, after a warm-up that teaches the Profiler with separate tasks.

    Results are added to `runs`, so that they survive an interruption.
    """
    mix = subject.experiment.mix
    make: _Make = _Finder(subject) if mix is None else _Recorder(subject, mix, stage.url)
    async with TaskClient(stage.url) as client:
        await _warm_up(subject, stage, settings, progress, client, make)
        for number, seed in enumerate(settings.seeds):
            for workload in subject.experiment.workloads:
                where = f"round {number + 1}/{len(settings.seeds)}, {workload}"
                sim = subject.sim_tasks(workload, seed, settings, settings.tasks)
                progress.begin(f"{where}: prompts", len(sim))
                tasks = await make(sim, seed, progress.step)
                for arm in order(subject.experiment.arms, number):
                    await prepare(subject, stage, arm, progress)
                    progress.begin(f"{where}: {arm.name}", len(tasks))
                    since_s = time.time()
                    async with cpu_load() as cpu:
                        seen = await client.replay(tasks, _asker(subject, arm), progress.step)
                    replicas = await _replicas(subject, stage, arm, since_s)
                    predicted = _predicted(subject, arm, tasks)
                    runs.append(Run(workload, arm, seed, seen, predicted, cpu, replicas))


def whole_rounds(runs: Sequence[Run], experiment: LiveExperiment) -> tuple[int, ...]:
    """Seeds that every arm completed in every workload."""
    by_seed = Counter(run.seed for run in runs)
    size = len(experiment.workloads) * len(experiment.arms)
    return tuple(seed for seed, n in by_seed.items() if n == size)


async def prepare(subject: Subject, stage: Configurable, arm: Arm, progress: Progress) -> None:
    """Switch to `arm`, starting from the replicas that all arms begin with."""
    if subject.experiment.cold_start_s is not None:
        progress.begin(f"back to the initial replicas, for {arm.name}", 1)
        await asyncio.to_thread(stage.reset, arm)
    await asyncio.to_thread(stage.configure, arm)
    await asyncio.sleep(SETTLE_S)


async def _replicas(
    subject: Subject, stage: Configurable, arm: Arm, since_s: float
) -> dict[PoolName, list[ReplicaPoint]]:
    """Replicas of the arm's pools, under the experiment's pool names."""
    if subject.experiment.cold_start_s is None:
        return {}
    points = await asyncio.to_thread(stage.replicas, since_s)
    return {name: points[PoolName(name + arm.suffix)] for name in sorted(subject.used)}


def _predicted(subject: Subject, arm: Arm, tasks: Sequence[LiveTask]) -> Prediction | None:
    if not arm.has_twin:
        return None
    sim = [task.sim for task in tasks]
    return simulated(sim, arm, subject.experiment, subject.topology, subject.engines)


def _asker(subject: Subject, arm: Arm) -> Callable[[LiveTask], Ask]:
    def workflow(task: LiveTask) -> Ask:
        name = workflow_name(subject.experiment.name, task.sim, arm)
        body: dict[str, object] = {"inputs": dict(task.inputs), "stream": True}
        if task.sim.tpot_target_s < inf:
            body["tpot_ms"] = 1000 * task.sim.tpot_target_s
        return Ask(f"/v1/tasks/{name}", body)

    def completion(task: LiveTask) -> Ask:
        mix = subject.experiment.mix
        assert mix is not None, "only a real engine has such arms"
        model = pool_named(subject.topology, mix.pool).model.name
        (prompt,) = task.inputs.values()
        body = mix.completion(task.sim, prompt, model) | {"stream": True}
        return Ask(arm.completions, body, is_plain=True)

    return completion if arm.completions else workflow


async def _warm_up(
    subject: Subject,
    stage: Configurable,
    settings: Settings,
    progress: Progress,
    client: TaskClient,
    make: _Make,
) -> None:
    """Tasks of an otherwise unused seed teach lengths and service times; they are not counted."""
    workload = next(iter(subject.experiment.workloads))
    sim = subject.sim_tasks(workload, WARM_UP_SEED, settings, settings.warm_up)
    progress.begin("warm-up: prompts", len(sim))
    tasks = await make(sim, WARM_UP_SEED, progress.step)
    ways: dict[tuple[str, str], Arm] = {}
    for arm in subject.experiment.arms:
        ways.setdefault((arm.suffix, arm.completions), arm)
    for (suffix, completions), arm in ways.items():
        some = tasks[:SERVE_WARM_UPS] if suffix or completions else tasks
        await asyncio.to_thread(stage.configure, arm)
        progress.begin(f"warm-up of {arm.name}", len(some))
        seen = await client.all_of(some, _asker(subject, arm), subject.slots, progress.step)
        problem = next((s.problem for s in seen if s.problem), "")
        if problem:
            raise BenchError(f"a warm-up task was lost: {problem}")
    await asyncio.sleep(LEARN_S)


@asynccontextmanager
async def cpu_load() -> AsyncGenerator[CpuLoad, None]:
    """The load while the block runs; complete when it has ended."""
    load = CpuLoad()

    async def sample() -> None:
        psutil.cpu_percent(None)
        while True:
            await asyncio.sleep(CPU_EVERY_S)
            load.samples.append(psutil.cpu_percent(None) / 100)

    sampler = asyncio.get_running_loop().create_task(sample())
    started_s, used_s = time.perf_counter(), sum(cpu_s().values())
    try:
        yield load
    finally:
        used_s = sum(cpu_s().values()) - used_s
        load.own = used_s / (time.perf_counter() - started_s) / (psutil.cpu_count() or 1)
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
