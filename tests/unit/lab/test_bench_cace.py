"""The live experiment of many models on few cards, as far as it needs no Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cato.config.deploy_file import load_deploy_file
from cato.core.errors import InputError, UnknownNameError
from cato.core.slots import LoadCounts
from cato.lab.live import cace, cace_cases, cace_report
from cato.profiles.load import check_profiles, load_profiles
from cato.sim import card_workload, cards
from cato.workflows.load import load_workflows

METRICS = dict.fromkeys(cace_cases.METRICS, 1.0)


def a_run(arm: str, seed: int, case: str, **metrics: float) -> cace_cases.Run:
    made = {**METRICS, **metrics}
    return cace_cases.Run(cace_cases.workload_name("skewed", case), arm, seed, made, made, ())


def test_its_deployment_has_the_models_of_the_simulator_with_all_times_scaled(
    tmp_path: Path,
) -> None:
    topology = load_deploy_file(cace.write_deployment(tmp_path, 0.1)).topology
    (pool,) = topology.shared_pools
    assert pool.deployments[0].initial_replicas == cards.CARDS
    hosted = {h.model.name: h for h in pool.models}
    assert len(hosted) == len(card_workload.models()) == 16
    for facts in card_workload.models():
        one = hosted[cace.served_name(facts.name)]  # type: ignore[index]
        assert one.load_s == pytest.approx(0.1 * facts.load_s)
        assert one.reload_s == pytest.approx(0.1 * facts.reload_s)
        assert one.slo_s == pytest.approx(0.1 * facts.slo_s)
        assert one.weights_bytes == facts.weights_bytes
    profiles = load_profiles(tmp_path / "profiles")
    check_profiles(replace(topology, profiles_dir=str(tmp_path / "profiles")), profiles)
    whole = card_workload.PROFILES[card_workload.COMPLETION]
    assert list(load_workflows(tmp_path / "workflows")) == [cace_cases.NAME]
    fast = profiles["completion@bench"]
    assert fast.service_s(600, 25) == pytest.approx(0.1 * whole.service_s(600, 25))


def test_goals_compare_arms_seed_by_seed() -> None:
    runs = [
        a_run("foresight", 1, "in-order at 0.2/s", hit_rate=0.60),
        a_run("lru", 1, "in-order at 0.2/s", hit_rate=0.50),
        a_run("foresight", 2, "in-order at 0.2/s", hit_rate=0.58),
        a_run("lru", 2, "in-order at 0.2/s", hit_rate=0.52),
        a_run("foresight, queue-aware", 1, "overload", ttft_s_mean=2.0),
        a_run("lru, in-order", 1, "overload", ttft_s_mean=8.0),
        a_run("foresight, queue-aware", 2, "overload", ttft_s_mean=2.0),
        a_run("lru, in-order", 2, "overload", ttft_s_mean=4.0),
    ]
    workloads = tuple(dict.fromkeys(r.workload for r in runs))
    settings = cace_cases.Settings((1, 2), workloads=workloads)
    report = cace_report.as_json(runs, settings, {}, "cato bench live cace")
    reached = {g["workload"]: (g["least"], *g["measured"]) for g in report["goals"]}
    assert reached == {
        "skewed, in-order at 0.2/s": (6.0, pytest.approx(8.0), pytest.approx(2.0)),
        "skewed, overload": (2.5, pytest.approx(3.0), pytest.approx(1.0)),
    }
    assert cace_report.tables(report).renderables


def test_what_was_simulated_must_be_within_a_tenth() -> None:
    simulated = METRICS | {"hit_rate": 0.5, "ttft_s_mean": 4.0, "load_s": 100.0}
    near = {"hit_rate": 0.46, "ttft_s_mean": 4.3, "load_s": 100.0}
    runs = [replace(a_run("lru", 1, "in-order at 0.2/s", **near), simulated=simulated)]
    runs.append(replace(runs[0], arm="lfu", measured=simulated | {"ttft_s_mean": 4.5}))
    runs.append(replace(runs[0], arm="cace", measured=simulated | {"hit_rate": 0.42}))
    few, more = simulated | {"hit_rate": 0.03}, simulated | {"hit_rate": 0.037}
    runs.append(replace(runs[0], arm="foresight", measured=more, simulated=few))
    report = cace_report.as_json(
        runs, cace_cases.Settings((1,), workloads=(runs[0].workload,)), {}, ""
    )
    met = {found["arm"]: found["met"] for found in report["simulated"]}
    assert met == {"lru": True, "lfu": False, "cace": False, "foresight": True}
    lfu = report["simulated"][1]
    assert lfu["ratios"] == pytest.approx({"hit_rate": 1.0, "ttft_s_mean": 1.125, "load_s": 1.0})


def test_some_arms_can_be_chosen() -> None:
    settings = cace_cases.Settings(
        workloads=("skewed, in-order at 0.2/s",), chosen=("lru", "foresight")
    )
    assert [a.name for a in settings.arms_of("skewed, in-order at 0.2/s")] == ["foresight", "lru"]
    with pytest.raises(UnknownNameError, match="cace, foresight, lfu, lru"):
        cace_cases.Settings(workloads=("skewed, in-order at 0.2/s",), chosen=("lru", "LRU"))
    with pytest.raises(InputError, match="its arms are foresight, queue-aware"):
        cace_cases.Settings(chosen=("lru",))


def test_what_is_measured_is_told_in_the_seconds_of_the_experiment() -> None:
    arrivals = card_workload.arrivals(card_workload.PATTERNS[0], 1.0, 2, cace.generator(0))
    seen = [cace.Seen(0.05, 0.1), cace.Seen(0.15, 0.2, "500: broken")]
    counts = LoadCounts(served=2, hits=1, loads=1, load_s=1.5)
    found = cace.metrics_of(arrivals, seen, counts, 0.1)
    assert found["ttft_s_mean"] == pytest.approx(1.0)
    assert found["load_s"] == pytest.approx(15.0)
    assert found["hit_rate"] == 0.5
    assert found["slo_attainment"] <= 0.5  # what broke is missed


def test_a_workload_that_is_none_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="skewed, in-order"):
        cace_cases.Settings(workloads=("skewed",))
