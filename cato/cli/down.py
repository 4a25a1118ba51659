"""`cato down`: remove CATO from a Ray cluster, which keeps running."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from cato.cli.cluster import AUTO, Address, connect, served_here
from cato.serve.keeper import is_left, kill, marked

console = Console(soft_wrap=True, markup=False)


def down(
    address: Address = AUTO,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    left: Annotated[
        bool,
        typer.Option(
            "--left", help="Only kill processes that a killed `cato serve` left on this host."
        ),
    ] = False,
) -> None:
    """Show what runs on a Ray cluster, then delete both applications and the control actors, which
    survive `serve shutdown`. Asks for confirmation in a terminal."""
    if left:
        found = marked(is_left)
        kill(found)
        console.print(f"ended {len(found)} processes that a killed `cato serve` had left")
        return
    served = served_here(address)
    cluster = connect(address)
    from ray import serve

    from cato.control import actors

    running = serve.status().applications
    apps = [a for a in (actors.INGRESS_APP, actors.ENGINES_APP) if a in running]
    console.print(f"Ray cluster {cluster}:", highlight=False)
    if served is not None and served.address == cluster:
        console.print(
            f"  started by `cato serve {served.file}` at {served.url}; Ctrl-C there stops it whole",
            highlight=False,
            markup=False,
        )
    for app in apps:
        names = ", ".join(sorted(running[app].deployments))
        console.print(f"  application {app}: {names}", highlight=False, markup=False)
    if not apps:
        console.print("  no application of CATO", highlight=False)
    if not yes and sys.stdin.isatty():
        typer.confirm("End CATO there?", abort=True)
    for app in apps:
        console.print(f"deleting application {app} ...")
        serve.delete(app)
    ended = actors.remove_all()
    console.print(f"ended control actors: {', '.join(sorted(ended)) or 'none were there'}")
