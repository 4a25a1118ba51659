"""`cato replay`: simulate a recorded pool under its own and other schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cato.cli.client import ends_on, fail
from cato.cli.simulation import a_table
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
        Path | None, typer.Option("--json", help="Write all numbers to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this folder.")] = None,
) -> None:
    """Simulate a recorded pool in virtual time under its own and other schedulers.

    Calls arrive and replicas exist at the recorded times; only the decisions change.
    """
    from cato.policies.registry import scheduler_names
    from cato.sim import counterfactual
    from cato.sim.replay import differences, replay_core
    from cato.telemetry.event_log import read_log

    for name in scheduler or ():
        if name not in scheduler_names():
            known = ", ".join(scheduler_names())
            raise typer.BadParameter(f"no scheduler named {name!r}; known: {known}")
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
        if json_file is not None:
            json_file.write_text(report.to_json(), encoding="utf-8")
        pictures = counterfactual.plot(report, plot) if plot is not None else ()
    left = sum(t.cancelled_at_s < float("inf") for t in history.tasks)
    console.print(_table(report))
    console.print(
        f"{len(history.tasks)} calls of pool {history.pool}, recorded under "
        f"{history.names.scheduler}; {left} cancelled or superseded by their clients are not "
        "counted. The difference between `recorded` and the simulation of the same scheduler is "
        "the simulator's error.",
        highlight=False,
        markup=False,
    )
    for path in (*((json_file,) if json_file else ()), *pictures):
        console.print(f"Wrote {path}.", highlight=False, markup=False)


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
