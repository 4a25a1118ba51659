"""`cato check`: validate a deployment file and everything it names, before Ray starts."""

from __future__ import annotations

from typing import Annotated

import typer

from cato.cli.serve import DEFAULT_FILE, checked, console
from cato.config.lines import with_lines
from cato.serve.preflight import (
    notes_of_names,
    own_workflows,
    problems_of_checkers,
    problems_of_names,
)


def check(file: Annotated[str, typer.Argument(help="A deployment file.")] = DEFAULT_FILE) -> None:
    """Check the file and its workflows, profiles, models, indexes and store, and try its checkers;
    print every problem with its line. Exit code 2 if there is any."""
    deploy = checked(file)
    workflows = own_workflows(deploy)
    found = [*problems_of_names(deploy, workflows), *problems_of_checkers(deploy)]
    problems = with_lines(found)
    for problem in problems:
        console.print(str(problem), style="red", markup=False, highlight=False)
    for note in with_lines(notes_of_names(deploy, workflows)):
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    if problems:
        raise typer.Exit(2)
    topology = deploy.topology
    models = sum(len(shared.models) for shared in topology.shared_pools) + len(topology.pools)
    pools = [*(p.name for p in topology.pools), *(s.name for s in topology.shared_pools)]
    console.print(
        f"{deploy.path}: no problems; {models} {'model' if models == 1 else 'models'} in "
        f"{', '.join(pools)}",
        style="green",
        markup=False,
        highlight=False,
    )
