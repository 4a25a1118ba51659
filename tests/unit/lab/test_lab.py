"""Studies: their registry, the harness, and the targets of short completions."""

from __future__ import annotations

import pytest

from cato.core.errors import UnknownNameError
from cato.lab.registry import STUDIES, experiment, study
from cato.lab.studies import completions
from cato.lab.study import Cell, Measured, Study, Trial, as_experiment, no_targets
from cato.sim.experiment import Options, silent
from cato.sim.report import Sample, summarize


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


def test_an_unknown_name_is_answered_with_all_known_ones() -> None:
    assert experiment("completions").name == "completions"
    assert experiment("saber-rq1").name == "saber-rq1"
    with pytest.raises(UnknownNameError) as error:
        experiment("completion")
    assert error.value.known == tuple(STUDIES)


def test_a_study_runs_its_arms_on_the_same_arrivals_and_repeats_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(completions, "CALLS_A_REPLICA", 30)
    monkeypatch.setattr(completions, "SHAPES", ((64, 20),))
    options = Options((1,), ("foresight", "power-of-two"), quick=True)
    ran = as_experiment(completions.STUDY)
    report = ran.run(options, silent)
    assert ran.run(options, silent).to_json() == report.to_json()
    assert {m.metric for m in report.means} == set(ran.metrics)
    assert {m.policy for m in report.means} == {"foresight", "power-of-two"}
    for mean in report.means:
        if mean.metric == "finished":
            assert mean.mean == 1.0
    assert [t.group for t in report.targets] == [9, 9]
    with pytest.raises(UnknownNameError):
        ran.run(Options((1,), ("cato",)), silent)


def test_what_is_not_averaged_reaches_extra_and_unseeded_arms_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(arm: str, seed: int) -> Measured:
        return Measured({"seed": float(seed)}, f"{arm} {seed}")

    chosen = Study(
        "one",
        "a study of one cell",
        "this test",
        ("ours", "other", "bound", "elsewhere"),
        lambda options: [Trial({"load": 1.0}, measure, ("other", "bound"))],
        no_targets,
        lambda report, folder: [],
        compared=("seed",),
        means=lambda samples: summarize(s for s in samples if s.policy != "other"),
        extra=lambda options, samples: {"kept": [s.further for s in samples]},
        reference="ours",
        unseeded=("bound",),
        called="rule",
    )
    monkeypatch.setattr("cato.lab.registry.study", lambda name: chosen)
    ran = as_experiment(chosen)
    report = ran.run(Options((3, 5)), silent)
    assert report.extra["kept"] == ["ours 3", "other 3", "bound 3", "ours 5", "other 5"]
    assert [(m.policy, m.mean, m.n) for m in report.means] == [("ours", 4.0, 2), ("bound", 3.0, 1)]
    assert [(d.baseline, d.n) for d in report.differences] == [("other", 2), ("bound", 1)]
    with pytest.raises(UnknownNameError, match=r"no rule named 'theirs' .*; known: ours, other"):
        ran.run(Options((1,), ("theirs",)), silent)


def test_an_interrupted_study_reports_the_seeds_that_all_arms_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = 5

    def measure(arm: str, seed: int) -> Measured:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return Measured({"seed": float(seed)}, None)

    chosen = Study(
        "one",
        "a study of two cells",
        "this test",
        ("ours", "other"),
        lambda options: [Trial({"load": load}, measure) for load in (1.0, 2.0)],
        lambda samples: pytest.fail("targets need all cells"),
        lambda report, folder: [],
        compared=("seed",),
        reference="ours",
    )
    monkeypatch.setattr("cato.lab.registry.study", lambda name: chosen)
    report = as_experiment(chosen).run(Options((3, 5, 7)), silent)
    assert report.seeds == (3, 5)
    assert [(m.setting, m.policy, m.n) for m in report.means] == [
        ({"load": 1.0}, "ours", 2),
        ({"load": 1.0}, "other", 2),
    ]
    assert [d.n for d in report.differences] == [2]
    assert report.extra == {"interrupted": {"runs": 4, "of": 12}}
    left = 2  # not even one seed of all arms
    with pytest.raises(KeyboardInterrupt):
        as_experiment(chosen).run(Options((3, 5, 7)), silent)


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
