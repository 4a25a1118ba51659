"""Fleets that grow and shrink, and the experiment that rests on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kits.builders import a_profile

from cato.core.demand import CallKind
from cato.core.errors import UnknownNameError
from cato.core.ids import NodeId, PoolName, TaskName
from cato.core.scaling import PoolLoad, Scale
from cato.core.slo import SloMetric
from cato.lab.experiments import coding_scaling
from cato.lab.registry import experiment
from cato.policies import schedulers
from cato.policies.scaling.forecast import Forecast
from cato.sim.autoscale import AutoscaledFleet, PoolPoint, ScaledPool, follow_ups_of
from cato.sim.experiment import Options, silent
from cato.sim.fleet import PoolSetup
from cato.sim.report import Report, Setting
from cato.sim.tasks import SimNode, SimTask
from cato.sim.workloads import SEVEN_B

P, Q = PoolName("p"), PoolName("q")
# A call of n tokens takes n seconds.
PROFILE = a_profile(prefill_s=1.0, token_s=1.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """Wants what the plan says from each instant on; remembers nothing."""

    steps: tuple[tuple[float, int], ...]

    def initial(self) -> None: ...

    def decide(self, load: PoolLoad, state: None) -> tuple[Scale, None]:
        return Scale([n for at_s, n in self.steps if at_s <= load.now_s][-1], "planned"), None


def a_pool(scaling: Plan | Forecast | None, *, replicas: int = 1) -> ScaledPool:
    setup = PoolSetup(
        P, (PROFILE,) * replicas, schedulers.foresight(), max_running=1, cold_start_s=10.0
    )
    return ScaledPool(setup, scaling)


def a_task(id: str, at_s: float, *, tokens: int = 5) -> SimTask:
    node = SimNode(P, 10, tokens, tokens)
    return SimTask(id, TaskName("t"), at_s, SloMetric.E2E, 20.0, (node,), (0.5,))


def at(fleet: AutoscaledFleet, at_s: float) -> tuple[int, int]:
    """Ready and provisioned after the look at `at_s`."""
    point: PoolPoint = next(p for p in fleet.series[P] if p.at_s == at_s)
    return point.ready, point.provisioned


def test_a_replica_that_is_ordered_holds_a_card_at_once_and_serves_after_the_cold_start() -> None:
    fleet = AutoscaledFleet([a_pool(Plan(((0.0, 1), (5.0, 3))))], {})
    fleet.run([], 30.0)
    assert [at(fleet, t) for t in (4.5, 5.0, 14.5, 15.5)] == [(1, 1), (1, 3), (1, 3), (3, 3)]


def test_an_order_is_taken_back_before_a_replica_that_serves_goes() -> None:
    fleet = AutoscaledFleet([a_pool(Plan(((0.0, 3), (5.0, 2), (6.0, 1))), replicas=2)], {})
    fleet.run([], 20.0)
    assert [at(fleet, t) for t in (4.5, 5.0, 6.0, 15.0)] == [(2, 3), (2, 2), (1, 1), (1, 1)]


def test_a_replica_that_goes_finishes_what_it_runs() -> None:
    fleet = AutoscaledFleet([a_pool(Plan(((0.0, 2), (1.0, 1))), replicas=2)], {})
    outcomes = fleet.run([a_task("1", 0.0), a_task("2", 0.0)], 20.0)
    assert [o.e2e_s for o in outcomes] == pytest.approx([5.0, 5.0])
    assert [at(fleet, t) for t in (1.0, 4.5, 5.5)] == [(1, 2), (1, 2), (1, 1)]


def test_counts_stay_within_the_bounds_whatever_the_policy_wants() -> None:
    fleet = AutoscaledFleet([a_pool(Plan(((0.0, 99), (20.0, 0))))], {})
    fleet.run([], 40.0)
    assert at(fleet, 15.0) == (6, 6)
    assert at(fleet, 39.5) == (1, 1)


def test_looks_go_on_until_the_last_task_has_ended() -> None:
    fleet = AutoscaledFleet([a_pool(None)], {})
    outcomes = fleet.run([a_task(str(i), 0.0) for i in range(4)], 2.0)
    assert all(o.is_finished for o in outcomes)
    assert fleet.series[P][-1].at_s >= 20.0
    assert fleet.mean_provisioned(2.0) == 1.0


def test_late_binding_lets_a_new_replica_take_what_waits() -> None:
    tasks = [a_task(str(i), 0.0) for i in range(6)]
    fixed = AutoscaledFleet([a_pool(None)], {}).run(tasks, 60.0)
    scaled = AutoscaledFleet([a_pool(Forecast())], {}).run(tasks, 60.0)
    assert max(o.e2e_s for o in fixed) == pytest.approx(30.0)
    assert max(o.e2e_s for o in scaled) <= 20.0


def test_follow_ups_share_a_call_among_those_it_needs() -> None:
    nodes = (
        SimNode(P, 10, 2, 2),
        SimNode(P, 10, 3, 3),
        SimNode(Q, 10, 8, 8, needs=(0, 1)),
    )
    task = SimTask("1", TaskName("t"), 0.0, SloMetric.E2E, 60.0, nodes, (0.1, 0.2, 0.3))
    after = follow_ups_of([task], {P: PROFILE, Q: PROFILE}, 1)
    first, second, last = (after[CallKind(TaskName("t"), NodeId(str(i)))] for i in range(3))
    assert first.work_s == second.work_s == {Q: 4.0}
    assert (first.begins, first.share) == (True, 0.5)
    assert (last.work_s, last.begins) == ({}, False)


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    methods = (
        coding_scaling.OURS,
        coding_scaling.PUBLISHED,
        coding_scaling.ZERO_DELAY,
        coding_scaling.CEILING,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coding_scaling, "LONG_S", 60.0)
        patch.setattr(coding_scaling, "SHORT_S", 30.0)
        yield experiment("coding-scaling").run(Options((0, 1), methods), silent)


def test_the_load_of_a_run_is_its_utilization_of_the_largest_fleet() -> None:
    setting: Setting = {"utilization": 0.5, "arrivals": "poisson", "duration_s": 2000.0}
    tasks = coding_scaling.tasks_of(setting, 3)
    work_s = sum(
        SEVEN_B.service_s(n.prompt_tokens, n.output_tokens) for t in tasks for n in t.nodes
    )
    assert work_s / 2000.0 / 12 == pytest.approx(0.5, rel=0.05)


@pytest.mark.slow
def test_no_method_beats_the_largest_fleet_and_each_pays_for_what_it_has(report: Report) -> None:
    for m in report.means:
        if m.metric == "slo_attainment":
            ceiling = report.mean("slo_attainment", coding_scaling.CEILING, **m.setting)
            assert m.mean <= ceiling.mean + 0.02
        if m.metric == "mean_replicas":
            assert 2.0 <= m.mean <= 12.0 + 1e-9
    for utilization in coding_scaling.UTILIZATIONS:
        setting: dict[str, str | float] = {
            "utilization": utilization,
            "arrivals": "poisson",
            "duration_s": 30.0,
        }
        ours = report.mean("slo_attainment", coding_scaling.OURS, **setting)
        assert ours.mean > report.mean("slo_attainment", coding_scaling.PUBLISHED, **setting).mean
    assert len(report.targets) == 8


def test_the_same_seeds_give_the_same_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding_scaling, "LONG_S", 40.0)
    monkeypatch.setattr(coding_scaling, "SHORT_S", 20.0)
    options = Options((0,), (coding_scaling.OURS, coding_scaling.ZERO_DELAY))
    one, two = (experiment("coding-scaling").run(options, silent) for _ in range(2))
    assert one.to_json() == two.to_json()


@pytest.mark.slow
def test_every_picture_is_drawn(report: Report, tmp_path: Path) -> None:
    series = report.extra["series"]
    assert isinstance(series, dict)
    assert len(series) == 6
    one = replace(report, extra={"series": dict(list(series.items())[:1])})
    paths = experiment("coding-scaling").plot(one, tmp_path)
    assert len(paths) == 3
    assert all(p.stat().st_size > 10_000 for p in paths)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="cato \\+ cato"):
        experiment("coding-scaling").run(Options((0,), ("cato",)), silent)
