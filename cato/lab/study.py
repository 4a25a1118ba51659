"""What a study is, and the one harness that runs it in virtual time.

A study is a value: cells (a workload on a fleet), arms (schedulers by name), and a function from
samples to targets. `as_experiment` gives it the form that `cato simulate` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cato.core.errors import UnknownNameError
from cato.core.policies import Policies
from cato.policies import schedulers
from cato.sim.experiment import Experiment, Options, Progress, run_all
from cato.sim.experiments.common import measured
from cato.sim.fleet import PoolSetup
from cato.sim.report import Report, Sample, Setting, Target, compare, summarize
from cato.sim.tasks import SimTask

COMPARED = ("slo_attainment", "ttft_s_p95")


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload on a fleet. `fleet` has the policies of no arm yet."""

    setting: Setting
    fleet: PoolSetup
    tasks: Callable[[int], Sequence[SimTask]]

    def with_policies(self, scheduler: str) -> PoolSetup:
        profile = self.fleet.profiles[0]
        make = schedulers.OF_PROFILE[scheduler]
        return replace(self.fleet, policies=make(profile, profile.max_running))


NO_POLICIES: Policies = schedulers.ray_serve()
"""Of a cell's fleet, until an arm gives it its own."""


@dataclass(frozen=True, slots=True)
class Study:
    """`cells(quick)`: all that is measured, or a part that takes minutes."""

    name: str
    title: str
    source: str
    arms: tuple[str, ...]
    cells: Callable[[bool], Sequence[Cell]]
    targets: Callable[[Sequence[Sample]], Sequence[Target]]
    plot: Callable[[Report, Path], Sequence[Path]]
    headlines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Job:
    study: str
    quick: bool
    cell: int
    arm: str
    seed: int


def _run(job: _Job) -> Sample:
    from cato.lab.registry import study

    cell = study(job.study).cells(job.quick)[job.cell]
    metrics = measured([cell.with_policies(job.arm)], cell.tasks(job.seed))
    return Sample(cell.setting, job.arm, job.seed, metrics)


def as_experiment(study: Study) -> Experiment:
    """The study under the same name; `--policy` chooses among its arms."""

    def run(options: Options, progress: Progress) -> Report:
        for name in options.policies:
            if name not in study.arms:
                raise UnknownNameError("policy", name, study.arms)
        arms = [a for a in study.arms if not options.policies or a in options.policies]
        jobs = [
            _Job(study.name, options.quick, cell, arm, seed)
            for cell in range(len(study.cells(options.quick)))
            for seed in options.seeds
            for arm in arms
        ]
        samples = run_all(_run, jobs, progress, options.jobs)
        return Report(
            study.name,
            options.seeds,
            summarize(samples),
            compare(samples, schedulers.FORESIGHT, COMPARED),
            tuple(study.targets(samples)),
        )

    return Experiment(study.name, study.title, study.source, run, study.plot, study.headlines)
