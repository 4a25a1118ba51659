"""`cato plan`: replicas for a scenario, accelerators for a trace, agent users per accelerator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cato.cli.client import ends_on
from cato.cli.outputs import writable_file, writable_folder, write_plots, write_text
from cato.cli.simulation import (
    SEEDS_HELP,
    a_table,
    check_scheduler,
    finite,
    kinds_of,
    print_whole,
    scenario_of,
    seeds_of,
)
from cato.core.errors import CatoError
from cato.core.words import counted

if TYPE_CHECKING:
    from cato.sim.plan import Counts, Plan, Trial
    from cato.sim.plan_plots import CardPlan
    from cato.sim.scenario import Scenario


Attainment = Annotated[
    str,
    typer.Option("--target", "--attainment", help="Share of the tasks that must meet their SLOs."),
]

Tried = Annotated[
    Path | None,
    typer.Option(
        "--json", help="Write every fleet that was tried to this file.", callback=writable_file
    ),
]
Plot = Annotated[
    Path | None, typer.Option(help="Write a plot to this folder.", callback=writable_folder)
]
Speed = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="With --traffic: replay it this many times as fast.",
        show_default="1",
        callback=finite,
    ),
]


def plan(
    scenario: Annotated[
        Path | None, typer.Argument(help="A scenario file.", show_default=False)
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Print an example scenario and exit.")
    ] = False,
    traffic: Annotated[
        Path | None,
        typer.Option(help="Instead of a scenario: a CSV trace (Azure's columns) on one pool."),
    ] = None,
    agents: Annotated[
        Path | None,
        typer.Option(help="Instead of a scenario: recorded agent sessions; finds users per card."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="With --traffic or --agents: NAME, or NAME:CARDS for CARDS accelerators per "
            "replica; repeat for each kind."
        ),
    ] = None,
    speed: Speed = None,
    attainment: Attainment = "95%",
    scheduler: Annotated[
        str | None, typer.Option(help="The scheduler to plan for.", show_default="the scenario's")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Most replicas to try for each pool.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help=SEEDS_HELP, show_default="the scenario's")
    ] = None,
    json_file: Tried = None,
    plot: Plot = None,
) -> None:
    """Find, by simulation, the fewest replicas that reach the target attainment.

    --traffic with measured profiles finds how many accelerators of each kind a trace needs.
    --agents finds how many users one accelerator serves with enough turns in time, and what more
    host memory for KV blocks adds. The target must hold at the 95 % confidence bound over the
    seeds. A scenario is also planned for ray-serve, plain Ray Serve's routing. Exit code 1 when no
    number within the bounds is enough.
    """
    from cato.sim.scenario_file import example_text
    from cato.sim.scenario_runs import SCHEDULERS

    if example:
        print(example_text(), end="")
        return
    if scheduler is not None:
        check_scheduler(scheduler, SCHEDULERS)
    goal = _share(attainment)
    if sum(source is not None for source in (scenario, traffic, agents)) != 1:
        raise typer.BadParameter(
            "name a scenario file (`cato plan --example` prints one), or --traffic or --agents "
            "with a trace"
        )
    if agents is not None:
        from cato.cli.plan_agents import plan_agents

        _refuse("--agents", speed=speed, max_replicas=max_replicas, plot=plot)
        plan_agents(agents, profile or [], goal, scheduler, seeds, json_file)
        return
    if traffic is not None:
        _plan_cards(
            traffic, profile or [], goal, speed or 1.0, scheduler, max_replicas, seeds, json_file,
            plot,
        )  # fmt: skip
        return
    assert scenario is not None, "one of the three was given"
    _refuse("a scenario", profile=profile, speed=speed)
    with ends_on(CatoError, OSError):
        asked = _with_options(scenario_of(scenario), scheduler, max_replicas, seeds)
    _plan_scenario(asked, goal, json_file, plot)


def _refuse(source: str, **options: object) -> None:
    """Refuse options that a plan for `source` would not read."""
    for name, value in options.items():
        if value:
            raise typer.BadParameter(f"{source} takes no --{name.replace('_', '-')}")


def _plan_scenario(asked: Scenario, goal: float, json_file: Path | None, plot: Path | None) -> None:
    from cato.sim import plan as planning
    from cato.sim.plan_plots import plot as plot_plans
    from cato.sim.scenario_runs import BASELINE

    console = Console(markup=False)
    with ends_on(CatoError, OSError):
        pools = planning.pools_of(asked)
        with Console(stderr=True).status("") as status:

            def watch(scheduler: str, counts: Counts, seed: int, of: int) -> None:
                tried = planning.words(pools, counts)
                status.update(f"{scheduler}: {tried}, seed {seed} of {of}")

            planner = planning.Planner.of(asked, goal, watch)
            plans = [planner.plan(s) for s in dict.fromkeys((asked.scheduler, BASELINE))]
        report = planning.report_of(asked, goal, plans)
    for found in plans:
        print_whole(console, _table(asked, found))
    for found in plans:
        console.print(_answer(asked, goal, found), highlight=False, markup=False)
    console.print("Simulated: no engine ran.", style="yellow")
    if json_file is not None:
        write_text(console, json_file, report.to_json())
    if plot is not None:
        write_plots(console, plot, partial(plot_plans, report))
    if plans[0].found is None:
        raise typer.Exit(1)


def _share(text: str) -> float:
    """`95%` or `0.95`."""
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise typer.BadParameter(f"--target {text!r}: give a share such as 95% or 0.95") from None


def _plan_cards(
    traffic: Path,
    profiles: list[str],
    goal: float,
    speed: float,
    scheduler: str | None,
    max_replicas: int | None,
    seeds: str | None,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    from cato.sim import plan as planning
    from cato.sim.plan_plots import CardPlan, plot_cards
    from cato.sim.scenario_file import trace_scenario

    if not profiles:
        raise typer.BadParameter("--traffic needs at least one --profile, such as demo-coder@cpu")
    kinds, console, found = kinds_of(profiles), Console(markup=False), []
    with ends_on(CatoError, OSError), Console(stderr=True).status("") as status:
        for name, cards in kinds:
            asked = _with_options(
                trace_scenario(traffic, name, speed=speed), scheduler, max_replicas, seeds
            )

            def watch(scheduler: str, counts: Counts, seed: int, of: int, name: str = name) -> None:
                replicas = counted(counts[0], "replica")
                status.update(f"{name}: {replicas}, seed {seed} of {of}")

            planner = planning.Planner.of(asked, goal, watch)
            whole = planner.around(planner.plan(asked.scheduler), planning.CURVE_MARGIN)
            found.append(CardPlan(name, cards, whole))
    table = a_table(f"{traffic.name}, {speed:g} times as fast, for {100 * goal:g} %: simulated")
    table.add_column("profile")
    for heading in ("replicas", "cards", "attainment", "one replica fewer"):
        table.add_column(heading, justify="right")
    for f in found:
        table.add_row(f.kind, *_cards_row(f))
    print_whole(console, table)
    for f in found:
        if f.plan.found is None:
            console.print(f"{f.kind}: {f.plan.why_not}.", highlight=False, markup=False)
    console.print("Simulated: no engine ran.", style="yellow")
    if json_file is not None:
        write_text(console, json_file, _cards_json(goal, found))
    if plot is not None:
        write_plots(console, plot, lambda folder: [plot_cards(found, goal, traffic.stem, folder)])
    if any(f.plan.found is None for f in found):
        raise typer.Exit(1)


def _cards_json(goal: float, found: Sequence[CardPlan]) -> str:
    answers = {
        f.kind: None if f.plan.found is None else f.plan.found.replicas * f.cards for f in found
    }
    curves = {
        f.kind: sorted((t.replicas * f.cards, t.attainment) for t in f.plan.trials) for f in found
    }
    value = {"goal": goal, "cards": answers, "attainment": curves, "simulated": True}
    return json.dumps(value, indent=1) + "\n"


def _cards_row(found: CardPlan) -> tuple[str, str, str, str]:
    best = found.plan.found
    if best is None:
        return "none", "none", "", ""
    fewer = {t.replicas: t for t in found.plan.trials}.get(best.replicas - 1)
    below = "" if fewer is None else f"{100 * fewer.attainment:.1f} %"
    cards = str(best.replicas * found.cards)
    return str(best.replicas), cards, f"{100 * best.attainment:.1f} %", below


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
    title = f"{scenario.name} with {found.scheduler}, simulated: fleets tried"
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
            Text("enough", "bold green") if t.is_enough else Text("too few", "red"),
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
        return (
            f"{found.scheduler}: no number of replicas reaches {100 * goal:g} %: {found.why_not}."
        )
    replicas = counted(best.replicas, "replica")
    verb = "reaches" if best.replicas == 1 else "reach"
    return (
        f"{found.scheduler}: {replicas} ({words(pools_of(scenario), best.counts)}) {verb} "
        f"{100 * best.attainment:.1f} %, at least {100 * best.lower:.1f} %."
    )
