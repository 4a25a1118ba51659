"""Adding LoRA adapters to a running base model, for `cato models`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from cato.cli.bars import waiting
from cato.cli.client import fail
from cato.cli.store import moment
from cato.core.ids import ModelName
from cato.core.topology import AdapterSpec, PoolSpec, Topology

TRIAL = {"prompt": "def add(a, b):\n", "max_tokens": 1}


def base_pool(topology: Topology, base: str) -> PoolSpec:
    """The pool of the model `base`; ends the command when it has no room for another adapter."""
    for pool in topology.pools:
        if base in pool.model.groups[0]:
            break
    else:
        known = ", ".join(p.model.name for p in topology.pools) or "none"
        fail(f"--base: no pool serves a model {base!r}; there are: {known}")
    model = pool.model
    added = sum(a.version > 0 for a in model.adapters)
    if added >= model.adapter_places:
        has = f"already has {added} added adapters" if added else "has no room for an added adapter"
        fail(
            f"{model.name} {has}: raise models.{model.name}.adapter_places in the deployment file "
            "and deploy it again, or remove an adapter"
        )
    return pool


def try_out(pool: PoolSpec, adapter: AdapterSpec) -> float:
    """Load the adapter on one replica of each deployment and request one token; the longest time
    in seconds. Raise `EngineError` with the engine's message."""
    with waiting() as bar:
        bar.add_task(f"loading {adapter.name} beside {pool.model.name}")
        return asyncio.run(_try_out(pool, adapter))


async def _try_out(pool: PoolSpec, adapter: AdapterSpec) -> float:
    from cato.control.measured_replica import ReplicaCaller, find_replica

    took_s = 0.0
    for deployment in pool.deployments:
        found = await find_replica(pool, deployment)
        caller = ReplicaCaller(deployment.name, found.replica, adapter)
        started_s = time.monotonic()
        async for _ in caller.stream(TRIAL):
            pass
        took_s = max(took_s, time.monotonic() - started_s)
    return took_s


def dated(adapter: AdapterSpec) -> AdapterSpec:
    """The adapter with the current time as version, so that engines replace one of that name."""
    return replace(adapter, version=time.time_ns() // 1_000_000)


def adapter_table(adapters: Sequence[tuple[ModelName, AdapterSpec]]) -> Table:
    table = Table("adapter", "base", "source", "from")
    for base, adapter in adapters:
        origin = "the file"
        if adapter.version:
            origin = f"added {moment(adapter.version / 1000)}"
        table.add_row(adapter.name, base, adapter.source, origin)
    return table
