"""Regret over a matrix of traffic: what a cell is, who is compared, and how."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from statistics import fmean

import pytest

from cato.core.errors import InputError
from cato.core.events import Event, ReplicaReported
from cato.core.ids import PoolName
from cato.core.slo import SloMetric
from cato.lab.studies import matrix, matrix_cells, robustness
from cato.lab.studies.matrix import Scene, random_scenes
from cato.lab.studies.matrix_cells import changed, rate_per_s
from cato.lab.studies.robustness import Duel, duel_of, ranked, report_of
from cato.lab.study import as_experiment
from cato.policies.schedulers import FORESIGHT
from cato.sim.experiment import Options, silent
from cato.sim.fleet import Fleet
from cato.sim.report import Sample

BASE = matrix.BASES[0]


def test_each_axis_stands_alone_around_every_base() -> None:
    scenes = matrix.axis_scenes(has_sessions=True)
    assert len(set(scenes)) == len(scenes)
    for scene in scenes:
        (distance, _) = min(
            (sum(asdict(scene)[axis] != value for axis, value in asdict(base).items()), i)
            for i, base in enumerate(matrix.BASES)
        )
        # Sessions take the arrivals with them, and one replica its speed.
        assert distance <= 2
    for axis, values in matrix.AXES.items():
        assert {getattr(s, axis) for s in scenes} >= set(values)


def test_random_cells_differ_and_repeat_by_their_seed() -> None:
    scenes = random_scenes(300, 3, has_sessions=True)
    assert scenes == random_scenes(300, 3, has_sessions=True)
    assert scenes != random_scenes(300, 4, has_sessions=True)
    assert len(set(scenes)) == 300
    for axis, values in matrix.AXES.items():
        assert {getattr(s, axis) for s in scenes} >= set(values)
    for scene in scenes:
        if scene.traffic == matrix.SESSIONS:
            assert scene.replicas <= matrix.MOST_SESSION_REPLICAS
        if scene.replicas == 1:
            assert scene.speeds == "equal"
    assert matrix.SESSIONS not in {s.traffic for s in random_scenes(50, 3, has_sessions=False)}


def test_load_one_is_what_full_batches_of_all_replicas_give() -> None:
    """20 steps of a batch of 16 and the prompts' time make 16 calls."""
    scene = replace(BASE, load=1.0, replicas=1, places=16)
    engine = matrix_cells.engine_of(scene)
    step_s = engine.decode_step_s(16, 210)
    one = 1 / (20 * step_s / 16 + 200 * engine.prompt_token_s)
    assert rate_per_s(scene) == pytest.approx(one)
    assert rate_per_s(replace(scene, load=0.5, replicas=4)) == pytest.approx(2 * one)
    mixed = replace(scene, replicas=3, speeds="1/2.5/6")
    assert rate_per_s(mixed) == pytest.approx((1 + 1 / 2.5 + 1 / 6) * one)


def test_load_one_keeps_the_pace_that_streams_are_promised() -> None:
    scene = Scene("8000/500", 1.0, 1)
    engine = matrix_cells.engine_of(scene)
    batch = rate_per_s(scene) * 500 * 0.05
    assert engine.decode_step_s(round(batch), 8250) < 0.05


def test_calls_have_the_beliefs_and_the_promises_of_their_scene() -> None:
    known = {
        beliefs: matrix_cells.calls(replace(BASE, beliefs=beliefs), 1)
        for beliefs in matrix.AXES["beliefs"]
    }
    usual = known["class"]
    for task, exact, near, half, none in zip(
        usual, known["exact"], known["+-30 %"], known["x 0.5"], known["none"], strict=True
    ):
        output = task.nodes[0].output_tokens
        assert {t.nodes[0].output_tokens for t in (exact, near, half, none)} == {output}
        assert exact.nodes[0].expected_tokens == output
        assert abs(near.nodes[0].expected_tokens - output) <= 0.3 * output + 0.5
        assert half.nodes[0].expected_tokens == pytest.approx(
            task.nodes[0].expected_tokens / 2, abs=1
        )
        assert (none.nodes[0].length, none.nodes[0].expected_tokens) == (
            None,
            matrix_cells.PRIOR_TOKENS,
        )
    assert {t.target_s for t in matrix_cells.calls(replace(BASE, sla="x 3"), 1)} == {3 * 0.3}
    promised = [t.target_s < inf for t in matrix_cells.calls(replace(BASE, sla="half without"), 1)]
    assert 0.4 < fmean(promised) < 0.6


