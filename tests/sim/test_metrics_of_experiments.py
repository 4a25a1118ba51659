"""Every experiment that runs tasks reports the same metrics under the same names."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from cato.core.ids import PoolName, TaskName
from cato.core.slo import SloMetric
from cato.lab.experiments import (
    azure_replay,
    cace,
    cace_figures,
    cace_mixed,
    cato_rq,
    codexglue,
    coding_mixes,
    coding_scaling,
    hindsight,
    saber,
    slo_sa,
    slo_sa_figures,
    tempo,
    tempo_figures,
    tempo_hour,
)
from cato.lab.registry import STUDIES, experiment, study
from cato.policies import schedulers
from cato.sim.drawn_calls import CallSpec
from cato.sim.experiment import Options, silent
from cato.sim.plan import Planner, report_of
from cato.sim.report import Report
from cato.sim.scenario import DrawnTraffic, Scenario, ScenarioPool, Sla, TaskClass
from cato.sim.scenario_runs import as_experiment
from cato.sim.workloads import SEVEN_B

OF_TASKS = {
    "slo_attainment",
    "goodput_per_s",
    *(f"{time}_s_{of}" for time in ("ttft", "tpot", "e2e") for of in ("mean", "p95", "p99")),
    "service_gain",
    "cv_completion_over_sla",
    "finished",
    "refused",
    "tokens_per_s",
}
OF_FLEETS = OF_TASKS | {"utilization"}
OF_CARDS = OF_FLEETS | {"hit_rate", "evictions", "load_s"}
ONE = Options((1,), (schedulers.FORESIGHT,))


def a_scenario() -> Scenario:
    pool = PoolName("p")
    kind = TaskClass(
        TaskName("t"), 1.0, Sla(SloMetric.E2E, 20.0), (CallSpec(pool, 50.0, 20.0, spread=0.5),)
    )
    traffic = DrawnTraffic(1.0, "poisson", 10.0, (kind,))
    return Scenario("s", "foresight", (1, 2), (ScenarioPool(pool, SEVEN_B, 1, 2),), traffic)


def least_of_every_policy(report: Report) -> set[str]:
    """The metrics that all policies have in all settings; the report must be valid JSON, and has
    the metrics that its study names."""
    assert json.loads(report.to_json())["means"]
    if report.experiment in STUDIES:
        assert {m.metric for m in report.means} == set(study(report.experiment).metrics)
    found: dict[tuple[object, str], set[str]] = {}
    for m in report.means:
        found.setdefault((tuple(m.setting.items()), m.policy), set()).add(m.metric)
    return set.intersection(*found.values())


def test_routers_schedulers_and_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding_mixes, "TASKS", 8)
    monkeypatch.setattr(saber, "SUSTAINED", 8)
    for name in ("coding-small-first", "saber-rq2"):
        assert least_of_every_policy(experiment(name).run(ONE, silent)) >= OF_FLEETS


def test_fleets_that_scale_and_mixed_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding_scaling, "LONG_S", 20.0)
    monkeypatch.setattr(coding_scaling, "SHORT_S", 10.0)
    monkeypatch.setattr(tempo, "COUNT", 10)
    options = Options((1,), (coding_scaling.OURS,))
    scaled = experiment("coding-scaling").run(options, silent)
    assert least_of_every_policy(scaled) >= OF_FLEETS | {"mean_replicas"}
    mixed = experiment("tempo-e2e").run(ONE, silent)
    assert least_of_every_policy(mixed) >= OF_FLEETS | {"gain_share"}


def test_recorded_arrivals_and_recorded_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure_replay, "DEVELOPMENT", ((0, 20), (20, 30)))
    monkeypatch.setattr(azure_replay, "SEARCH_ROUNDS", 1)
    trace = tmp_path / "trace.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [
        f"{datetime(2023, 11, 16) + timedelta(seconds=i)}.0,400,{(8, 50, 200)[i % 3]}"
        for i in range(30)
    ]
    trace.write_text("\n".join(rows) + "\n", encoding="utf-8")
    policies = (schedulers.FORESIGHT, azure_replay.SABER, hindsight.CLAIRVOYANT)
    replayed = experiment("azure-replay").run(Options((1,), policies, trace=trace), silent)
    assert {m.policy for m in replayed.means} == set(policies)
    assert least_of_every_policy(replayed) >= OF_FLEETS

    monkeypatch.setattr(codexglue, "TASKS", 8)
    pairs = tmp_path / "pairs.json"
    lines = [json.dumps({"nl": "word " * (i + 1), "code": "x = 1\n" * (i + 1)}) for i in range(30)]
    pairs.write_text("\n".join(lines), encoding="utf-8")
    options = Options((1,), (schedulers.FORESIGHT,), dataset=pairs)
    assert least_of_every_policy(experiment("codexglue").run(options, silent)) >= OF_FLEETS


@pytest.mark.parametrize(
    "name",
    [
        *(f"cato-rq{n}" for n in (1, 2, 3, 4)),
        "saber-estimators",
        "tempo-ablation",
        *(f"tempo-fig{n}" for n in (9, 14, 16, 17, 18, 19)),
        *(f"cace-{rest}" for rest in ("rq2", "ablation", "mixed", "windows")),
        *(f"saber-fig{n}" for n in (4, 6, 7)),
        *(f"slo-sa{rest}" for rest in ("", "-fig8", "-fig9", "-fig10", "-fig11")),
    ],
)
def test_a_study_names_the_metrics_of_its_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        cace_figures: {"QUICK_WINDOWS": 2},
        cace_mixed: {"COUNT": 8},
        cace: {"COUNT": 8},
        cato_rq: {"SETTLED_REQUESTS": 40},
        slo_sa: {"SIZES": (4,), "DRAWS": 1},
        slo_sa_figures: {"DRAWS": 1},
        tempo: {"QUICK_COUNT": 20},
        tempo_figures: {"QUICK_COUNT": 20},
        tempo_hour: {"HOUR_S": 60.0, "WINDOW_S": 10.0},
    }
    for module, constants in few.items():
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
    chosen = study(name)
    cells = chosen.cells(Options((1,), quick=True))
    samples = [
        cell.sample(arm, 1)
        for cell in (cells[0], cells[-1])
        for arm in [a for a in chosen.arms if a in (cell.arms or chosen.arms)][:4]
    ]
    assert {m.metric for m in chosen.means(samples)} == set(chosen.metrics)


def test_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cace, "COUNT", 8)
    report = experiment("cace-rq1").run(Options((1,), (cace.LRU,)), silent)
    assert least_of_every_policy(report) >= OF_CARDS
    (busy,) = {
        m.mean
        for m in report.means
        if m.metric == "utilization" and m.setting == {"pattern": "skewed", "rate_per_s": 0.8}
    }
    assert 0 < busy < 1


def test_a_users_own_fleet_and_a_plan_of_it() -> None:
    scenario = a_scenario()
    report = as_experiment(scenario).run(ONE, silent)
    of_all = {m.metric for m in report.means if m.setting == {"task": "all"}}
    of_class = {m.metric for m in report.means if m.setting == {"task": "t"}}
    assert of_all >= OF_FLEETS
    assert of_class >= OF_TASKS
    plan = Planner.of(scenario, 0.5, lambda *_: None).plan("foresight")
    assert least_of_every_policy(report_of(scenario, 0.5, [plan])) >= OF_FLEETS
