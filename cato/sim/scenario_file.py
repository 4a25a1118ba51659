"""Reads scenario files, with the profiles, traces and workflows that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from math import inf
from pathlib import Path

from pydantic import ValidationError

from cato.config.paths import resolve
from cato.config.problems import validate
from cato.config.yaml_file import read_yaml
from cato.core.errors import ConfigError, InputError, Problem
from cato.core.ids import PoolName, TaskName
from cato.core.profile import Profile
from cato.core.words import counted, did_you_mean
from cato.core.workflow import Workflow
from cato.profiles.load import load_profile
from cato.sim.scenario import DrawnTraffic, Scenario, ScenarioPool, TraceClass, TraceTraffic
from cato.sim.scenario_schema import (
    DEFAULT_MAX_REPLICAS,
    DEFAULT_SCHEDULER,
    LEAST_TASKS,
    ScenarioFile,
    default_classes,
)
from cato.sim.task_schema import MAX_DURATION_S, TaskPart, workflow_problems
from cato.sim.tempo_workload import TEMPO_ENGINE
from cato.sim.traces import TraceRow, load_azure
from cato.sim.workflow_estimates import with_estimates
from cato.sim.workloads import SABER_ENGINE, SEVEN_B
from cato.workflows.load import load_workflow

CONSTANTS: Mapping[str, Profile] = {"7b": SEVEN_B, "saber": SABER_ENGINE, "tempo": TEMPO_ENGINE}
"""Built-in profiles without a file: the reference constants of the experiments."""


def example_text() -> str:
    """A scenario to start from."""
    return (resources.files("cato.sim") / "examples" / "small-fleet.yaml").read_text("utf-8")


def load_scenario(path: Path) -> Scenario:
    """Read and check the file, its profiles and its trace; raise `ConfigError` with all problems.

    Profiles, traces and workflows are looked up beside the file first, then as all paths
    (`resolve`).
    """
    raw = read_yaml(path)
    problems: list[Problem] = []
    file: ScenarioFile | None = None
    try:
        file = validate(ScenarioFile, raw, str(path))
    except ConfigError as exc:
        problems += exc.problems
    profiles: dict[str, Profile] = {}
    for pool, at, name in _profiles_named(raw):
        try:
            profiles[pool] = named_profile(name, path.parent)
        except ConfigError as exc:
            problems += [
                p if p.path else Problem(str(path), at, repr(name), p.rule) for p in exc.problems
            ]
    rows: tuple[TraceRow, ...] = ()
    trace = _trace_named(raw)
    if trace is not None:
        try:
            rows = load_azure(_found(trace, path.parent))
            if len(rows) < 2 * LEAST_TASKS:
                raise InputError(f"needs at least {2 * LEAST_TASKS} requests, has {len(rows)}")
        except (ConfigError, InputError) as exc:
            words = exc.problems[0].rule if isinstance(exc, ConfigError) else str(exc)
            problems.append(Problem(str(path), "traffic.trace", repr(trace), words))
    workflows: dict[str, Workflow] = {}
    for name, data in _workflow_tasks(raw):
        try:
            workflows[name] = _workflow(data, path, f"traffic.tasks.{name}")
        except ConfigError as exc:
            problems += exc.problems
    if file is not None and len(rows) >= 2 * LEAST_TASKS:
        problems += _cut_short(str(path), file, rows)
    if problems or file is None:
        raise ConfigError(tuple(problems))
    return _scenario(file, profiles, rows, workflows)


def _cut_short(file: str, scenario: ScenarioFile, rows: Sequence[TraceRow]) -> Iterator[Problem]:
    """A duration in which too few requests of the trace's second half are replayed."""
    replayed = rows[len(rows) // 2 :]
    end_s = replayed[0].arrived_at_s + scenario.duration * scenario.traffic.speed
    tasks = sum(row.arrived_at_s < end_s for row in replayed)
    if tasks < LEAST_TASKS:
        rule = (
            f"{counted(tasks, 'request')} of the trace in {scenario.duration:g} s; change it or "
            f"`traffic.speed` so that there are at least {LEAST_TASKS}"
        )
        yield Problem(file, "duration", "", rule)


def trace_scenario(
    trace: Path,
    profile: str,
    *,
    speed: float = 1.0,
    duration_s: float = MAX_DURATION_S,
    max_replicas: int = DEFAULT_MAX_REPLICAS,
    max_running: int | None = None,
    chunk_tokens: int | None = None,
) -> Scenario:
    """A recorded trace on one pool of replicas of `profile`, with a scenario file's defaults.

    Two seeds suffice: arrivals and lengths are the trace's, so only the policies' draws differ.
    Raise `ConfigError` for an unreadable profile and `InputError` for an unreadable trace.
    """
    rows = load_azure(trace)
    if len(rows) < 2 * LEAST_TASKS:
        raise InputError(f"{trace} needs at least {2 * LEAST_TASKS} requests, has {len(rows)}")
    classes = tuple(
        TraceClass(TaskName(name), float(c.up_to_tokens or inf), c.sla.to_sla())
        for name, c in default_classes().items()
    )
    pool = PoolName(profile)
    replicas = ScenarioPool(
        pool, named_profile(profile, Path()), 1, max_replicas, max_running, chunk_tokens
    )
    traffic = TraceTraffic(rows, pool, speed, duration_s, classes)
    return Scenario(trace.stem, DEFAULT_SCHEDULER, (0, 1), (replicas,), traffic)


def _profiles_named(raw: object) -> Iterator[tuple[str, str, str]]:
    """Pool, place and name of every profile; other parts of the data may be invalid."""
    pools = raw.get("pools") if isinstance(raw, dict) else None
    for pool, part in pools.items() if isinstance(pools, dict) else ():
        name = part.get("profile") if isinstance(part, dict) else None
        if isinstance(name, str) and name:
            yield pool, f"pools.{pool}.profile", name


def _trace_named(raw: object) -> str | None:
    traffic = raw.get("traffic") if isinstance(raw, dict) else None
    trace = traffic.get("trace") if isinstance(traffic, dict) else None
    return trace if isinstance(trace, str) and trace else None


def _workflow_tasks(raw: object) -> Iterator[tuple[str, dict[str, object]]]:
    """Every task class that names a workflow; other parts of the data may be invalid."""
    traffic = raw.get("traffic") if isinstance(raw, dict) else None
    tasks = traffic.get("tasks") if isinstance(traffic, dict) else None
    for name, part in tasks.items() if isinstance(tasks, dict) else ():
        named = part.get("workflow") if isinstance(part, dict) else None
        if isinstance(named, str) and named:
            yield name, part


def _workflow(data: Mapping[str, object], path: Path, at: str) -> Workflow:
    """The workflow of the task class `data`; raise `ConfigError` when it cannot be read or does not
    fit the class.
    """
    name = str(data["workflow"])
    try:
        found = _found(name, path.parent)
    except ConfigError as exc:
        rule = f"{exc.problems[0].rule}; a path is relative to the scenario's folder"
        problem = Problem(str(path), f"{at}.workflow", repr(name), rule)
        raise ConfigError((problem,)) from exc
    workflow = load_workflow(found)
    try:
        task = TaskPart.model_validate(data)
    except ValidationError:
        return workflow  # reported with the whole file
    problems = tuple(
        Problem(str(path), ".".join((at, *map(str, loc))), str(value), rule)
        for loc, value, rule in workflow_problems(task, workflow)
    )
    if problems:
        raise ConfigError(problems)
    return workflow


def named_profile(name: str, folder: Path) -> Profile:
    """A constant, a file, or a name of `profiles/`; raise `ConfigError`."""
    if name in CONSTANTS:
        return CONSTANTS[name]
    if name.endswith(".yaml"):
        return load_profile(_found(name, folder))
    try:
        return load_profile(_found(f"profiles/{name}.yaml", folder))
    except ConfigError as exc:
        if any(p.path for p in exc.problems):
            raise  # it exists but is invalid
        constants = ", ".join(CONSTANTS)
        rule = f"no profiles/{name}.yaml, and none of the constants {constants}"
        raise ConfigError((Problem(name, "", "", rule + _like(name)),)) from exc


def _like(name: str) -> str:
    try:
        known = [p.stem for p in resolve("profiles").glob("*.yaml")]
    except ConfigError:
        known = []
    return did_you_mean(name, [*known, *CONSTANTS])


def _found(name: str, folder: Path) -> Path:
    with suppress(OSError, RuntimeError, ValueError):  # no such user; `resolve` says so
        beside = folder / Path(name).expanduser()
        if beside.is_file():
            return beside
    return resolve(name)


def _scenario(
    file: ScenarioFile,
    profiles: Mapping[str, Profile],
    rows: tuple[TraceRow, ...],
    workflows: Mapping[str, Workflow],
) -> Scenario:
    traffic, duration_s = file.traffic, file.duration
    drawn: DrawnTraffic | TraceTraffic
    if traffic.trace is not None and traffic.pool is not None:
        classes = tuple(
            TraceClass(TaskName(name), float(c.up_to_tokens or inf), c.sla.to_sla())
            for name, c in traffic.classes.items()
        )
        drawn = TraceTraffic(rows, PoolName(traffic.pool), traffic.speed, duration_s, classes)
    else:
        assert traffic.rate_per_s is not None, "checked with the file"
        of_pools = {PoolName(name): profile for name, profile in profiles.items()}
        kinds = tuple(
            with_estimates(task.to_workflow_class(name, workflows[name]), of_pools)
            if name in workflows
            else task.to_class(name)
            for name, task in traffic.tasks.items()
        )
        drawn = DrawnTraffic(traffic.rate_per_s, traffic.arrivals, duration_s, kinds)
    pools = tuple(
        ScenarioPool(
            PoolName(name),
            profiles[name],
            p.replicas,
            p.max_replicas,
            p.max_running,
            p.chunk_tokens,
            p.cold_start,
        )
        for name, p in file.pools.items()
    )
    return Scenario(file.name, file.scheduler, file.seeds, pools, drawn)