def test_what_is_changed_of_a_task_does_not_depend_on_when_it_begins() -> None:
    scene = replace(BASE, beliefs="+-30 %", sla="half without")
    task = matrix_cells.calls(BASE, 1)[0]
    later = replace(task, arrived_at_s=task.arrived_at_s + 100.0)
    assert changed(scene, 1, later) == replace(
        changed(scene, 1, task), arrived_at_s=later.arrived_at_s
    )


def test_the_router_is_told_profiles_that_are_wrong_and_the_engine_keeps_the_true_one() -> None:
    told: list[Event] = []

    def record(pool: PoolName, event: Event) -> None:
        told.append(event)

    cell = matrix_cells.cell_of(replace(BASE, slowness=2.0, delays="live", places=16), None)
    fleet = Fleet([cell.with_policies("edf-bounded")], record)
    (report, *_) = told
    assert isinstance(report, ReplicaReported)
    engine = matrix_cells.engine_of(BASE)
    assert report.profile == engine.slowed(2.0)
    assert report.max_running == 16
    for host in fleet.pools[matrix_cells.POOL].replicas.values():
        assert host.engine.profile == engine


def a_sample(arm: str, attainment: float, seed: int = 1) -> Sample:
    counts = {"answers_in_time": 10 * attainment, "answers": 10.0}
    refused = 0.1 if arm == FORESIGHT else 0.0
    metrics = {"slo_attainment": attainment, "wait_s_max": 1.0, "refused": refused, **counts}
    return Sample(asdict(BASE), arm, seed, metrics)


def test_the_baseline_that_meets_most_is_chosen_and_the_first_of_equals() -> None:
    runs = [a_sample("a", 0.5), a_sample("b", 0.9), a_sample("a", 1.0, 2), a_sample("b", 0.6, 2)]
    assert ranked(runs) == ["a", "b"]


def test_regret_is_the_mean_difference_in_points_over_the_same_seeds() -> None:
    found = duel_of(
        [
            (a_sample(FORESIGHT, 0.90), a_sample("b", 0.94)),
            (a_sample(FORESIGHT, 0.80), a_sample("b", 0.82)),
        ]
    )
    assert found.regret == pytest.approx(3.0)
    assert found.stderr == pytest.approx(1.0)
    assert (found.rival, found.seeds) == ("b", 2)
    assert (found.our_in_time, found.their_in_time) == pytest.approx((8.5, 8.8))
    assert (found.our_answers, found.their_answers) == (10.0, 10.0)
    assert (found.our_refused, found.their_refused) == (0.1, 0.0)


def a_duel(regret: float, load: float = 0.7) -> Duel:
    setting, counts = asdict(replace(BASE, load=load)), (9.0, 9.0, 10.0, 10.0, 0.0, 0.0)
    return Duel(setting, "b", regret, 0.1, 0.9, 0.9, 1.0, 2.0, 4, *counts)


def test_fresh_seeds_decide_and_the_worst_come_first(tmp_path: Path) -> None:
    report = report_of("robustness", (0,), [a_duel(2.0), a_duel(3.0, 0.9)], [a_duel(0.5, 0.9)])
    regrets = [m.mean for m in report.means if m.metric == "regret"]
    assert regrets == [0.5, 3.0, 2.0]
    (target,) = report.targets
    assert (target.measured, target.is_met) == (0.5, True)
    (picture,) = robustness.plot(report, tmp_path)
    assert picture.stat().st_size > 0


