"""The experiment with lengths of real pairs: its tasks, its report, its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cato.core.errors import InputError
from cato.core.slo import SloMetric
from cato.lab.experiments import codexglue, codexglue_tasks
from cato.lab.registry import experiment
from cato.sim.experiment import Options, silent
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


# All four tasks


def a_folder(folder: Path) -> Path:
    """Files of three tasks; of the fourth too few."""
    a_dataset(folder)
    for suffix in ("java", "cs"):
        (folder / f"both.{suffix}").write_text("x();\n" * 50)
    (folder / "only.py").write_text("import this\n" * 50)
    return folder


def test_a_folder_holds_the_tasks_that_its_files_are_of(tmp_path: Path) -> None:
    pairs = codexglue_tasks.pairs_of(a_folder(tmp_path))
    assert set(pairs) == {"generation", "summarization", "translation"}
    generated, summed = pairs["generation"][0], pairs["summarization"][0]
    assert (summed.source_tokens, summed.target_tokens) == (
        generated.target_tokens,
        generated.source_tokens,
    )
    for i in range(codexglue_tasks.LEAST_PAIRS):
        (tmp_path / f"m{i}.py").write_text("def f():\n    return 1\n" * 9)
    codexglue_tasks.pairs_of.cache_clear()
    assert "completion" in codexglue_tasks.pairs_of(tmp_path)
    codexglue_tasks.pairs_of.cache_clear()


def test_generation_and_translation_make_two_calls_and_the_judged_metrics_are_the_papers(
    tmp_path: Path,
) -> None:
    tasks = codexglue_tasks.tasks_of(a_folder(tmp_path), 0.5, 1)
    by_name = {str(t.name): t for t in tasks}
    generation, summarization = by_name["generation"], by_name["summarization"]
    first, second = generation.nodes
    assert second.needs == (0,)
    assert second.prompt_tokens == first.prompt_tokens + first.output_tokens
    assert (generation.metric, summarization.metric) == (SloMetric.TTFT, SloMetric.E2E)
    assert len(summarization.nodes) == 1
    assert len(by_name["translation"].nodes) == 2


def test_the_four_tasks_run_in_overload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codexglue_tasks, "TASKS", 60)
    chosen = experiment("codexglue-tasks")
    options = Options((1,), ("foresight", "round-robin"), dataset=a_folder(tmp_path), quick=True)
    report = chosen.run(options, silent)
    none = "attainment_completion"  # the folder holds no file of it
    assert {m.metric for m in report.means} == set(chosen.metrics) - {none}
    ours, turns = (
        report.mean("slo_attainment", arm, load=0.9).mean for arm in ("foresight", "round-robin")
    )
    assert ours > turns
    assert chosen.plot(report, tmp_path / "plots")[0].exists()
    with pytest.raises(InputError, match="dataset"):
        chosen.run(Options((1,)), silent)
