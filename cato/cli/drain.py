"""`cato drain`: take a host out of service without cutting streams."""

from __future__ import annotations

import time
from typing import Annotated

import httpx
import typer
from rich.console import Console

from cato.cli.cluster import AUTO, Address, connect
from cato.core.errors import InputError

POLL_S = 2.0
# Subtracted from the time of a notice: the host needs some to shut down.
MARGIN_S = 5.0
# Without a notice: our pods' grace period in Kubernetes, less a margin.
WITHIN_S = 110.0
console = Console(soft_wrap=True, markup=False)


def drain(
    address: Address = AUTO,
    host: Annotated[str, typer.Option(help="Ray's node id of the host. Default: this host.")] = "",
    within: Annotated[
        float, typer.Option(min=0, help="Seconds until the host goes down, without a notice.")
    ] = WITHIN_S,
    on: Annotated[
        str, typer.Option(help="Wait for a cloud's notice first: aws, gcp or azure.")
    ] = "",
    metadata: Annotated[
        str, typer.Option(help="URL of the cloud's metadata service, if not the usual one.")
    ] = "",
) -> None:
    """Move a host's replicas to other hosts: for maintenance, spot notices and `preStop` hooks.

    New calls go elsewhere at once; running streams finish here. Returns when the host has no
    replica left. Exit code 1 when some are left after the time: their streams continue on another
    host once this one is gone.
    """
    from cato.control.notices import CLOUDS

    if on and on not in CLOUDS:
        _fail(f"--on must be one of {', '.join(CLOUDS)}, not {on!r}")
    why = "cato drain"
    if on:
        why, within = _noticed(on, metadata)
        within = max(0.0, within - MARGIN_S)
        console.print(f"{why}: this host goes down in {within:.0f} s", markup=False)
    connect(address)
    import ray

    from cato.control import host_drain

    node = host or ray.get_runtime_context().get_node_id()
    try:
        host_drain.begin(node, within, why)
    except InputError as error:
        _fail(str(error))
    console.print(f"host {node} takes no new work", highlight=False)
    if not host_drain.wait(node, within, lambda now: console.print(now, markup=False)):
        _fail("time is up and replicas are left; their streams continue on other hosts")
    console.print("no replica is left on the host")


def _noticed(cloud: str, metadata: str) -> tuple[str, float]:
    """Wait for a notice; its reason, and the seconds it leaves."""
    from cato.control.notices import look

    silent = False
    while True:
        try:
            if (notice := look(cloud, metadata)) is not None:
                return notice.why, notice.within_s
            silent = False
        except (httpx.HTTPError, ValueError, KeyError) as error:
            if not silent:
                console.print(f"no answer from {cloud}: {error!r}", style="yellow", markup=False)
            silent = True
        time.sleep(POLL_S)


def _fail(problem: str) -> None:
    console.print(problem, style="red", markup=False)
    raise typer.Exit(1)
