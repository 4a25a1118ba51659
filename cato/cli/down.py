"""`cato down`: remove CATO from a Ray cluster that goes on."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cato.cli.cluster import connect
from cato.serve.keeper import is_left, kill, marked


def down(
    address: Annotated[
        str, typer.Option(help="Address of the Ray cluster; auto finds the local one.")
    ] = "auto",
    left: Annotated[
        bool,
        typer.Option("--left", help="Instead, end processes that a killed `cato serve` left here."),
    ] = False,
) -> None:
    """Delete both applications and end the control actors, which survive `serve shutdown`."""
    if left:
        found = marked(is_left)
        kill(found)
        Console().print(f"ended {len(found)} processes that a killed `cato serve` had left")
        return
    connect(address)
    from ray import serve

    from cato.control import actors

    console = Console()
    running = serve.status().applications
    for app in (actors.INGRESS_APP, actors.ENGINES_APP):
        if app in running:
            console.print(f"deleting application {app} ...")
            serve.delete(app)
    ended = actors.remove_all()
    console.print(f"ended control actors: {', '.join(sorted(ended)) or 'none were there'}")
