"""`cato drain`: a host goes away, and no stream with it."""

from __future__ import annotations

import time
from typing import Annotated

import httpx
import typer
from rich.console import Console

from cato.cli.cluster import AUTO, Address, connect
from cato.core.errors import InputError

POLL_S = 2.0
# Of the time that a notice leaves: the host's own end needs some.
MARGIN_S = 5.0
# Without a notice: what Kubernetes gives a pod of ours, less the margin.
WITHIN_S = 110.0
console = Console(soft_wrap=True)


def drain(
    address: Address = AUTO,
    host: Annotated[
        str, typer.Option(help="Ray's id of the host; this one when none is named.")
    ] = "",
    within: Annotated[
        float, typer.Option(min=0, help="Seconds until the host goes, if no notice says it.")
    ] = WITHIN_S,
    on: Annotated[
        str, typer.Option(help="Wait for a cloud's notice first: aws, gcp or azure.")
    ] = "",
    metadata: Annotated[
        str, typer.Option(help="URL of the cloud's metadata service, if it is another.")
    ] = "",
) -> None:
    """Move what a host serves to other hosts: for maintenance, spot notices and `preStop` hooks.

    New calls go elsewhere at once; streams end where they run. Returns when no replica is left
    there. Ends with 1 when some were left at the end of the time: their streams go on elsewhere
    when the host is gone.
    """
    from cato.control.notices import CLOUDS

    if on and on not in CLOUDS:
        _fail(f"--on must be one of {', '.join(CLOUDS)}, not {on!r}")
    why = "cato drain"
    if on:
        why, within = _noticed(on, metadata)
        within = max(0.0, within - MARGIN_S)
        console.print(f"{why}: this host goes in {within:.0f} s", markup=False)
    connect(address)
    import ray

    from cato.control import host_drain

    node = host or ray.get_runtime_context().get_node_id()
    try:
        host_drain.begin(node, within, why)
    except InputError as error:
        _fail(str(error))
    console.print(f"host {node} takes no more work", highlight=False)
    if not host_drain.wait(node, within, lambda now: console.print(now, markup=False)):
        _fail("the time is over, and replicas are left")
    console.print("nothing is left here")


def _noticed(cloud: str, metadata: str) -> tuple[str, float]:
    """Why, and how soon, once there is a notice."""
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
