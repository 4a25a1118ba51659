"""Finding the Ray cluster and the `cato serve` of this host."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console

from cato.config.places import run_dir
from cato.serve.served import Served, running

AUTO = "auto"
Address = Annotated[
    str,
    typer.Option(
        help="Address of the Ray cluster; auto: RAY_ADDRESS, else the cluster of this host's "
        "`cato serve`, else the local one."
    ),
]


def served_here(address: str = AUTO) -> Served | None:
    """This host's `cato serve` on the cluster at `address`; None when there is none."""
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS", AUTO)
    here = running(run_dir())
    return next((s for s in here if address in (AUTO, s.address)), None)


def connect(address: str) -> str:
    """Connect to the cluster at `address` and return its address; ends the command with advice when
    there is none."""
    served = served_here(address)
    if served is not None and served.address:
        address = served.address
        os.environ.setdefault("RAY_AUTH_MODE", served.auth_mode)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        Console(soft_wrap=True).print(
            f"No Ray cluster at {address!r}: {error}\n"
            "Start one with `cato serve` or `ray start --head`, or pass --address.",
            style="red",
            markup=False,
        )
        raise typer.Exit(1) from error
    return str(ray.get_runtime_context().gcs_address)
