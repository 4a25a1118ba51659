"""`cato plan --agents`: how many users of agents one accelerator serves."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from cato.cli.client import ends_on
from cato.cli.outputs import write_text
from cato.cli.simulation import a_table, kinds_of, print_whole, progress_bar, seeds_of
from cato.core.errors import CatoError

if TYPE_CHECKING:
    from cato.core.profile import Profile


# Each seed takes about a minute per profile and host-memory size.
AGENT_SEEDS = (0, 1, 2)
HOST_FACTORS = (0.5, 1.0, 2.0)


def plan_agents(
    trace: Path,
    profiles: list[str],
    goal: float,
    scheduler: str | None,
    seeds: str | None,
    json_file: Path | None,
) -> None:
    from cato.lab.studies.agent_fleet import ALL, LIMITS
    from cato.lab.studies.agents_search import (
        LEAST_TURN_RATE,
        Answer,
        Search,
        answer_of,
        searched,
    )
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
    kinds = kinds_of(profiles)
    answers: dict[str, Answer] = {}
    with ends_on(CatoError, OSError):
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
    console = Console(markup=False)
    table = a_table(
        f"{trace.name}: users a card with {100 * goal:g} % of their turns in time and a turn rate "
        f"of {LEAST_TURN_RATE:g}, simulated"
    )
    table.add_column("profile")
    for heading in ("users a card", "turn rate there", "tried"):
        table.add_column(heading, justify="right")
    for name, answer in answers.items():
        rate = "" if isnan(answer.turn_rate) else f"{answer.turn_rate:.2f}"
        table.add_row(name, answer.words, rate, answer.tried_words)
    print_whole(console, table)
    console.print(
        "Simulated: no engine ran. Engines have CATO's default limits for prompts.", style="yellow"
    )
    if json_file is not None:
        found = {name: asdict(a) for name, a in answers.items()}
        value = finite({"goal": goal, "agents": found, "simulated": True})
        write_text(console, json_file, json.dumps(value, indent=1) + "\n")
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
