"""Scenarios in virtual time, and the fewest replicas that they need."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.errors import InputError, UnknownNameError
from cato.core.ids import PoolName, TaskName
from cato.core.slo import SloMetric
from cato.sim.drawn_calls import CallSpec
from cato.sim.experiment import Options, silent
from cato.sim.plan import Counts, Planner, Trial, lower_bound, report_of, smallest
from cato.sim.scenario import (
    DrawnTraffic,
    Scenario,
    ScenarioPool,
    Sla,
    TaskClass,
    TraceClass,
    TraceTraffic,
)
from cato.sim.scenario_runs import as_experiment, run_once
from cato.sim.scenario_tasks import tasks_of
from cato.sim.traces import TraceRow
from cato.sim.workloads import SEVEN_B

FAST, DEEP = PoolName("fast"), PoolName("deep")
E2E_20 = Sla(SloMetric.E2E, 20.0)


def a_call(pool: PoolName = FAST, *, needs: tuple[int, ...] = (), chance: float = 1.0) -> object:
    return CallSpec(pool, 100, 50, needs, chance=chance, spread=0.5)


def a_scenario(
    *calls: object,
    rate_per_s: float = 1.0,
    sla: Sla = E2E_20,
    cold_start_s: float = 0.0,
    max_replicas: int = 4,
    seeds: int = 2,
    arrivals: str = "poisson",
) -> Scenario:
    kind = TaskClass(TaskName("t"), 1.0, sla, calls or (a_call(),))  # type: ignore[arg-type]
    names = dict.fromkeys(c.pool for c in kind.calls)
    pools = tuple(
        ScenarioPool(name, SEVEN_B, 1, max_replicas, 1, cold_start_s=cold_start_s) for name in names
    )
    traffic = DrawnTraffic(rate_per_s, arrivals, 60.0, (kind,))
    return Scenario("s", "foresight", tuple(range(seeds)), pools, traffic)


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "burst"])
def test_tasks_arrive_up_to_the_end_and_at_the_rate(arrivals: str) -> None:
    scenario = a_scenario(rate_per_s=20.0, arrivals=arrivals)
    times = [t.arrived_at_s for t in tasks_of(scenario, 1)]
    assert times == sorted(times)
    assert 59.0 < times[-1] < 60.0
    assert len(times) == pytest.approx(1200, rel=0.2)


def test_tasks_depend_on_the_seed_and_not_on_the_fleet() -> None:
    scenario = a_scenario()
    larger = scenario.with_replicas({FAST: 3})
    assert tasks_of(scenario, 1) == tasks_of(larger, 1)
    assert tasks_of(scenario, 1) != tasks_of(scenario, 2)


def test_what_needs_a_call_that_does_not_happen_needs_its_needs() -> None:
    calls = (a_call(), a_call(needs=(0,), chance=1e-9), a_call(needs=(1,)))
    for task in tasks_of(a_scenario(*calls), 3):
        assert [n.needs for n in task.nodes] == [(), (0,)]
        assert task.nodes[0].downstream_s > task.nodes[1].downstream_s == 0


def test_downstream_work_ends_at_the_first_token_under_a_ttft_sla() -> None:
    def downstream_s(sla: Sla) -> float:
        task = tasks_of(a_scenario(a_call(), a_call(needs=(0,)), sla=sla), 0)[0]
        return task.nodes[0].downstream_s

    assert downstream_s(Sla(SloMetric.TTFT, 5.0)) == SEVEN_B.first_token_s(100)
    assert downstream_s(E2E_20) == SEVEN_B.service_s(100, 50)


def test_a_cold_fleet_serves_nothing_before_it_has_started() -> None:
    cold = a_scenario(cold_start_s=30.0)
    run = run_once(cold, "foresight", tasks_of(cold, 0))
    warm = run_once(a_scenario(), "foresight", tasks_of(cold, 0))
    assert run.metrics["ttft_s_mean"] > 5.0 > warm.metrics["ttft_s_mean"]
    # Clients wait a minute; calls that would take longer are refused.
    assert run.metrics["finished"] + run.metrics["refused"] == 1.0
    assert run.metrics["refused"] < 0.2
    assert run.metrics["slo_attainment"] > 0.7


def test_an_unknown_scheduler_is_an_error_that_names_the_known() -> None:
    with pytest.raises(UnknownNameError, match="power-of-two"):
        run_once(a_scenario(), "fastest", [])
    with pytest.raises(UnknownNameError, match="power-of-two"):
        as_experiment(a_scenario()).run(Options((0,), ("fastest",)), silent)


def test_a_scenario_reports_all_tasks_and_each_class() -> None:
    report = as_experiment(a_scenario()).run(Options((0, 1)), silent)
    for scheduler in ("foresight", "ray-serve"):
        whole = report.mean("slo_attainment", scheduler, task="all")
        assert whole == replace(
            report.mean("slo_attainment", scheduler, task="t"), setting={"task": "all"}
        )
    assert report.difference("slo_attainment", "foresight", "ray-serve", task="all").n == 2
    assert report.simulated


def test_a_replay_learns_from_the_first_half_and_runs_the_second() -> None:
    rows = tuple(TraceRow(10.0 * i, 100, 5 if i < 30 else 15) for i in range(60))
    classes = (TraceClass(TaskName("short"), math.inf, E2E_20),)
    traffic = TraceTraffic(rows, FAST, 2.0, 100.0, classes)
    tasks = tasks_of(replace(a_scenario(), traffic=traffic), 0)
    assert [t.arrived_at_s for t in tasks] == [5.0 * i for i in range(20)]
    assert {t.nodes[0].output_tokens for t in tasks} == {15}
    assert {t.nodes[0].expected_tokens for t in tasks} == {5}


# Plans


def a_trial(counts: Counts, is_enough: bool) -> Trial:
    return Trial("x", counts, 0.0, 0.0, 0.0, 2, False, is_enough)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.integers(1, 20),
)
def test_the_smallest_total_is_found_as_by_trying_all(
    bounds: list[int], weights: list[int], need: int
) -> None:
    """Enough: a weighted sum of the counts and each of them at least 1; rises with every count."""

    def is_enough(counts: Counts) -> bool:
        return sum(w * n for w, n in zip(weights, counts, strict=False)) >= need

    found = smallest(tuple(bounds), lambda c: a_trial(c, is_enough(c)))
    every: list[Counts] = [()]
    for bound in bounds:
        every = [(*c, n) for c in every for n in range(1, bound + 1)]
    best = min((sum(c) for c in every if is_enough(c)), default=None)
    assert (found.replicas if found else None) == best


def test_the_bound_is_students() -> None:
    # t of 4 degrees at 0.95 is 2.1318; the standard error of 1..5 is sqrt(2.5 / 5).
    assert lower_bound([1, 2, 3, 4, 5]) == pytest.approx(3 - 2.1318 * math.sqrt(0.5), abs=1e-3)
    assert lower_bound([1.0]) == -math.inf


def test_a_plan_is_enough_and_one_less_is_not() -> None:
    scenario = a_scenario(a_call(), a_call(DEEP, needs=(0,)), rate_per_s=1.5)
    planner = Planner.of(scenario, 0.9, lambda *_: None)
    plan = planner.plan("foresight")
    assert plan.found is not None
    assert plan.found.lower >= 0.9
    counts = plan.found.counts
    assert sum(counts) > 2
    fewer = [(counts[0] - 1, counts[1]), (counts[0], counts[1] - 1)]
    assert not any(planner.trial("foresight", c).is_enough for c in fewer if min(c) > 0)


def test_seeds_are_left_out_once_the_goal_is_out_of_reach() -> None:
    scenario = a_scenario(rate_per_s=5.0, seeds=6, max_replicas=1)
    trial = Planner.of(scenario, 0.95, lambda *_: None).trial("power-of-two", (1,))
    assert trial.is_cut
    assert trial.seeds < 6
    assert not trial.is_enough


def test_the_pool_that_is_short_is_named() -> None:
    scenario = a_scenario(a_call(), rate_per_s=3.0, max_replicas=1)
    plan = Planner.of(scenario, 0.95, lambda *_: None).plan("foresight")
    assert plan.found is None
    assert "pool 'fast' is short: 4 of it would give" in plan.why_not
    report = report_of(scenario, 0.95, [plan])
    assert '"why_not"' in report.to_json()


def test_an_sla_that_no_number_of_replicas_meets_is_said_to_be_one() -> None:
    scenario = a_scenario(sla=Sla(SloMetric.E2E, 0.1))
    plan = Planner.of(scenario, 0.95, lambda *_: None).plan("foresight")
    assert plan.found is None
    assert "more replicas of no pool help. The SLA of 't'" in plan.why_not


@pytest.mark.parametrize(("goal", "seeds"), [(0.0, 2), (1.0, 2), (95.0, 2), (0.9, 1)])
def test_what_cannot_be_planned_for_is_refused(goal: float, seeds: int) -> None:
    with pytest.raises(InputError):
        Planner.of(a_scenario(seeds=seeds), goal, lambda *_: None)
