"""Completions beside agents on the same cards."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.recorded_sessions import even_sessions

from cato.lab.studies import agent_fleet, agents_and_completions
from cato.lab.study import as_experiment
from cato.sim.experiment import Options, silent
from cato.sim.report import Sample
from cato.sim.session_traces import read_sessions


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six minutes and a half are played."""
    monkeypatch.setattr(agent_fleet, "WARM_UP_S", 100.0)
    monkeypatch.setattr(agent_fleet, "COUNTED_S", 300.0)
    return even_sessions(tmp_path)


def test_a_fifth_of_the_calls_are_completions_and_all_are_in_time_where_little_runs(
    trace: Path,
) -> None:
    options = Options((1, 2), trace=trace, quick=True, users=(2.0,))
    report = as_experiment(agents_and_completions.STUDY).run(options, silent)
    assert report.seeds == (1,)
    assert {m.metric for m in report.means} == set(agents_and_completions.STUDY.metrics)
    for arm in ("foresight", "sticky"):
        here = {"profile": "large", "completions": 0.2}
        turns = report.mean("turns", arm, **here).mean
        completions = report.mean("completions", arm, **here).mean
        assert completions / (turns + completions) == pytest.approx(0.2, abs=0.03)
        assert report.mean("completions_in_time", arm, **here).mean > 0.9
        assert report.mean("completions", arm, profile="large", completions=0.0).n == 1
    assert len(report.targets) == 2


def test_a_user_who_waits_for_nothing_plays_as_many_turns_as_the_gaps_allow(trace: Path) -> None:
    rate = agents_and_completions.turns_per_s(
        read_sessions(trace), agent_fleet.card_profile("large")
    )
    assert 1 / 6 < rate < 1 / 4


def a_sample(share: float, in_time: float, completions: float, seed: int = 1) -> Sample:
    setting = {"profile": "large", "users_per_card": 6.0, "completions": share}
    metrics = {"in_time": in_time, "completions_in_time": completions}
    return Sample(setting, "foresight", seed, metrics)


def test_the_targets_are_completions_in_time_and_what_agents_lose_by_them() -> None:
    met, lost = agents_and_completions.targets(
        [a_sample(0.0, 0.96, float("nan")), a_sample(0.2, 0.94, 0.995)]
    )
    assert (met.measured, met.is_met) == (pytest.approx(99.5), True)
    assert (lost.measured, lost.is_met) == (pytest.approx(2.0), False)
