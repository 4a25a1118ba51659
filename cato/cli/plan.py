"""`cato plan`: how many replicas a scenario needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cato.cli.client import fail
from cato.cli.simulation import SEEDS_HELP, a_table, seeds_of
from cato.core.errors import CatoError

if TYPE_CHECKING:
    from cato.sim.plan import Counts, Plan, Trial
    from cato.sim.scenario import Scenario


def plan(
    scenario: Annotated[
        Path | None, typer.Argument(help="A scenario file.", show_default=False)
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Print a scenario to start from, and end.")
    ] = False,
    attainment: Annotated[
        float, typer.Option(help="Share of the tasks that must meet their SLAs.")
    ] = 0.95,
    scheduler: Annotated[
        str | None, typer.Option(help="Plan for this one.", show_default="the scenario's")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Try at most so many for each pool.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help=SEEDS_HELP, show_default="the scenario's")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all that was tried to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this folder.")] = None,
) -> None:
    """Find the fewest replicas whose attainment is high enough, by simulation.

    High enough: a 95 % confidence bound over the seeds. Also for power-of-two, the rule of a plain
    Ray Serve. Exit code 1 when no number within the bounds is enough.
    """
    from cato.sim import plan as planning
    from cato.sim.scenario import BASELINE, SCHEDULERS
    from cato.sim.scenario_file import example_text, load_scenario

    if example:
        print(example_text(), end="")
        return
    if scenario is None:
        raise typer.BadParameter("name a scenario file; `cato plan --example` prints one")
    if scheduler is not None and scheduler not in SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        raise typer.BadParameter(f"no scheduler named {scheduler!r}; known: {known}")
    console = Console()
    try:
        asked = _with_options(load_scenario(scenario), scheduler, max_replicas, seeds)
        pools = planning.pools_of(asked)
        with Console(stderr=True).status("") as status:

            def watch(scheduler: str, counts: Counts, seed: int, of: int) -> None:
                tried = planning.words(pools, counts)
                status.update(f"{scheduler}: {tried}, seed {seed} of {of}")

            planner = planning.Planner.of(asked, attainment, watch)
            plans = [planner.plan(s) for s in dict.fromkeys((asked.scheduler, BASELINE))]
        report = planning.report_of(asked, attainment, plans)
        if json_file is not None:
            json_file.write_text(report.to_json(), encoding="utf-8")
        pictures = planning.plot(report, plot) if plot is not None else ()
    except (CatoError, OSError) as error:
        fail(str(error))
    for found in plans:
        console.print(_table(asked, found))
    for found in plans:
        console.print(_answer(asked, attainment, found), highlight=False, markup=False)
    console.print("Simulated: no engine ran.", style="yellow")
    for path in (*((json_file,) if json_file else ()), *pictures):
        console.print(f"Wrote {path}.", highlight=False, markup=False)
    if plans[0].found is None:
        raise typer.Exit(1)


def _with_options(
    scenario: Scenario, scheduler: str | None, max_replicas: int | None, seeds: str | None
) -> Scenario:
    if scheduler is not None:
        scenario = replace(scenario, scheduler=scheduler)
    if seeds is not None:
        scenario = replace(scenario, seeds=seeds_of(seeds))
    if max_replicas is not None:
        pools = tuple(replace(p, max_replicas=max_replicas) for p in scenario.pools)
        scenario = replace(scenario, pools=pools)
    return scenario


def _table(scenario: Scenario, found: Plan) -> Table:
    title = f"{scenario.name} with {found.scheduler}, simulated: what was tried"
    table = a_table(title)
    for pool in scenario.pools:
        table.add_column(pool.name, justify="right")
    for name in ("replicas", "attainment", "at least", "seeds"):
        table.add_column(name, justify="right")
    table.add_column("")
    for t in sorted(found.trials, key=lambda t: (t.replicas, t.counts)):
        table.add_row(
            *map(str, t.counts),
            str(t.replicas),
            _percent(t),
            f"{100 * t.lower:.1f} %" if not t.is_cut else "",
            str(t.seeds),
            "[bold green]enough" if t.is_enough else "[red]short",
            style="bold" if t is found.found else "",
        )
    return table


def _percent(trial: Trial) -> str:
    mean = f"{100 * trial.attainment:.1f}"
    return f"{mean} ± {100 * trial.stderr:.1f} %" if trial.seeds > 1 else f"{mean} %"


def _answer(scenario: Scenario, goal: float, found: Plan) -> str:
    from cato.sim.plan import pools_of, words

    best = found.found
    if best is None:
        return f"{found.scheduler}: no number of replicas gives {100 * goal:g} %: {found.why_not}."
    return (
        f"{found.scheduler}: {best.replicas} replicas ({words(pools_of(scenario), best.counts)}) "
        f"give {100 * best.attainment:.1f} %, at least {100 * best.lower:.1f} %."
    )
