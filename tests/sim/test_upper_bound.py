"""The upper bound: what it is where it is known, and that no scheduler is above it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cato.core.ids import PoolName, TaskName
from cato.core.slo import SloMetric
from cato.lab.experiments import cato_rq, printed, saber
from cato.lab.experiments.bounds import UPPER_BOUND, Capacity, attainable
from cato.lab.experiments.common import measured
from cato.lab.experiments.free_preemption import FREE, FREE_KNOWN, attained
from cato.sim.fleet import PoolSetup
from cato.sim.tasks import SimNode, SimTask
from cato.sim.workloads import SABER_ENGINE, SEVEN_B, saber_tasks

P, Q = PoolName("p"), PoolName("q")
ALONE = replace(SEVEN_B, max_running=1)
SERVICE_S = ALONE.service_s(100, 50)
FIRST_S = ALONE.first_token_s(100)


def a_task(
    id: str, sla: float, *pools: PoolName, metric: SloMetric = SloMetric.E2E, at_s: float = 0.0
) -> SimTask:
    """A chain of equal calls; `sla` counts their time alone."""
    nodes = tuple(
        SimNode(pool, 100, 50, 50, needs=(i - 1,) if i else ()) for i, pool in enumerate(pools)
    )
    draws = (0.5,) * len(nodes)
    return SimTask(id, TaskName("t"), at_s, metric, sla * SERVICE_S, nodes, draws)


def bound(*tasks: SimTask, replicas: int = 1) -> float:
    return attainable(tasks, dict.fromkeys((P, Q), Capacity(ALONE, replicas)))


def test_a_replica_serves_what_its_time_allows_and_parts_of_tasks() -> None:
    assert bound(a_task("a", 1.5, P), a_task("b", 1.5, P)) == pytest.approx(0.75)
    assert bound(a_task("a", 1.5, P), a_task("b", 1.5, P), replicas=2) == pytest.approx(1.0)


def test_a_call_runs_on_one_replica_at_a_time() -> None:
    assert bound(a_task("a", 0.9, P), replicas=5) == 0.0


def test_a_call_waits_for_the_one_before() -> None:
    assert bound(a_task("a", 2.0, P, Q)) == pytest.approx(1.0)
    assert bound(a_task("a", 1.9, P, Q)) == 0.0
    # Both second calls would have to run in the second half of the time, on one replica.
    assert bound(a_task("a", 2.0, P, Q), a_task("b", 2.0, P, Q), replicas=1) == pytest.approx(0.5)


def test_a_ttft_objective_needs_no_more_than_the_first_token() -> None:
    sla = 1.01 * FIRST_S / SERVICE_S
    assert bound(a_task("a", sla, P, metric=SloMetric.TTFT)) == pytest.approx(1.0)


@pytest.mark.parametrize("policy", ["foresight", "ray-serve", "edf-bounded", "sjf-bounded"])
@pytest.mark.parametrize("mix", ["pattern-1", "pattern-2"])
def test_no_router_is_above_it(mix: str, policy: str) -> None:
    shares = printed.CODING["cato-rq3"].mixes[mix]
    for rate in (1.67, 3.33):
        for seed in range(2):
            highest, reached = (
                cato_rq.measured_at(shares, cato_rq.RATE, rate, name, seed)
                for name in (UPPER_BOUND, policy)
            )
            assert reached.metrics["slo_attainment"] <= highest.metrics["slo_attainment"] + 1e-9


@pytest.mark.parametrize("chunk_tokens", [None, 512])
def test_no_batching_scheduler_is_above_it(chunk_tokens: int | None) -> None:
    """Few places and a short run, so that the bound is below 1."""
    engine = replace(SABER_ENGINE, max_running=8)
    for seed, workload, rate in ((3, "W1", 5.0), (101, "W3", 20.0)):
        tasks = saber_tasks(workload, rate, 40, seed, saber.POOL)
        highest = attainable(tasks, {saber.POOL: Capacity(engine, 1)})
        assert highest < 1.0
        for name in ("saber", "foresight", "edf-bounded"):
            policies = saber.RQ1_POLICIES[name]()
            setup = PoolSetup(saber.POOL, (engine,), policies, chunk_tokens=chunk_tokens)
            assert measured([setup], tasks)["slo_attainment"] <= highest + 1e-9


# Preemption at no cost


def test_who_can_wait_is_preempted_and_goes_on() -> None:
    tasks = [a_task("long", 2.1, P), a_task("short", 1.05, P, at_s=0.3 * SERVICE_S)]
    one = {P: Capacity(ALONE, 1)}
    assert attained(tasks, one, knows_lengths=True) == 1.0
    assert attained([*tasks, a_task("hopeless", 0.9, P)], one, knows_lengths=True) == pytest.approx(
        2 / 3
    )


def test_a_call_starts_when_those_that_it_needs_have_ended() -> None:
    pools = dict.fromkeys((P, Q), Capacity(ALONE, 1))
    for sla, met in ((2.01, 1.0), (1.99, 0.0)):
        for knows in (False, True):
            assert attained([a_task("a", sla, P, Q)], pools, knows_lengths=knows) == met


@pytest.mark.parametrize(("mix", "load"), [("rq1", 0.83), ("rq2", 0.83)])
def test_lengths_are_worth_something_and_nothing_is_above_the_bound(mix: str, load: float) -> None:
    shares = printed.CODING[f"cato-{mix}"].mixes[mix]
    believed, known, most = (
        cato_rq.measured_at(shares, cato_rq.UTILIZATION, load, name, 1).metrics["slo_attainment"]
        for name in (FREE, FREE_KNOWN, UPPER_BOUND)
    )
    assert believed <= known + 0.01
    assert known <= most + 1e-9
    assert believed > most - 0.15
