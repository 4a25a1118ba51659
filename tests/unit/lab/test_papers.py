"""`cato simulate papers`: what it covers, and the folder that it leaves."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cato.cli import app
from cato.lab.experiments import papers, saber_figures
from cato.lab.experiments.papers import Entry, Paper, regenerate
from cato.lab.registry import STUDIES
from cato.sim.experiment import Options
from cato.sim.traces import COLUMNS

OURS = {
    *("completions", "agents", "agents-and-completions", "robustness", "length-features"),
    *("router-shards", "agents-and-changes"),
    *("coding-small-first", "coding-large-first", "coding-mixes", "coding-scaling"),
}


def some(*entries: Entry) -> Sequence[Paper]:
    return (Paper("A paper", entries, (("Fig. 1", "an image"),)),)


def test_every_experiment_is_of_a_paper_or_of_the_project() -> None:
    covered = [e.experiment for p in papers.PAPERS for e in p.entries]
    assert len(covered) == len(set(covered))
    assert set(STUDIES) - set(covered) <= OURS
    assert set(covered) <= set(STUDIES)


def test_a_folder_has_json_pictures_and_a_page_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saber_figures, "PANELS", (("W1", 5.0, 50),))
    options = Options((1, 2, 3), quick=True)
    (done,) = regenerate(options, tmp_path / "x", some(Entry("Fig. 4", "saber-fig4", 1)))
    assert done.report is not None
    assert done.report.seeds == (1,)
    page = (tmp_path / "x" / papers.INDEX).read_text()
    assert json.loads((tmp_path / "x" / "saber-fig4.json").read_text())["seeds"] == [1]
    assert done.took_s > 0
    time = f"{done.took_s:.0f} s"
    for named in ("saber-fig4.json", "saber-fig4.png", "slo_attainment", "Fig. 1: an image", time):
        assert named in page
    assert (tmp_path / "x" / "saber-fig4.png").stat().st_size > 10_000


def test_what_lacks_its_file_is_left_out_and_the_page_says_what_it_needs(tmp_path: Path) -> None:
    burst_gpt = tmp_path / "burst.csv"
    burst_gpt.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n")
    needy = some(Entry("a trace", "azure-replay", needs=papers.NEEDS_AZURE))
    for trace in (None, burst_gpt):
        (done,) = regenerate(Options((1,), trace=trace), tmp_path, needy)
        assert done.report is None
        assert "Not run: needs --trace" in (tmp_path / papers.INDEX).read_text()
    empty = tmp_path / "azure.csv"
    empty.write_text(",".join(COLUMNS) + "\n")
    (done,) = regenerate(Options((1,), trace=empty), tmp_path, needy)
    assert "no requests after the first line" in done.why_not


def test_the_command_tells_what_ran_and_takes_no_option_of_a_single_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = (
        Entry("Fig. 10", "slo-sa-fig10", 1),
        Entry("a trace", "azure-replay", needs=papers.NEEDS_AZURE),
    )
    monkeypatch.setattr(papers, "PAPERS", some(*entries))
    arguments = ["simulate", "papers", "--quick", "--jobs", "1", "--plot", str(tmp_path)]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"slo-sa-fig10: Fig. 10 \(\d+ s\)", result.output)
    assert re.search(r"in \d+\.\d minutes\.", result.output)
    assert "needs --trace" in result.output
    assert (tmp_path / papers.INDEX).exists()
    refused = CliRunner().invoke(app, [*arguments, "--policy", "annealing"])
    assert refused.exit_code == 2
