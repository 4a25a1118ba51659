"""Studies: their registry, the harness, and the targets of short completions."""

from __future__ import annotations

import pytest

from cato.core.errors import UnknownNameError
from cato.lab.experiments.registry import EXPERIMENTS
from cato.lab.registry import STUDIES, experiment, names, study
from cato.lab.studies import completions
from cato.lab.study import Cell, as_experiment
from cato.sim.experiment import Options, silent
from cato.sim.report import Sample


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_arms_that_exist_and_cells_of_its_own(name: str) -> None:
    found = study(name)
    assert found.name == name
    for measured in found.cells(Options((1,))):
        arms = measured.arms or found.arms
        assert set(arms) <= set(found.arms)
        if isinstance(measured, Cell):
            assert set(arms) <= set(measured.schedulers)
    settings = [tuple(cell.setting.items()) for cell in found.cells(Options((1,)))]
    assert len(set(settings)) == len(settings)
    quick = {tuple(cell.setting.items()) for cell in found.cells(Options((1,), quick=True))}
    assert quick <= set(settings)


def test_studies_stand_beside_the_experiments() -> None:
    assert names() == (*EXPERIMENTS, *STUDIES)
    assert experiment("completions").name == "completions"
    assert experiment("saber-rq1").name == "saber-rq1"
    with pytest.raises(UnknownNameError) as error:
        experiment("completion")
    assert error.value.known == names()


def test_a_study_runs_its_arms_on_the_same_arrivals_and_repeats_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(completions, "CALLS_A_REPLICA", 30)
    monkeypatch.setattr(completions, "SHAPES", ((64, 20),))
    options = Options((1,), ("foresight", "power-of-two"), quick=True)
    ran = as_experiment(completions.STUDY)
    report = ran.run(options, silent)
    assert ran.run(options, silent).to_json() == report.to_json()
    assert {m.policy for m in report.means} == {"foresight", "power-of-two"}
    for mean in report.means:
        if mean.metric == "finished":
            assert mean.mean == 1.0
    assert [t.group for t in report.targets] == [9, 9]
    with pytest.raises(UnknownNameError):
        ran.run(Options((1,), ("cato",)), silent)


def a_sample(policy: str, attainment: float, p95_s: float, load: float = 0.5) -> Sample:
    return Sample({"load": load}, policy, 1, {"slo_attainment": attainment, "ttft_s_p95": p95_s})


def test_the_targets_of_completions_are_those_of_the_worst_cell() -> None:
    attained, slower = completions.targets(
        [
            a_sample("foresight", 1.0, 0.1),
            a_sample("power-of-two", 1.0, 0.1),
            a_sample("foresight", 0.98, 0.2, load=0.7),
            a_sample("power-of-two", 0.9, 0.1, load=0.7),
            a_sample("edf-bounded", 1.0, 0.3, load=0.7),
            a_sample("foresight", 0.5, 0.1, load=0.9),  # no baseline has all there
            a_sample("power-of-two", 0.6, 0.1, load=0.9),
        ]
    )
    assert (attained.measured, attained.is_met) == (98.0, False)
    assert (slower.measured, slower.is_met) == (2.0, False)
    assert "load 0.7" in attained.text


def test_load_one_is_what_the_engine_gives_with_a_full_batch() -> None:
    """64 calls of one prompt token and 20 output tokens: 20 steps of 16.4 ms and their prompts."""
    step_s = 10e-3 + 64 * 0.1e-3 + 64 * 11 * 0.2e-6
    assert completions.rate_per_s(1, 20) == pytest.approx(64 / (20 * step_s + 64 * 30e-6))
