"""`cato bench accelerator`: that all of it runs, on a CPU; and on a card, that its claims hold.

CATO_ACCELERATOR=FILE names a report of an earlier run: its findings are judged, and nothing runs.
Without one, and with a card, what the file one-card-7b.yaml asks for is measured here;
CATO_CARD_MODELS names the folder with its models.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cato.control import nvidia
from cato.lab.accelerator.plan import ITEMS
from cato.lab.accelerator.report import findings
from tests.live.conftest import ROOT
from tests.live.test_profile import run_cato

FOLDER = ROOT / "deployments" / "accelerator"
REPORT_VARIABLE, MODELS_VARIABLE = "CATO_ACCELERATOR", "CATO_CARD_MODELS"
LETTERS = [item.letter for item in ITEMS]


@pytest.mark.live
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_all_of_it_runs_on_a_cpu_and_is_not_measured_twice(tmp_path: Path) -> None:
    file, profiles = tmp_path / "report.json", tmp_path / "profiles"
    words = ["bench", "accelerator", str(FOLDER / "one-core.yaml"), "--quick", "--json", str(file)]
    text = run_cato(*words, "--profiles", str(profiles), timeout_s=850)
    steps = {step["letter"]: step for step in json.loads(file.read_text())["steps"]}
    assert {letter: step["reason"] for letter, step in steps.items()} == dict.fromkeys(LETTERS, "")
    assert [p.name for p in profiles.iterdir()] == ["demo-coder@cpu.yaml"]
    assert "no GPU" in text
    found = {letter: step["result"] for letter, step in steps.items()}
    assert found["a"]["memory_is_of"] == "host"
    assert found["a"]["kv_capacity_tokens"] > 1024
    assert found["d"]["lost"] == 0
    assert (found["e"]["whole"], found["e"]["changed_before"]) == (found["e"]["streams"], 0)
    assert all(row["same_answers"] for row in found["f"]["models"].values())
    assert any(row["mixed_s"] for row in found["g"]["steps"])
    [prompt] = found["h"]["prompts"]
    assert prompt["cached_tokens"] > prompt["pushed_out_cached_tokens"] == 0
    before = file.read_text()
    run_cato(*words, timeout_s=180)
    assert json.loads(file.read_text()) == json.loads(before)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a card has shown; skips where there is neither a card nor a report of one."""
    named = os.environ.get(REPORT_VARIABLE)
    if named is None:
        if not nvidia.cards():
            pytest.skip(f"no NVIDIA card here, and {REPORT_VARIABLE} names no report of one")
        models = os.environ.get(MODELS_VARIABLE)
        if models is None:
            pytest.skip(f"{MODELS_VARIABLE} does not say where qwen-7b and qwen-1.5b are")
        file = tmp_path_factory.mktemp("card") / "report.json"
        words = ("bench", "accelerator", str(FOLDER / "one-card-7b.yaml"), "--models", models)
        run_cato(*words, "--json", str(file), timeout_s=3000)
        named = str(file)
    found: dict[str, Any] = json.loads(Path(named).read_text())
    if not any(step["on"] == "gpu" for step in found["steps"]):
        pytest.skip(f"{named} is of no card")
    return found


def holds(report: dict[str, Any], letter: str) -> None:
    """All claims of an item hold; skips when it was not measured."""
    steps = [s for s in report["steps"] if s["letter"] == letter]
    if not any(s["status"] == "done" for s in steps):
        reasons = "; ".join(f"{s['status']}: {s['reason']}" for s in steps) or "not asked for"
        pytest.skip(f"item {letter} was not measured ({reasons})")
    claims = [row for row in findings(report) if row.letter == letter and row.holds is not None]
    assert claims
    assert [f"{row.what}: {row.value}" for row in claims if not row.holds] == []


@pytest.mark.gpu
@pytest.mark.live
@pytest.mark.timeout(3600)
class TestOnACard:
    def test_the_memory_of_a_model_is_its_cards(self, report: dict[str, Any]) -> None:
        found = [s["result"] for s in report["steps"] if s["letter"] == "a" and s["result"]]
        if not found:
            pytest.skip("item a was not measured")
        for result in found:
            assert result["memory_is_of"] == "cards"
            asleep = result["sleep"]["asleep_bytes"]
            assert 0 < asleep < result["memory_bytes"] / 2

    def test_a_profile_predicts_a_mixed_run_within_ten_percent(
        self, report: dict[str, Any]
    ) -> None:
        holds(report, "b")

    def test_a_call_costs_no_more_than_on_plain_serve(self, report: dict[str, Any]) -> None:
        holds(report, "c")

    def test_schedulers_do_as_the_simulator_says_within_three_points(
        self, report: dict[str, Any]
    ) -> None:
        holds(report, "d")

    def test_a_killed_engine_costs_no_answer(self, report: dict[str, Any]) -> None:
        holds(report, "e")

    def test_waking_takes_a_fifth_of_loading(self, report: dict[str, Any]) -> None:
        holds(report, "f")

    def test_adapters_share_a_batch(self, report: dict[str, Any]) -> None:
        holds(report, "g")

    def test_the_hosts_memory_is_faster_than_computing(self, report: dict[str, Any]) -> None:
        holds(report, "h")
