"""One tenant's flood leaves the others their part of a pool, and what they leave is its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from fleet_kit import POOL, PROFILE, SCHEDULERS, a_fleet

from cato.core.ids import TaskName
from cato.core.slo import SloMetric
from cato.sim.tasks import Outcome, SimNode, SimTask

SLOTS, REPLICAS = 16, 2
CARD = replace(PROFILE, kv_capacity_tokens=100_000)
ALONE_PER_S = 3.0
SPAN_S = 120.0


def stream(tenant: str, rate_per_s: float, seed: int) -> list[SimTask]:
    """Completions and longer answers of one tenant, at random moments."""
    rng = np.random.default_rng(seed)
    tasks, at_s = [], 0.0
    while (at_s := at_s + float(rng.exponential(1 / rate_per_s))) < SPAN_S:
        output = int(rng.integers(10, 80))
        node = SimNode(POOL, int(rng.integers(50, 400)), output, output)
        tasks.append(
            SimTask(
                f"{tenant}{len(tasks):05d}", TaskName("t"), at_s, SloMetric.E2E, 4.0, (node,),
                (float(rng.random()),), tenant=tenant,
            )
        )  # fmt: skip
    return tasks


def attainment(outcomes: Sequence[Outcome], tenant: str) -> float:
    own = [o for o in outcomes if o.task.tenant == tenant]
    return sum(o.is_met for o in own) / len(own)


def met(outcomes: Sequence[Outcome]) -> int:
    return sum(o.is_met for o in outcomes)


def outcomes_of(*streams: list[SimTask]) -> Sequence[Outcome]:
    """All streams together on one fleet under `foresight`."""
    fleet = a_fleet(SCHEDULERS["foresight"], replicas=REPLICAS, max_running=SLOTS, profile=CARD)
    return fleet.run(sorted((t for s in streams for t in s), key=lambda t: t.arrived_at_s))


def test_a_tenant_at_ten_times_the_load_costs_another_at_most_two_points() -> None:
    small, flood = stream("a", ALONE_PER_S, 1), stream("b", 10 * ALONE_PER_S, 2)
    alone = attainment(outcomes_of(small), "a")
    both = outcomes_of(small, flood)
    assert attainment(both, "a") >= alone - 0.02
    # Without tenants the flood drowns it; with them as much is done in time, for others.
    nobodys = [replace(t, tenant="") for t in small]
    drowned = outcomes_of(nobodys, [replace(t, tenant="") for t in flood])
    ids = {t.id for t in small}
    own = [o.is_met for o in drowned if o.task.id in ids]
    assert sum(own) / len(own) < alone - 0.2
    assert met(both) >= 0.97 * met(drowned)


def test_a_tenant_that_is_alone_is_served_as_if_there_were_none() -> None:
    flood = stream("b", 10 * ALONE_PER_S, 2)[:1500]
    named = outcomes_of(flood)
    unnamed = outcomes_of([replace(t, tenant="") for t in flood])
    assert [o.ended_at_s for o in named] == [o.ended_at_s for o in unnamed]
