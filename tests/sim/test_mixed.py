"""One pool on accelerators of two speeds: 2 fast replicas and 4 that are 2.5 times slower."""

from __future__ import annotations

import pytest

from cato.core.policies import Policies
from cato.policies.schedulers import BY_NAME
from cato.sim import mixed
from cato.sim.fleet import Fleet, PoolSetup

TASKS = 400
SEEDS = (10, 11, 12)


def attainment(policies: Policies, workload: str) -> float:
    met = [
        outcome.is_met
        for seed in SEEDS
        for outcome in Fleet([PoolSetup(mixed.POOL, mixed.FLEET, policies)]).run(
            mixed.tasks_of(workload, seed, TASKS)
        )
    ]
    return sum(met) / len(met)


@pytest.mark.parametrize("workload", ["W2", "W3"])
def test_the_default_meets_more_slos_than_routers_that_count_or_wait(workload: str) -> None:
    ours = attainment(BY_NAME["foresight"](), workload)
    for router in ("power-of-two", "least-wait"):
        assert ours >= attainment(BY_NAME[router](), workload) + 0.05
