"""Defines studies, and the harness that runs them in virtual time.

A study is a value: cells (a workload on a fleet), arms (schedulers by name), and a function from
samples to targets. `as_experiment` converts it to the form that `cato simulate` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from cato.core.errors import UnknownNameError
from cato.core.policies import Policies
from cato.core.profile import Profile
from cato.lab.experiments.common import measured
from cato.policies import schedulers
from cato.sim.experiment import Experiment, Interrupted, Options, Progress, run_all
from cato.sim.fleet import PoolSetup
from cato.sim.metrics import NAMES
from cato.sim.report import Mean, Report, Sample, Setting, Target, compare, summarize
from cato.sim.tasks import SimTask

COMPARED = ("slo_attainment", "ttft_s_p95")


class Measurable(Protocol):
    """What a study measures in one setting; `arms` that run there (empty: all of the study)."""

    @property
    def setting(self) -> Setting: ...
    @property
    def arms(self) -> tuple[str, ...]: ...

    def sample(self, arm: str, seed: int) -> Sample: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Metrics, and what `Sample.further` keeps of the run."""

    metrics: Mapping[str, float]
    further: Any


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting without a fleet: `measure` gets the name of the arm and the seed."""

    setting: Setting
    measure: Callable[[str, int], Mapping[str, float] | Measured]
    arms: tuple[str, ...] = ()

    def sample(self, arm: str, seed: int) -> Sample:
        found = self.measure(arm, seed)
        if isinstance(found, Measured):
            return Sample(self.setting, arm, seed, found.metrics, found.further)
        return Sample(self.setting, arm, seed, found)


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload on a fleet. `fleet` has no arm's policies yet.

    `measure`: runs the workload of a seed on the fleet with an arm's policies. `arms`: those that
    run there, besides the default (empty: all of the study). `schedulers`: policies by arm name.
    """

    setting: Setting
    fleet: PoolSetup
    measure: Callable[[PoolSetup, int], Mapping[str, float]]
    arms: tuple[str, ...] = ()
    schedulers: Mapping[str, Callable[[Profile, int], Policies]] = field(
        default_factory=lambda: schedulers.OF_PROFILE
    )

    def with_policies(self, scheduler: str) -> PoolSetup:
        """The fleet with an arm's policies, made for the profile that the router believes."""
        profile = self.fleet.profiles[0].slowed(self.fleet.believed_slowness)
        make = self.schedulers[scheduler]
        places = self.fleet.max_running or profile.max_running
        return replace(self.fleet, policies=make(profile, places))

    def sample(self, arm: str, seed: int) -> Sample:
        return Sample(self.setting, arm, seed, self.measure(self.with_policies(arm), seed))


def arriving(
    tasks: Callable[[int], Sequence[SimTask]],
) -> Callable[[PoolSetup, int], Mapping[str, float]]:
    """Tasks with fixed arrivals, independent of the others' outcomes."""
    return partial(_measure_arriving, tasks)


def _measure_arriving(
    tasks: Callable[[int], Sequence[SimTask]], fleet: PoolSetup, seed: int
) -> Mapping[str, float]:
    return measured([fleet], tasks(seed))


NO_POLICIES: Policies = schedulers.ray_serve()
"""Policies of a cell's fleet before an arm sets its own."""


def no_targets(samples: Sequence[Sample]) -> Sequence[Target]:
    return ()


def _nothing(options: Options, samples: Sequence[Sample]) -> Mapping[str, object]:
    return {}


def _accept(options: Options) -> None:
    """For studies that read no file."""


def chosen_arms(study: Study, options: Options) -> list[str]:
    """The arms asked for, or the default ones; raise `UnknownNameError`."""
    for name in options.policies:
        if name not in study.arms:
            raise UnknownNameError(study.called, name, study.arms)
    usual = study.quick_arms if options.quick and study.quick_arms else study.arms
    return [a for a in study.arms if a in (options.policies or usual)]


def all_compared(study: Study, options: Options, progress: Progress) -> Report:
    """Every arm in every cell with every seed. Of a run that its user ended: the cells and seeds of
    which all arms are done, without targets."""
    chosen = chosen_arms(study, options)
    jobs = [
        _Job(study.name, options, cell, arm, seed)
        for cell, found in enumerate(study.cells(options))
        for seed in options.seeds
        for arm in chosen
        if not (arms := found.arms) or arm in (study.reference, *arms)
        if arm not in study.unseeded or seed == options.seeds[0]
    ]
    try:
        samples = run_all(_run, jobs, progress, options.jobs)
    except Interrupted as stop:
        samples = stop.whole([(job.cell, job.seed) for job in jobs])
        seeds = tuple(s for s in options.seeds if s in {x.seed for x in samples})
        means, compared = study.means(samples), compare(samples, study.reference, study.compared)
        return Report(study.name, seeds, tuple(means), compared, extra=stop.told())
    return Report(
        study.name,
        options.seeds,
        tuple(study.means(samples)),
        compare(samples, study.reference, study.compared),
        tuple(study.targets(samples)),
        study.extra(options, samples),
    )


@dataclass(frozen=True, slots=True)
class Study:
    """`cells`: what is measured for given options (quick: a part that takes minutes), without seeds
    and arms. `compared`: metrics for which differences between the `reference` and the other arms
    are reported. `means`: the report's rows. `extra`: further data for plots. `quick_seeds`: number
    of seeds when quick (0: all). `run`: replaces the loop over arms, cells and seeds. `unseeded`:
    arms that run with the first seed alone. `called`: an arm, in an error. `takes` and `metrics`:
    as `Experiment` has them; by default the metrics of every run on a fleet. `check`: reads the
    files that a run will read; raises `InputError`.
    """

    name: str
    title: str
    source: str
    arms: tuple[str, ...]
    cells: Callable[[Options], Sequence[Measurable]]
    targets: Callable[[Sequence[Sample]], Sequence[Target]]
    plot: Callable[[Report, Path], Sequence[Path]]
    headlines: tuple[str, ...] = ()
    compared: tuple[str, ...] = COMPARED
    means: Callable[[Sequence[Sample]], Sequence[Mean]] = summarize
    extra: Callable[[Options, Sequence[Sample]], Mapping[str, object]] = _nothing
    quick_arms: tuple[str, ...] = ()
    quick_seeds: int = 0
    run: Callable[[Study, Options, Progress], Report] = all_compared
    reference: str = schedulers.FORESIGHT
    unseeded: tuple[str, ...] = ()
    called: str = "policy"
    takes: tuple[str, ...] = ()
    metrics: tuple[str, ...] = NAMES
    check: Callable[[Options], object] = _accept


@dataclass(frozen=True, slots=True)
class _Job:
    study: str
    options: Options
    cell: int
    arm: str
    seed: int


def _run(job: _Job) -> Sample:
    from cato.lab.registry import study

    return study(job.study).cells(job.options)[job.cell].sample(job.arm, job.seed)


def as_experiment(study: Study) -> Experiment:
    """The study as an experiment of the same name; `--policy` selects arms."""

    def run(options: Options, progress: Progress) -> Report:
        if options.quick and study.quick_seeds:
            options = replace(options, seeds=options.seeds[: study.quick_seeds])
        study.check(options)
        return study.run(study, options, progress)

    return Experiment(
        study.name,
        study.title,
        study.source,
        run,
        study.plot,
        study.metrics,
        study.headlines,
        study.takes,
    )
