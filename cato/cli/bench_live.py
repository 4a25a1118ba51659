"""`cato bench live`: experiments of the simulator on live engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cato.cli.measuring import command_line, console, live_facts, measuring, shown, write
from cato.cli.outputs import JsonFile, Plots, write_plots
from cato.cli.simulation import SEEDS_HELP, seeds_of
from cato.core.errors import InputError

CACE = "cace"
# Not the seeds on which constants were chosen.
LIVE_SEEDS = "100-101"
LiveExperiment = Annotated[
    str,
    typer.Argument(
        help="cato-rq1, cato-rq2, saber, slo-sa, tempo, coding-mixes, coding-scaling, "
        "azure-replay, vllm-mix, mixed, completions, agents, cace."
    ),
]
DeploymentFile = Annotated[
    str | None,
    typer.Option(help="A deployment file.", show_default="deployments/bench/EXPERIMENT.yaml"),
]
Tasks = Annotated[
    int | None,
    typer.Option(min=1, help="Tasks per run; for agents: users.", show_default="the experiment's"),
]
Slowdown = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        help="Multiply every time by this, for machines too slow for the token rate.",
        show_default="the experiment's",
    ),
]
WarmUp = Annotated[
    int | None,
    typer.Option(
        min=20,
        help="Tasks that train the Profiler before measurement starts.",
        show_default="the experiment's",
    ),
]
Trace = Annotated[
    Path | None, typer.Option(help="Recorded arrivals for azure-replay, or sessions for agents.")
]
OtherAccelerator = Annotated[
    str | None,
    typer.Option(
        help="Run a file with vLLM on a CPU on one accelerator instead: gpu or npu.",
        show_default="the file's",
    ),
]
OtherProfile = Annotated[
    str | None, typer.Option(help="Profile of the engines.", show_default="the file's")
]
Address = Annotated[
    str | None,
    typer.Option(help="URL of an application already running on this host's Ray; see --export."),
]


def live(
    experiment: LiveExperiment,
    deployment: DeploymentFile = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this workload; repeat for several.")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Only this arm; repeat for several.")
    ] = None,
    seeds: Annotated[str, typer.Option(help=f"One round per seed. {SEEDS_HELP}")] = LIVE_SEEDS,
    tasks: Tasks = None,
    slowdown: Slowdown = None,
    warm_up: WarmUp = None,
    trace: Trace = None,
    accelerator: OtherAccelerator = None,
    profile: OtherProfile = None,
    address: Address = None,
    export: Annotated[
        Path | None, typer.Option(help="Write its workflows and profiles to this folder and exit.")
    ] = None,
    json_file: JsonFile = None,
    plot: Plots = None,
) -> None:
    """Run a simulator experiment on live engines: Ray, HTTP and the same tasks.

    Starts and stops its own Ray on loopback. Schedulers are switched at run time and alternate
    (A B, B A, ...). Each gets the same tasks, and the report also shows what `cato simulate`
    predicts for them. Run it on a quiet machine.
    """
    command = command_line()
    with measuring() as folder:
        if experiment == CACE:
            _check_unused(
                deployment=deployment, warm_up=warm_up, trace=trace, address=address,
                export=export, plot=plot, accelerator=accelerator, profile=profile,
            )  # fmt: skip
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
        with shown() as (bar, say):
            report = session.run(folder, bar, say, live_facts, command)
    _show_live(report, json_file, plot)


def _check_unused(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{CACE} sets this itself: leave out {option}")


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
    from cato.lab.live import cace, cace_cases, cace_report

    usual = cace_cases.Settings()
    settings = cace_cases.Settings(
        seeds, tasks or usual.tasks, slowdown or usual.slowdown, workloads or usual.workloads, arms
    )
    with shown() as (bar, say):
        report = cace.run(settings, folder, bar, say, live_facts(), command)
    console.print(cace_report.tables(report))
    if json_file is not None:
        cace_report.save(report, json_file)
        console.print(f"Wrote {json_file}.", highlight=False, markup=False)


def _show_live(report: dict[str, Any], json_file: Path | None, plot: Path | None) -> None:
    from cato.lab.live.plots import pictures
    from cato.lab.live.report import tables

    console.print(tables(report))
    write(json_file, report)
    if plot is not None:
        write_plots(console, plot, partial(pictures, report))
