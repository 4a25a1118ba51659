"""`cato simulate`: experiments and scenarios in virtual time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cato.cli.client import ends_on
from cato.cli.interrupts import end_like_ctrl_c
from cato.cli.outputs import writable_file, writable_folder, write_plots, write_text
from cato.cli.simulation import (
    SEEDS_HELP,
    a_table,
    all_finite,
    check_metrics,
    metrics_in,
    print_whole,
    progress_bar,
    scenario_of,
    seeds_of,
    tables,
)
from cato.core.errors import CatoError
from cato.sim.experiment import INTERRUPTED, Experiment, Options
from cato.sim.report import Report

# Enough for a first look, in a minute; the constants were chosen on these seeds.
DEFAULT_SEEDS = tuple(range(10))

# As a shell reports a command that was ended by Ctrl-C.
INTERRUPTED_CODE = 130
# Options that few experiments read: field and option.
TAKEN_BY_FEW = {"users": "users", "cells": "cells", "draw": "seed", "kept": "keep"}
# Options that experiments read, but no scenario.
NOT_OF_SCENARIOS = {"trace": "trace", "dataset": "dataset", "quick": "quick"}

Named = Annotated[
    str | None,
    typer.Argument(
        help="Name of an experiment; see --list. `papers`: all experiments of the papers.",
        show_default=False,
    ),
]
Users = Annotated[
    list[float] | None,
    typer.Option(
        min=0.25,
        help="Users per replica, for studies of agents; repeat for several.",
        callback=all_finite,
    ),
]
Plots = Annotated[
    Path | None,
    typer.Option(
        help="Write plots to this folder; for `papers` also tables and an index.",
        callback=writable_folder,
    ),
]

Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Parallel processes; by default one per core."),
]

Kept = Annotated[
    Path | None,
    typer.Option(
        help="Append finished cells of `robustness` to this file; go on from there.",
        callback=writable_file,
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the whole report to this file.", callback=writable_file),
]


def simulate(
    experiment: Named = None,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
    scenario: Annotated[
        Path | None,
        typer.Option(help="Instead of an experiment: a scenario file; see `cato plan --example`."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only this policy; repeat for several.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Print this metric; repeat for several.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help=SEEDS_HELP, show_default="10, or the scenario's")
    ] = None,
    json_file: ReportFile = None,
    plot: Plots = None,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded arrivals, for experiments that replay them.")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="Text pairs, for experiments that read them.")
    ] = None,
    jobs: Jobs = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a part that takes minutes, where there is one.")
    ] = False,
    users: Users = None,
    cells: Annotated[
        int, typer.Option(min=0, help="Random cells of `robustness`; 0: vary one axis at a time.")
    ] = 0,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the cells of `robustness` and of their runs.")
    ] = 0,
    keep: Kept = None,
) -> None:
    """Run an experiment or a scenario in the simulator and print its metrics.

    No engine runs; the same seeds give the same numbers. Ctrl-C or SIGTERM prints and writes what
    is done.
    """
    from cato.lab.experiments import papers

    console = Console(markup=False)
    with ends_on(CatoError, OSError):
        if list_:
            console.print(_listed())
            return
        all_papers = experiment == papers.NAME and scenario is None
        chosen, usual_seeds = (None, papers.SEEDS) if all_papers else _chosen(experiment, scenario)
        options = Options(
            seeds_of(seeds) if seeds else usual_seeds,
            tuple(policy or ()),
            trace,
            dataset,
            jobs or os.cpu_count() or 1,
            quick,
            tuple(users or ()),
            cells,
            seed,
            keep,
        )
        _check_taken(options, chosen, is_scenario=scenario is not None)
        if seeds and chosen is not None:
            _check_seeds(chosen)
        if chosen is None:
            if policy or metric or json_file:
                raise typer.BadParameter("`papers` takes no --policy, --metric or --json")
            _papers(options, plot or Path(papers.NAME), console)
            return
        check_metrics(metric or (), chosen.metrics)
        end_like_ctrl_c()
        with progress_bar(chosen.name) as progress:
            report = chosen.run(options, progress)
    _tell(report, chosen, metric or (), json_file, plot, console)


def _tell(
    report: Report,
    chosen: Experiment,
    wanted: Sequence[str],
    json_file: Path | None,
    plot: Path | None,
    console: Console,
) -> None:
    """Print the report and write its files; end the command when the run was interrupted."""
    known = metrics_in(report)
    for table in tables(report, [m for m in wanted if m in known], chosen.headlines):
        print_whole(console, table)
    is_whole = INTERRUPTED not in report.extra
    _write(report, chosen, json_file, plot if is_whole else None, console)
    if not is_whole:
        console.print("Interrupted: only what all arms had finished.", style="yellow")
        raise typer.Exit(INTERRUPTED_CODE)
    check_metrics(wanted, known)  # last: the chosen policies may lack one, which costs no results


def _write(
    report: Report, chosen: Experiment, json_file: Path | None, plot: Path | None, console: Console
) -> None:
    if json_file is not None:
        write_text(console, json_file, report.to_json())
    if plot is not None:
        with ends_on(CatoError):
            write_plots(console, plot, partial(chosen.plot, report))


def _check_taken(options: Options, chosen: Experiment | None, *, is_scenario: bool) -> None:
    """Refuse options that the experiment would not read; None: all of the papers."""
    from cato.lab.experiments import papers

    name, takes = (chosen.name, chosen.takes) if chosen else (papers.NAME, ())
    for field, option in (TAKEN_BY_FEW | (NOT_OF_SCENARIOS if is_scenario else {})).items():
        if getattr(options, field) and field not in takes:
            raise typer.BadParameter(f"`{name}` takes no --{option}")


def _check_seeds(chosen: Experiment) -> None:
    """Refuse seeds for an experiment whose seeds follow from its draw."""
    if "draw" in chosen.takes:
        raise typer.BadParameter(f"`{chosen.name}` takes its seeds from --seed, not --seeds")


def _papers(options: Options, folder: Path, console: Console) -> None:
    """Run all experiments of the papers in turn; print the targets met and the time of each."""
    from cato.lab.experiments import papers

    total_s = 0.0
    for done in papers.regenerate(options, folder, papers.PAPERS, progress_bar):
        total_s += done.took_s
        targets = done.report.targets if done.report else ()
        met = f"{sum(t.is_met for t in targets)} of {len(targets)} targets met, " if targets else ""
        detail = done.why_not or f"{met}{done.took_s:.0f} s"
        line = f"{done.experiment.name}: {done.entry.shows} ({detail})"
        console.print(line, highlight=False, markup=False)
    spent = f"{total_s / 60:.1f} minutes"
    console.print(f"Wrote {folder / papers.INDEX} in {spent}.", highlight=False, markup=False)


def _chosen(name: str | None, scenario: Path | None) -> tuple[Experiment, tuple[int, ...]]:
    """The experiment to run and its default seeds."""
    if (name is None) == (scenario is None):
        raise typer.BadParameter("name one experiment (see --list), or give --scenario FILE")
    if scenario is not None:
        from cato.sim.scenario_runs import as_experiment

        loaded = scenario_of(scenario)
        return as_experiment(loaded), loaded.seeds
    from cato.lab.registry import experiment

    assert name is not None
    return experiment(name), DEFAULT_SEEDS


def _listed() -> Table:
    from cato.lab.experiments import papers
    from cato.lab.registry import STUDIES, experiment

    table = a_table("Experiments")
    for name in ("name", "what it shows", "source"):
        table.add_column(name)
    for name in STUDIES:
        found = experiment(name)
        table.add_row(name, found.title, found.source)
    table.add_row(papers.NAME, "all tables and figures of the papers, in a folder", "all")
    return table