def test_the_study_compares_on_seeds_that_did_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []

    def sample(cell: object, arm: str, seed: int) -> Sample:
        ran.append((arm, seed))
        return a_sample(arm, {FORESIGHT: 0.9, "sjf": 0.8, "edf": 0.95}[arm], seed)

    monkeypatch.setattr("cato.lab.study.Cell.sample", sample)
    monkeypatch.setattr(robustness, "USUAL", robustness.Effort(half=2, worst=1, fresh=3))
    options = Options((1,), (FORESIGHT, "sjf", "edf"), cells=2, draw=5)
    report = as_experiment(robustness.STUDY).run(options, silent)
    first = [("sjf", 5000), ("edf", 5000), ("edf", 5001), ("sjf", 5001)]
    compared = [(arm, 5000 + k) for k in (2, 3) for arm in (FORESIGHT, "edf")]
    fresh = [(arm, 5000 + k) for k in (4, 5, 6) for arm in (FORESIGHT, "edf")]
    assert ran == [*first, *compared, *first, *compared, *fresh]
    assert report.targets[0].measured == pytest.approx(5.0)


def test_a_study_that_was_ended_goes_on_with_the_cells_that_it_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[int] = []

    def sample(cell: object, arm: str, seed: int) -> Sample:
        ran.append(seed)
        if len(ran) == fails_at:
            raise KeyboardInterrupt
        return a_sample(arm, {FORESIGHT: 0.9, "sjf": 0.8}[arm] + seed / 1e6, seed)

    monkeypatch.setattr("cato.lab.study.Cell.sample", sample)
    monkeypatch.setattr(robustness, "USUAL", robustness.Effort(half=1, worst=1, fresh=2))
    study, kept = as_experiment(robustness.STUDY), tmp_path / "kept"
    usual = Options((1,), (FORESIGHT, "sjf"), cells=2, draw=5)
    fails_at = 0
    whole = study.run(usual, silent).to_json()
    a_cell, a_worst_cell = 3, 4
    assert len(ran) == 2 * a_cell + a_worst_cell
    for fails_at in (a_cell + 1, a_cell + 1, 0):  # in the second cell, then in the worst
        ran.clear()
        if fails_at:
            with pytest.raises(KeyboardInterrupt):
                study.run(replace(usual, kept=kept), silent)
            with kept.open("a") as file:
                file.write('{"setting": {"tra')
        else:
            assert study.run(replace(usual, kept=kept), silent).to_json() == whole
            assert len(ran) == a_worst_cell
    ran.clear()
    assert study.run(replace(usual, kept=kept), silent).to_json() == whole
    assert not ran
    with pytest.raises(InputError, match="other options"):
        study.run(replace(usual, draw=6, kept=kept), silent)
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join([*lines[:2], lines[2][:20], *lines[3:], ""]))
    with pytest.raises(InputError, match=r"line 3 is damaged .* its cell runs again"):
        study.run(replace(usual, kept=kept), silent)
    kept.write_text("\n".join([*lines[:2], *lines[3:], ""]))
    assert study.run(replace(usual, kept=kept), silent).to_json() == whole
    assert len(ran) == a_cell
    with pytest.raises(InputError, match="it is no file"):
        study.run(replace(usual, kept=Path("/dev/null")), silent)


def test_a_small_cell_runs_and_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_cells, "LEAST_CALLS", 60)
    monkeypatch.setattr(matrix_cells, "CALLS_A_REPLICA", 15)
    monkeypatch.setattr(matrix, "axis_scenes", lambda has_sessions: [BASE])
    options = Options((1,), ("foresight", "edf-bounded", "power-of-two"), quick=True)
    study = as_experiment(robustness.STUDY)
    report = study.run(options, silent)
    assert report.to_json() == study.run(options, silent).to_json()
    assert {m.metric for m in report.means} == set(study.metrics)
    assert report.mean("slo_attainment", FORESIGHT, seeds="fresh").mean > 0.95
    assert matrix_cells.TRAFFIC["64/20"][0].metric is SloMetric.TTFT
