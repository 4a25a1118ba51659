"""One live benchmark from its options to its report.

Importing this module imports Ray, which then reads its settings: set the environment first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cato.config.deploy_file import DeployFile, load_deploy_file
from cato.config.paths import resolve
from cato.core.errors import UnknownNameError
from cato.core.profile import Profile
from cato.core.topology import DeploymentSpec
from cato.lab.bench.deployment import file_on_accelerator
from cato.lab.live.experiment import WARM_UP_SEED, LiveExperiment, scaled_profile
from cato.lab.live.experiments import live_experiment, mix_of
from cato.lab.live.report import as_json
from cato.lab.live.rounds import (
    Configurable,
    Progress,
    Run,
    Settings,
    Subject,
    measure,
    whole_rounds,
)
from cato.lab.live.session_rounds import measure_sessions
from cato.lab.live.stage import OwnStage, RunningStage, Stage
from cato.lab.live.workflows import workflows, write
from cato.profiles.load import load_profile_file, load_profiles, save_profile
from cato.profiles.schema import Provenance

# Replicas of a fixed fleet start once, before the measurement.
QUICK_LOAD_S = 0.2
# Part of a cold start that Serve takes to start a replica's process.
PROCESS_S = 2.0


@dataclass(frozen=True, slots=True)
class Options:
    """User options; None and empty: the experiment's defaults.

    `deployment` is the path of a file, or its content. `has_one_engine`: no arm gets an additional
    engine of its own.
    """

    experiment: str
    deployment: str | DeployFile | None = None
    workloads: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    tasks: int | None = None
    slowdown: float | None = None
    warm_up: int | None = None
    trace: Path | None = None
    address: str | None = None
    accelerator: str | None = None
    profile: str | None = None
    has_one_engine: bool = False


class Session:
    """A benchmark that is checked before anything starts. May raise any `CatoError`."""

    def __init__(self, options: Options) -> None:
        experiment = live_experiment(options.experiment, options.trace)
        file = options.deployment or experiment.deployment
        self.deploy: DeployFile = file_on_accelerator(
            file if isinstance(file, DeployFile) else load_deploy_file(file),
            options.accelerator,
            options.profile,
        )
        self._folder = resolve(self.deploy.topology.profiles_dir)
        profiles = load_profiles(self._folder)
        if experiment.is_real:
            pool = self.deploy.topology.pools[0]
            experiment = mix_of(pool, _profile_of(pool.deployments[0], profiles))
        chosen = experiment.chosen(options.workloads, options.arms)
        # `ray.serve.llm` needs an application of our own to run beside.
        if options.address is not None or options.has_one_engine:
            chosen = replace(chosen, arms=tuple(a for a in chosen.arms if not a.completions))
        self.experiment: LiveExperiment = chosen
        self.settings = Settings(
            options.seeds,
            options.tasks or experiment.tasks,
            options.slowdown or experiment.slowdown,
            options.warm_up or experiment.warm_up,
        )
        self._address = options.address
        cold_start_s = experiment.cold_start_s
        load_s = QUICK_LOAD_S if cold_start_s is None else cold_start_s - PROCESS_S
        self._by_name = {
            name: profile
            if experiment.is_real
            else scaled_profile(profile, self.settings.slowdown, load_s)
            for name, profile in profiles.items()
        }
        pools = self.deploy.topology.pools
        engines = {d.name: _profile_of(d, self._by_name) for p in pools for d in p.deployments}
        self.subject = Subject(self.experiment, self.deploy.topology, engines)
        self.workflows = self._workflows()

    def _workflows(self) -> dict[str, dict[str, Any]]:
        """Workflows of the classes of all seeds; turns of sessions have none."""
        tasks = [
            task
            for workload in self.experiment.workloads
            for seed in (*self.settings.seeds, WARM_UP_SEED)
            for task in self.subject.sim_tasks(
                workload, seed, self.settings, max(self.settings.tasks, self.settings.warm_up)
            )
        ]
        return workflows(self.experiment, tasks, self.deploy.topology)

    def export(self, folder: Path) -> None:
        """Write `workflows/` and `profiles/`, for an application that is started separately."""
        write(folder / "workflows", self.workflows)
        for name, profile in self._by_name.items():
            path = self._folder / f"{name}.yaml"
            provenance = load_profile_file(path).provenance
            if not self.experiment.is_real:
                note = f"times of {path.name} x {self.settings.slowdown:g}"
                provenance = Provenance(simulated=True, note=note)
            save_profile(folder / "profiles" / path.name, profile, provenance)

    def run(
        self,
        folder: Path,
        progress: Progress,
        say: Callable[[str], None],
        facts: Callable[[], Mapping[str, object]],
        command: str,
    ) -> dict[str, Any]:
        """Measure; `folder` is for generated files. Returns the report.

        After an interruption the report covers the complete rounds; if there are none, the
        interruption is raised again.
        """
        about = dict(facts())  # the machine's load before the measurement
        with self.stage(folder, say) as stage:
            return self.run_on(stage, progress, about, command)

    def run_on(
        self,
        stage: Configurable,
        progress: Progress,
        about: Mapping[str, object],
        command: str,
    ) -> dict[str, Any]:
        """`run` on a stage with the experiment's workflows; `about`: facts about the machine."""
        runs: list[Run] = []
        try:
            measured = measure if self.experiment.sessions is None else measure_sessions
            asyncio.run(measured(self.subject, stage, self.settings, progress, runs))
        except KeyboardInterrupt:
            if not whole_rounds(runs, self.experiment):
                raise
        seeds = whole_rounds(runs, self.experiment)
        settings = replace(self.settings, seeds=seeds)
        runs = [run for run in runs if run.seed in seeds]
        where = self._address or self.deploy.path.name
        return as_json(runs, self.subject, settings, about, command, where)

    def stage(self, folder: Path, say: Callable[[str], None]) -> Stage:
        """The stage for the experiment, not started."""
        if self._address is not None:
            return RunningStage(self.deploy, self._address, self.workflows, say)
        self.export(folder)
        has_serve_llm = any(arm.completions for arm in self.experiment.arms)
        return OwnStage(
            self.deploy,
            folder,
            say,
            has_serve_llm=has_serve_llm,
            others=self.experiment.others,
        )


def _profile_of(deployment: DeploymentSpec, profiles: Mapping[str, Profile]) -> Profile:
    """The profile that its engine keeps; raise `UnknownNameError`."""
    name = deployment.engine.profile or deployment.profile or ""
    if name not in profiles:
        raise UnknownNameError("profile", name, tuple(profiles))
    return profiles[name]
