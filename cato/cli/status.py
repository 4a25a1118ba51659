"""`cato status`: pools, replicas and models, as the control plane sees them."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from cato.cli.cluster import AUTO, Address, connect


def status(address: Address = AUTO) -> None:
    """Show deployments with their replica bounds, replicas with their load, and loaded models."""
    connect(address)
    import ray

    from cato.control import actors
    from cato.core.shards import merged

    console = Console(markup=False)
    try:
        provisioner = actors.get(actors.PROVISIONER)
    except ValueError as error:
        console.print("CATO is not deployed on this cluster (no provisioner).", style="red")
        raise typer.Exit(1) from error
    topology = ray.get(provisioner.topology.remote())
    fleet = Table(
        "deployment", "running", "starting", "wanted", "min..max", "scaling", "problem",
        title="Deployments",
    )  # fmt: skip
    for name, d in ray.get(provisioner.state.remote()).items():
        fleet.add_row(
            name,
            str(d["running"]),
            str(d["starting"]),
            str(d["wanted"]),
            f"{d['min']}..{d['max']}",
            f"{d['policy']}: {d['reason']}" if d["reason"] else d["policy"],
            str(d["problem"]),
        )
    console.print(fleet)
    for warning in ray.get(provisioner.warnings.remote()):
        console.print(warning, style="yellow", highlight=False)
    replicas = Table(
        "pool", "policies", "queued", "replica", "held / slots", "wait s", title="Pools"
    )
    for pool in topology.pools if topology else ():
        routers = [actors.get(n) for n in actors.routers_of(pool)]
        picture = merged(pool.name, ray.get([r.picture.remote() for r in routers]))
        p = ray.get(routers[0].policies.remote())
        parts = (p.scheduler, p.routing, p.ordering, p.binding)
        names = ", ".join(name for name in parts if name is not None)
        if not picture.replicas:
            replicas.add_row(pool.name, names, str(picture.queued), "none", "", "")
        for r in picture.replicas:
            slots = f"{r.held} / {r.max_running}" + ("" if r.accepting else " (not accepting)")
            replicas.add_row(pool.name, names, str(picture.queued), r.id, slots, f"{r.wait_s:.3f}")
    console.print(replicas)
    for table in _shared_pools():
        console.print(table)
    models = Table(
        "model", "replica", "state", "accelerator", "load s", "pid", "restarts",
        title="Loaded models",
    )  # fmt: skip
    for m in ray.get(actors.get(actors.EVICTION_MANAGER).residents.remote()):
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
    console.print(models)


def _shared_pools() -> list[Table]:
    """One table per shared pool: its slots, and counts of hits, loads and evictions."""
    import ray

    from cato.control import actors

    tables = []
    for pool in ray.get(actors.get(actors.EVICTION_MANAGER).pictures.remote()):
        c = pool.counts
        hits = f", hit rate {c.hits / c.served:.0%}" if c.served else ""
        table = Table(
            "slot", "host", "deployment", "state", "model", "running",
            title=f"Shared pool {pool.name}: {pool.queued} queued{hits}, {c.loads} loads "
            f"({c.from_host_memory} from memory, {c.prefetches} ahead of demand), "
            f"{c.evictions} evictions, {c.failures} failures",
        )  # fmt: skip
        for s in pool.slots:
            table.add_row(
                s.slot, s.host[:8], s.deployment, s.state.value, s.model or "", str(s.running)
            )
        tables.append(table)
    return tables
