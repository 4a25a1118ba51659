"""Agents while replicas are lost, join and restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.recorded_sessions import even_sessions

from cato.lab.studies import agent_fleet, agents_and_changes
from cato.lab.studies.agents_and_changes import CHANGES
from cato.lab.study import as_experiment
from cato.sim.experiment import Options, silent
from cato.sim.fleet import PoolSetup
from cato.sim.report import Sample
from cato.sim.sessions import Users


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(agent_fleet, "WARM_UP_S", 100.0)
    return even_sessions(tmp_path)


def test_turns_after_every_change_are_counted(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_and_changes, "COUNTED_S", 100.0)
    arms = ("foresight", "sticky")
    options = Options((1, 2, 3), policies=arms, trace=trace, quick=True, users=(1.0,))
    study = as_experiment(agents_and_changes.STUDY)
    report = study.run(options, silent)
    assert report.seeds == (1, 2)
    assert {m.metric for m in report.means} == set(agents_and_changes.STUDY.metrics)
    assert {str(m.setting["change"]) for m in report.means} == set(CHANGES)
    for profile in ("large", "small + host"):
        for change in CHANGES:
            here = {"profile": profile, "change": change}
            turns, in_time, counted = (
                report.mean(metric, "foresight", **here).mean
                for metric in ("turns", "in_time", "turns_in_time")
            )
            assert turns > 30
            assert counted == pytest.approx(turns * in_time, rel=0.01)
    assert [t.goal for t in report.targets] == [1.0]
    assert [p.stat().st_size > 0 for p in study.plot(report, tmp_path)] == [True]


@pytest.mark.parametrize(
    ("change", "before", "just_after", "later", "names"),
    [
        ("one replica is lost", 4, 3, 4, 5),
        ("one more joins three", 3, 4, 4, 4),
        ("all restart, one by one", 4, 4, 4, 8),
        ("all users begin at once", 4, 4, 4, 4),
    ],
)
def test_replicas_come_and_go(
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    before: int,
    just_after: int,
    later: int,
    names: int,
) -> None:
    """`names`: all replicas there ever were. Who drains is there until its calls have ended."""
    seen: dict[float, int] = {}
    ever: set[str] = set()
    run = Users.run

    def watched(users: Users, until_s: float) -> object:
        pool, kernel = users.fleet.pools[agent_fleet.POOL], users.fleet.kernel
        begin_s = 1.0 if change == "all users begin at once" else 100.0

        def look() -> None:
            seen[kernel.now_s - begin_s] = len(pool.replicas)
            ever.update(pool.replicas)

        for after_s in (-0.5, 0.0, *range(10, 600, 10)):
            kernel.at(begin_s + after_s, look)
        return run(users, until_s)

    monkeypatch.setattr(Users, "run", watched)
    options = Options((1,), trace=trace, quick=True)
    cell = next(c for c in agents_and_changes.cells(options) if c.setting["change"] == change)
    fleet: PoolSetup = cell.with_policies("foresight")
    agents_and_changes.measure(trace, 2.0, change, fleet, 1)
    assert (seen[-0.5], seen[0.0], seen[590.0], len(ever)) == (before, just_after, later, names)


def a_sample(policy: str, in_time: float, seed: int) -> Sample:
    setting = {"profile": "large", "users_per_card": 6.0, "change": "one replica is lost"}
    return Sample(setting, policy, seed, {"turns_in_time": in_time})


def test_the_target_is_the_distance_to_the_best_rule() -> None:
    samples = [
        a_sample(policy, seed * turns, seed)
        for policy, turns in (("foresight", 98.0), ("sticky", 100.0), ("prefix-score", 99.0))
        for seed in (1, 2)
    ]
    (target,) = agents_and_changes.targets(samples)
    assert (target.measured, target.is_met) == (pytest.approx(2.0), False)
    assert "sticky" in target.text
    assert agents_and_changes.targets([s for s in samples if s.policy == "sticky"]) == []
