"""`cato plan`: replicas for a scenario, accelerators for a trace, agent users per accelerator."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cato.cli.client import fail
from cato.cli.simulation import SEEDS_HELP, a_table, progress_bar, seeds_of
from cato.core.errors import CatoError

# Each seed takes about a minute per profile and host-memory size.
AGENT_SEEDS = (0, 1, 2)
HOST_FACTORS = (0.5, 1.0, 2.0)

if TYPE_CHECKING:
    from cato.core.profile import Profile
    from cato.sim.plan import CardPlan, Counts, Plan, Trial
    from cato.sim.scenario import Scenario


Attainment = Annotated[
    str,
    typer.Option("--target", "--attainment", help="Share of the tasks that must meet their SLOs."),
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
    speed: Annotated[
        float, typer.Option(min=0.001, help="With --traffic: replay it this many times as fast.")
    ] = 1.0,
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
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every fleet that was tried to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this folder.")] = None,
) -> None:
    """Find, by simulation, the fewest replicas that reach the target attainment.

    --traffic with measured profiles finds how many accelerators of each kind a trace needs.
    --agents finds how many users one accelerator serves with enough turns in time, and what more
    host memory for KV blocks adds. The target must hold at the 95 % confidence bound over the
    seeds. A scenario is also planned for ray-serve, plain Ray Serve's routing. Exit code 1 when no
    number within the bounds is enough.
    """
    from cato.sim.scenario import SCHEDULERS
    from cato.sim.scenario_file import example_text, load_scenario

    if example:
        print(example_text(), end="")
        return
    if scheduler is not None and scheduler not in SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        raise typer.BadParameter(f"no scheduler named {scheduler!r}; known: {known}")
    goal = _share(attainment)
    if sum(source is not None for source in (scenario, traffic, agents)) != 1:
        raise typer.BadParameter(
            "name a scenario file (`cato plan --example` prints one), or --traffic or --agents "
            "with a trace"
        )
    if agents is not None:
        _plan_agents(agents, profile or [], goal, scheduler, seeds, json_file)
        return
    if traffic is not None:
        _plan_cards(
            traffic, profile or [], goal, speed, scheduler, max_replicas, seeds, json_file, plot
        )
        return
    assert scenario is not None, "one of the three was given"
    try:
        asked = _with_options(load_scenario(scenario), scheduler, max_replicas, seeds)
    except (CatoError, OSError) as error:
        fail(str(error))
    _plan_scenario(asked, goal, json_file, plot)


def _plan_scenario(asked: Scenario, goal: float, json_file: Path | None, plot: Path | None) -> None:
    from cato.sim import plan as planning
    from cato.sim.scenario import BASELINE

    console = Console()
    try:
        pools = planning.pools_of(asked)
        with Console(stderr=True).status("") as status:

            def watch(scheduler: str, counts: Counts, seed: int, of: int) -> None:
                tried = planning.words(pools, counts)
                status.update(f"{scheduler}: {tried}, seed {seed} of {of}")

            planner = planning.Planner.of(asked, goal, watch)
            plans = [planner.plan(s) for s in dict.fromkeys((asked.scheduler, BASELINE))]
        report = planning.report_of(asked, goal, plans)
        if json_file is not None:
            json_file.write_text(report.to_json(), encoding="utf-8")
        pictures = planning.plot(report, plot) if plot is not None else ()
    except (CatoError, OSError) as error:
        fail(str(error))
    for found in plans:
        console.print(_table(asked, found))
    for found in plans:
        console.print(_answer(asked, goal, found), highlight=False, markup=False)
    console.print("Simulated: no engine ran.", style="yellow")
    for path in (*((json_file,) if json_file else ()), *pictures):
        console.print(f"Wrote {path}.", highlight=False, markup=False)
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
    from cato.sim.scenario_file import trace_scenario

    if not profiles:
        raise typer.BadParameter("--traffic needs at least one --profile, such as demo-coder@cpu")
    console, found = Console(), []
    try:
        with Console(stderr=True).status("") as status:
            for text in profiles:
                name, cards = _kind(text)
                asked = _with_options(
                    trace_scenario(traffic, name, speed=speed), scheduler, max_replicas, seeds
                )

                def watch(
                    scheduler: str, counts: Counts, seed: int, of: int, name: str = name
                ) -> None:
                    status.update(f"{name}: {counts[0]} replicas, seed {seed} of {of}")

                planner = planning.Planner.of(asked, goal, watch)
                whole = planner.around(planner.plan(asked.scheduler), planning.CURVE_MARGIN)
                found.append(planning.CardPlan(name, cards, whole))
        if json_file is not None:
            answers = {
                f.kind: None if f.plan.found is None else f.plan.found.replicas * f.cards
                for f in found
            }
            curves = {
                f.kind: sorted((t.replicas * f.cards, t.attainment) for t in f.plan.trials)
                for f in found
            }
            value = {"goal": goal, "cards": answers, "attainment": curves, "simulated": True}
            json_file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        picture = planning.plot_cards(found, goal, traffic.stem, plot) if plot else None
    except (CatoError, OSError) as error:
        fail(str(error))
    table = a_table(f"{traffic.name}, {speed:g} times as fast, for {100 * goal:g} %: simulated")
    table.add_column("profile")
    for heading in ("replicas", "cards", "attainment", "one replica fewer"):
        table.add_column(heading, justify="right")
    for f in found:
        table.add_row(f.kind, *_cards_row(f))
    console.print(table)
    for f in found:
        if f.plan.found is None:
            console.print(f"{f.kind}: {f.plan.why_not}.", highlight=False, markup=False)
    console.print("Simulated: no engine ran.", style="yellow")
    for path in (json_file, picture):
        if path is not None:
            console.print(f"Wrote {path}.", highlight=False, markup=False)
    if any(f.plan.found is None for f in found):
        raise typer.Exit(1)


def _plan_agents(
    trace: Path,
    profiles: list[str],
    goal: float,
    scheduler: str | None,
    seeds: str | None,
    json_file: Path | None,
) -> None:
    from cato.lab.studies.agents import ALL, LIMITS, Answer, Search, answer_of, searched
    from cato.policies.schedulers import FORESIGHT
    from cato.sim.report import finite
    from cato.sim.scenario_file import named_profile

    if not profiles:
        raise typer.BadParameter(
            "--agents needs at least one --profile, such as reference-large-32b@gpu-80gb"
        )
    if not 0 < goal < 1:
        raise typer.BadParameter(f"--target {goal:g} is not between 0 and 1: give e.g. 95%")
    chosen = seeds_of(seeds) if seeds else AGENT_SEEDS
    kinds = [_kind(text) for text in profiles]
    answers: dict[str, Answer] = {}
    try:
        loaded = [(name, cards, named_profile(name, Path())) for name, cards in kinds]
        asked = [
            (name + words, cards, sized, bool(sized.host_capacity_tokens))
            for name, cards, profile in loaded
            for words, sized in _host_sizes(profile)
        ]
        with progress_bar("agents") as progress:
            for name, cards, profile, has_host in asked:
                samples = []
                for i, seed in enumerate(chosen, len(answers) * len(chosen)):
                    progress(i, len(asked) * len(chosen))
                    search = Search(
                        trace,
                        name,
                        profile,
                        scheduler or FORESIGHT,
                        seed,
                        goal=goal,
                        part=ALL,
                        has_host_memory=has_host,
                        engine=LIMITS,
                    )
                    samples += searched(search)
                answers[name] = answer_of(samples, goal, cards)
    except (CatoError, OSError) as error:
        fail(str(error))
    console = Console()
    table = a_table(
        f"{trace.name}: users a card with {100 * goal:g} % of their turns in time, simulated"
    )
    table.add_column("profile")
    for heading in ("users a card", "turn rate there", "tried"):
        table.add_column(heading, justify="right")
    for name, answer in answers.items():
        rate = "" if isnan(answer.turn_rate) else f"{answer.turn_rate:.2f}"
        table.add_row(name, answer.words, rate, answer.tried_words)
    console.print(table)
    console.print(
        "Simulated: no engine ran. Engines have CATO's default limits for prompts.", style="yellow"
    )
    if json_file is not None:
        found = {name: asdict(a) for name, a in answers.items()}
        value = finite({"goal": goal, "agents": found, "simulated": True})
        json_file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        console.print(f"Wrote {json_file}.", highlight=False, markup=False)
    if any(a.is_none for a in answers.values()):
        raise typer.Exit(1)


def _host_sizes(profile: Profile) -> list[tuple[str, Profile]]:
    """The profile without host memory, and with half, all and twice its host memory."""
    sizes = [("", replace(profile, host_capacity_tokens=0))]
    for factor in HOST_FACTORS if profile.host_capacity_tokens else ():
        tokens = round(factor * profile.host_capacity_tokens)
        words = f" + {tokens / 1e6:g}M tokens of host memory"
        if profile.kv_token_bytes:
            words += f" ({tokens * profile.kv_token_bytes / 1e9:.0f} GB)"
        sizes.append((words, replace(profile, host_capacity_tokens=tokens)))
    return sizes


def _kind(text: str) -> tuple[str, int]:
    """A profile and the cards of one replica: `NAME`, or `NAME:2`."""
    name, colon, cards = text.rpartition(":")
    if not colon:
        return text, 1
    if not cards.isdigit() or int(cards) < 1:
        raise typer.BadParameter(
            f"--profile {text!r}: give the cards per replica after the colon, such as NAME:2"
        )
    return name, int(cards)


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
            "[bold green]enough" if t.is_enough else "[red]too few",
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
    return (
        f"{found.scheduler}: {best.replicas} replicas ({words(pools_of(scenario), best.counts)}) "
        f"reach {100 * best.attainment:.1f} %, at least {100 * best.lower:.1f} %."
    )
