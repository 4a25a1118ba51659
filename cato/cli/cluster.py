"""Connecting a command to a Ray cluster."""

from __future__ import annotations

import typer
from rich.console import Console


def connect(address: str) -> None:
    """Join the cluster at `address`; ends the command with what to do when there is none."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        Console().print(
            f"No Ray cluster at {address!r}: {error}\n"
            "Start one with `cato serve` or `ray start --head`, or pass --address.",
            style="red",
            markup=False,
        )
        raise typer.Exit(1) from error
