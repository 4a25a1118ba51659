"""`cato bench`: measurements of CATO itself on this machine."""

from __future__ import annotations

import asyncio
import datetime
import importlib.util
import platform
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cato.cli.bars import Counting
from cato.cli.bench_accelerator import accelerator
from cato.cli.bench_live import live
from cato.cli.client import ends_on
from cato.cli.measuring import (
    command_line,
    console,
    live_facts,
    measuring,
    shown,
    vllm_version,
    write,
)
from cato.cli.outputs import JsonFile
from cato.cli.simulation import print_whole, targets_table
from cato.core.errors import CatoError

app = typer.Typer(no_args_is_help=True, add_completion=False)

ENGINES = ("simulated", "vllm")
ACCELERATORS = ("cpu", "gpu", "npu")


@app.callback()
def _bench() -> None:
    """Measure CATO itself on this machine."""


@app.command()
def overhead(
    engine: Annotated[
        str, typer.Option(help="simulated (zero-cost tokens), vllm (the demo model), or all.")
    ] = "all",
    requests: Annotated[
        int, typer.Option(min=1, help="Requests per arm and round; at least 4 per stream.")
    ] = 25,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the arms alternate in each.")] = 24,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests; repeat for several.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Output tokens per request.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of prompts and confidence intervals.")] = 0,
    json_file: JsonFile = None,
    transport: Annotated[bool, typer.Option(help="HAProxy and gRPC, as in `cato serve`.")] = True,
    accelerator: Annotated[
        str, typer.Option(help="Where vLLM runs: cpu, gpu or npu (one accelerator).")
    ] = "cpu",
    profile: Annotated[
        str | None, typer.Option(help="Profile of the vLLM engine.", show_default="demo-coder@cpu")
    ] = None,
) -> None:
    """Overhead per call: the engine's own server, plain Ray Serve in front of it, and CATO.

    Starts and stops its own Ray on loopback. The arms alternate; differences have 95 %
    confidence intervals. Run it on a quiet machine.
    """
    command = command_line()
    engines = _engines(engine)
    if accelerator not in ACCELERATORS:
        raise typer.BadParameter(f"{accelerator!r} is not one of {', '.join(ACCELERATORS)}")
    with measuring(transport=transport):
        from cato.lab.bench.overhead import Settings

        settings = Settings(engines, requests, rounds, tuple(concurrency or (1, 8)), tokens, seed)
        place = (accelerator, profile)
        report = _measure(settings, place, command, transport=transport)
    from cato.lab.bench.report import tables

    console.print(tables(report))
    write(json_file, report)


@app.command()
def telemetry(
    rounds: Annotated[
        int, typer.Option(min=2, help="Rounds of ten requests per arm; the arms alternate.")
    ] = 120,
    seed: Annotated[int, typer.Option(help="Seed of prompts and confidence intervals.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Latency that traces and logs add to a call: an ingress with both against one without.

    Simulated engine, one call at a time, traces sent to a collector on loopback. Starts and stops
    its own Ray. Run it on a quiet machine.
    """
    command = command_line()
    with measuring():
        from cato.lab.bench.telemetry import Settings, measure

        with shown() as (bar, say):
            found = measure(Settings(rounds, seed), say, bar)
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
    write(json_file, {**live_facts(), **found})


@app.command()
def core(
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, help="Replicas of the pool; repeat for several.")
    ] = None,
    queued: Annotated[int, typer.Option(min=1, help="Queued invocations.")] = 10_000,
    events: Annotated[int, typer.Option(min=10, help="Timed events of each kind.")] = 300,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded requests, to check length bounds and DAG matches.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Cost of decisions: routing, length bounds, batch mapping, DAG matches, the simulator.

    One thread, without Ray or an engine; takes a minute. Times are CPU time, not wall-clock time.
    --trace also checks the length bounds on the trace's later half and reports each target.
    """
    from cato.cli.profile import machine
    from cato.lab.bench import core as bench

    with Counting(Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        with ends_on(CatoError, OSError):
            report = bench.measure(
                progress,
                replicas=tuple(replicas or bench.REPLICAS),
                queued=queued,
                events=events,
                trace=trace,
            )
    console.print(bench.tables(report, queued))
    if report.targets:
        print_whole(console, targets_table(report.targets))
    if json_file is not None:
        facts = {
            "command": command_line(),
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "python": platform.python_version(),
        }
        write(json_file, bench.as_json(report, facts))


app.command()(live)


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
    json_file: JsonFile = None,
) -> None:
    """Schedulers inside an engine: streams beside three long prompts, then short prompts.

    Without Ray. Each arm runs in its own engine, one after the other. Takes two minutes; run it on
    a quiet machine.
    """
    command = command_line()
    with measuring() as folder:
        from cato.lab.bench import schedulers
        from cato.lab.bench.report import machine_facts

        with shown() as (bar, _):
            found = schedulers.measure(kind, rounds, seed, folder, bar, tuple(arm or ()))
        facts = machine_facts() | {"vllm": vllm_version()}
    console.print(schedulers.table(found))
    write(json_file, {"command": command, **facts, **found})


app.command()(accelerator)


def _measure(
    settings: object, place: tuple[str, str | None], command: str, *, transport: bool
) -> dict[str, object]:
    from cato.lab.bench.overhead import ARMS, Settings, Stage, frames_of, measure
    from cato.lab.bench.report import as_json, machine_facts

    assert isinstance(settings, Settings)
    facts = machine_facts() | {
        "vllm": vllm_version(),
        "transport": "HAProxy and gRPC" if transport else "Serve's defaults",
    }
    results = []
    with console.status("") as status, Stage(settings.engines, status.update, *place) as stage:
        status.stop()
        blocks = len(settings.engines) * settings.rounds * (len(ARMS) + 1)
        requests = blocks * sum(map(settings.block, settings.concurrencies))
        with Counting(console) as bar:
            task = bar.add_task("warming up", total=requests)

            def progress(what: str, requests: int) -> None:
                bar.update(task, advance=requests, description=what)

            for engine in settings.engines:
                for concurrency in settings.concurrencies:
                    places, frames = stage.places[engine], frames_of(engine, f"bench-{engine}")
                    run = measure(
                        engine, concurrency, places, stage.url, settings, progress, frames
                    )
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
