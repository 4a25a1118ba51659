"""`cato bench live` on a Ray of its own, over HTTP, with schedulers changed in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.live.conftest import ROOT
from tests.live.test_profile import run_cato

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
TASKS = 20


def small_fleet(folder: Path) -> Path:
    """One replica a pool instead of six, of many calls at a time."""
    config = yaml.safe_load((ROOT / "deployments/bench/coding-mixes.yaml").read_text())
    for pool in config["applications"][0]["args"]["pools"].values():
        for deployment in pool["deployments"].values():
            deployment["replicas"] = {"min": 1, "initial": 1, "max": 1}
            deployment["engine"]["max_num_seqs"] = 8
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_both_arms_answer_every_task_and_the_report_says_how(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = (
        f"bench live coding-mixes --workload equal-shares --tasks {TASKS} --seeds 1 --slowdown 0.3"
    )
    arms = ("foresight", "power-of-two", "ray-serve")
    chosen = [word for arm in arms for word in ("--arm", arm)]
    text = run_cato(
        *command.split(),
        *chosen,
        "--warm-up=20",
        f"--deployment={small_fleet(tmp_path)}",
        f"--json={results}",
        timeout_s=280,
    )
    assert "engines are simulated" in text
    report = json.loads(results.read_text())
    assert (report["lost"], report["problems"], report["other_lengths"]) == (0, [], 0)
    assert report["simulated_engines"] is True
    workload = report["workloads"]["equal-shares"]
    assert tuple(workload["arms"]) == arms
    for arm in workload["arms"].values():
        assert arm["tasks"] == TASKS
        assert 0 <= arm["attainment"]["low"] <= arm["attainment"]["high"] <= 1
        assert 0 < arm["ttft"]["p50_ms"] <= arm["e2e"]["p95_ms"]
    assert "simulated" in workload["arms"]["power-of-two"]
    assert "simulated" in workload["arms"]["ray-serve"]
    assert set(workload["differences"]) == {"foresight - power-of-two", "foresight - ray-serve"}
