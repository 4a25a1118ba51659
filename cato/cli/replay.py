"""`cato replay`: simulate a recorded pool under its own and other schedulers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cato.cli.client import ends_on, fail
from cato.cli.outputs import Plots, writable_file, write_plots, write_text
from cato.cli.simulation import a_table, check_scheduler, print_whole
from cato.core.errors import CatoError

if TYPE_CHECKING:
    from cato.sim.report import Report

# Metric, heading with its unit, and the factor to that unit.
COLUMNS = (
    ("slo_attainment", "attainment %", 100.0),
    ("ttft_s_mean", "TTFT mean ms", 1000.0),
    ("ttft_s_p95", "TTFT p95 ms", 1000.0),
    ("e2e_s_mean", "E2E mean ms", 1000.0),
    ("e2e_s_p95", "E2E p95 ms", 1000.0),
    ("refused", "refused %", 100.0),
)


def replay(
    log: Annotated[
        Path, typer.Argument(help="A log of one pool, from the `event_log` folder.", exists=True)
    ],
    scheduler: Annotated[
        list[str] | None, typer.Option(help="Also replay under this scheduler; repeat for several.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only replay the events and compare the decisions.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write all numbers to this file.", callback=writable_file),
    ] = None,
    plot: Plots = None,
) -> None:
    """Simulate a recorded pool in virtual time under its own and other schedulers.

    Calls arrive and replicas exist at the recorded times; only the decisions change.
    """
    from cato.policies.registry import scheduler_names
    from cato.sim import counterfactual
    from cato.sim.replay import differences, replay_core
    from cato.telemetry.event_log import read_log

    for name in scheduler or ():
        check_scheduler(name, scheduler_names())
    if check and (scheduler or json_file or plot):
        raise typer.BadParameter("--check takes no --scheduler, --json or --plot")
    if log.is_dir():
        raise typer.BadParameter(_one_of(log))
    console = Console(markup=False)
    with ends_on(CatoError, OSError):
        recording = read_log(log)
        if check:
            found = differences(recording, replay_core(recording))
            steps = len(recording.steps)
            if found:
                fail(f"{len(found)} of {steps} steps decide differently, first {found[0]}")
            console.print(f"All {steps} steps repeat the recorded commands.")
            return
        history, report = counterfactual.compare(recording, scheduler or ())
    left = sum(t.cancelled_at_s < float("inf") for t in history.tasks)
    print_whole(console, _table(report))
    console.print(
        f"{len(history.tasks)} calls of pool {history.pool}, recorded under "
        f"{history.names.scheduler}; {left} cancelled or superseded by their clients are not "
        "counted. The difference between `recorded` and the simulation of the same scheduler is "
        "the simulator's error.",
        highlight=False,
        markup=False,
    )
    if json_file is not None:
        write_text(console, json_file, report.to_json())
    if plot is not None:
        write_plots(console, plot, partial(counterfactual.plot, report))


def _one_of(folder: Path) -> str:
    """Why a folder cannot be replayed, with its newest log as the one to try."""
    logs = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return f"{folder} is a folder without logs (*.jsonl)"
    return f"{folder} is a folder; name one of its logs, such as {logs[-1]}"


def _table(report: Report) -> Table:
    table = a_table(f"{report.experiment}: recorded and simulated")
    table.add_column("task")
    table.add_column("scheduler")
    table.add_column("calls", justify="right")
    for _, heading, _ in COLUMNS:
        table.add_column(heading, justify="right")
    rows = list(dict.fromkeys((str(m.setting["task"]), m.policy) for m in report.means))
    rows.sort(key=lambda row: [str(m.setting["task"]) for m in report.means].index(row[0]))
    for task, policy in rows:
        means = [report.mean(metric, policy, task=task) for metric, _, _ in COLUMNS]
        numbers = [
            "-" if m.mean != m.mean else f"{m.mean * factor:.1f}"
            for m, (_, _, factor) in zip(means, COLUMNS, strict=True)
        ]
        table.add_row(task, policy, str(means[0].n), *numbers)
    return table
