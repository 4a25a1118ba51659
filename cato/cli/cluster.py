"""Finding the Ray cluster and the `cato serve` of this host."""

from __future__ import annotations

import os
import socket
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from cato.config.places import run_dir
from cato.serve.served import Served, running

AUTO = "auto"
# Ray itself tries for minutes, and its log covers the terminal.
CONNECT_TIMEOUT_S = 3.0
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
    asked = os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address
    if why_not := _why_unreachable(asked):
        _fail(asked, why_not)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        _fail(address, str(error))
    return str(ray.get_runtime_context().gcs_address)


def _why_unreachable(address: str) -> str:
    """Why nothing answers at an address such as HOST:PORT; empty if something does, and for other
    kinds of addresses."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdecimal()):
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        return str(error)
    return ""


def _fail(address: str, why: str) -> NoReturn:
    Console(soft_wrap=True).print(
        f"No Ray cluster at {address!r}: {why}\n"
        "Start one with `cato serve` or `ray start --head`, or pass --address.",
        style="red",
        markup=False,
    )
    raise typer.Exit(1)
