"""The experiment with lengths of real pairs: its tasks, its report, its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cato.core.errors import InputError
from cato.sim.experiment import Options, silent
from cato.sim.experiments import codexglue
from cato.sim.experiments.registry import experiment
from cato.sim.traces import load_pairs


def a_dataset(folder: Path, pairs: int = 60) -> Path:
    """Pairs whose answer is three times as long as the prompt."""
    path = folder / "pairs.json"
    lines = [
        json.dumps({"nl": "n" * (40 + 8 * i), "code": "c" * 3 * (40 + 8 * i)}) for i in range(pairs)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_tasks_have_the_lengths_of_pairs_that_taught_nothing(tmp_path: Path) -> None:
    tasks = codexglue.tasks_of(a_dataset(tmp_path), 0.5, 3, 200)
    lengths = {(t.nodes[0].prompt_tokens, t.nodes[0].output_tokens) for t in tasks}
    drawn = load_pairs(a_dataset(tmp_path))[1::2]
    assert lengths <= {(p.source_tokens, p.target_tokens) for p in drawn}
    assert len(lengths) > 20
    assert len({t.nodes[0].expected_tokens for t in tasks}) == 1
    assert [t.arrived_at_s for t in tasks] == sorted(t.arrived_at_s for t in tasks)
    assert tasks == codexglue.tasks_of(a_dataset(tmp_path), 0.5, 3, 200)


def test_the_report_compares_the_default_and_tells_the_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codexglue, "TASKS", 60)
    monkeypatch.setattr(codexglue, "UTILIZATIONS", (0.3, 0.9))
    options = Options((0, 1), ("foresight", "power-of-two"), dataset=a_dataset(tmp_path))
    report = experiment("codexglue").run(options, silent)
    gaps = {d.setting["load"]: d.mean for d in report.differences if d.metric == "slo_attainment"}
    assert gaps[0.9] > gaps[0.3] >= -0.02
    lengths = report.extra["lengths"]
    assert isinstance(lengths, dict)
    assert lengths["pairs"] == 60
    assert lengths["output_tokens_mean"] == pytest.approx(
        3 * lengths["prompt_tokens_mean"], rel=0.01
    )
    assert lengths["correlation"] == pytest.approx(1.0, abs=0.001)
    (picture,) = experiment("codexglue").plot(report, tmp_path)
    assert picture.stat().st_size > 1000


def test_a_dataset_is_needed_and_must_hold_enough(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--dataset FILE"):
        experiment("codexglue").run(Options((0,)), silent)
    with pytest.raises(InputError, match="20 are the least"):
        experiment("codexglue").run(Options((0,), dataset=a_dataset(tmp_path, 5)), silent)
