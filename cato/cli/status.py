"""`cato status`: pools, replicas and models, as the control plane sees them."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from cato.cli.cluster import AUTO, Address, connect
from cato.cli.control_plane import UnansweredError, ask
from cato.core.slots import FAILING
from cato.core.topology import PoolSpec

# For each actor: one that hangs must not hide the others.
ANSWER_WITHIN_S = 5.0

console = Console(markup=False)


def status(address: Address = AUTO) -> None:
    """Show deployments with their replica bounds, replicas with their load, and loaded models. What
    a control actor does not tell is left out, with a note and exit code 1."""
    connect(address)
    from cato.control import actors

    try:
        actors.get(actors.PROVISIONER)
    except ValueError as error:
        console.print("CATO is not deployed on this cluster (no provisioner).", style="red")
        raise typer.Exit(1) from error
    silent: dict[str, str] = {}
    topology = _asked(silent, actors.PROVISIONER, "topology")
    if (state := _asked(silent, actors.PROVISIONER, "state")) is not None:
        console.print(_fleet(state))
    for warning in _asked(silent, actors.PROVISIONER, "warnings") or ():
        console.print(warning, style="yellow", highlight=False)
    replicas = Table(
        "pool", "policies", "queued", "replica", "held / slots", "wait s", title="Pools"
    )
    for pool in topology.pools if topology else ():
        _add_pool(replicas, pool, silent)
    console.print(replicas)
    for table in _shared_pools(_asked(silent, actors.EVICTION_MANAGER, "pictures") or ()):
        console.print(table)
    residents = _asked(silent, actors.EVICTION_MANAGER, "residents")
    if residents is not None:
        console.print(_loaded(residents))
    for problem in silent.values():
        console.print(problem, style="red", highlight=False)
    if silent:
        raise typer.Exit(1)


def _asked(silent: dict[str, str], name: str, method: str) -> Any:
    """The answer of the control actor `name`; None from one that is among the `silent` ones, or is
    now added to them."""
    if name in silent:
        return None
    try:
        return ask(name, method, within_s=ANSWER_WITHIN_S)
    except UnansweredError as error:
        silent[name] = str(error)
        return None


def _fleet(state: dict[str, dict[str, Any]]) -> Table:
    fleet = Table(
        "deployment", "running", "starting", "wanted", "min..max", "scaling", "problem",
        title="Deployments",
    )  # fmt: skip
    for name, d in state.items():
        fleet.add_row(
            name,
            str(d["running"]),
            str(d["starting"]),
            str(d["wanted"]),
            f"{d['min']}..{d['max']}",
            f"{d['policy']}: {d['reason']}" if d["reason"] else d["policy"],
            str(d["problem"]),
        )
    return fleet


def _add_pool(table: Table, pool: PoolSpec, silent: dict[str, str]) -> None:
    """The replicas of the pool that its routers tell of."""
    from cato.control import actors
    from cato.core.shards import merged

    routers = actors.routers_of(pool)
    told = {name: _asked(silent, name, "picture") for name in routers}
    pictures = [picture for picture in told.values() if picture is not None]
    if not pictures:
        table.add_row(pool.name, "", "", "unknown", "", "")
        return
    picture = merged(pool.name, pictures)
    p = _asked(silent, next(n for n, found in told.items() if found is not None), "policies")
    parts = (p.scheduler, p.routing, p.ordering, p.binding) if p else ()
    names = ", ".join(name for name in parts if name is not None)
    if not picture.replicas:
        table.add_row(pool.name, names, str(picture.queued), "none", "", "")
    for r in picture.replicas:
        slots = f"{r.held} / {r.max_running}" + ("" if r.accepting else " (not accepting)")
        table.add_row(pool.name, names, str(picture.queued), r.id, slots, f"{r.wait_s:.3f}")


def _loaded(residents: Any) -> Table:
    models = Table(
        "model", "replica", "state", "accelerator", "load s", "pid", "restarts",
        title="Loaded models",
    )  # fmt: skip
    for m in residents:
        cards = f"{m.accelerator} x {m.cards}" if m.cards else m.accelerator
        models.add_row(
            m.model,
            m.replica_id,
            m.state,
            cards,
            f"{m.load_s:.1f}",
            str(m.pid or ""),
            str(m.restarts),
        )
    return models


def _shared_pools(pictures: Any) -> list[Table]:
    """One table per shared pool: its slots, and counts of hits, loads and evictions."""
    tables = []
    for pool in pictures:
        c = pool.counts
        hits = f", hit rate {c.hits / c.served:.0%}" if c.served else ""
        table = Table(
            "slot", "host", "deployment", "state", "model", "running",
            title=f"Shared pool {pool.name}: {pool.queued} queued{hits}, {c.loads} loads "
            f"({c.from_host_memory} from memory, {c.prefetches} ahead of demand), "
            f"{c.evictions} evictions, {c.failures} failures",
        )  # fmt: skip
        for s in pool.slots:
            state = f"{s.state.value}, {FAILING}" if s.is_failing else s.state.value
            table.add_row(s.slot, s.host[:8], s.deployment, state, s.model or "", str(s.running))
        tables.append(table)
    return tables
