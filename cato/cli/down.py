"""`cato down`: remove CATO from a Ray cluster that goes on."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from cato.cli.cluster import connect


def down(
    address: Annotated[
        str, typer.Option(help="Address of the Ray cluster; auto finds the local one.")
    ] = "auto",
) -> None:
    """Delete both applications and end the control actors, which survive `serve shutdown`."""
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
