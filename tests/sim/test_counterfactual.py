"""A recorded pool under another policy."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from fleet_kit import POOL, a_fleet, a_task
from kits.builders import a_profile
from test_replay import _Logged
from typer.testing import CliRunner

from cato.cli import app
from cato.core.errors import InputError
from cato.core.events import Ticked
from cato.core.ids import TaskName
from cato.core.orchestrator import PoolOrchestrator
from cato.core.slo import SloMetric
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of
from cato.sim.counterfactual import RECORDED, compare
from cato.sim.fleet import Fleet
from cato.sim.recorded import history_of
from cato.sim.tasks import SimTask
from cato.telemetry.event_log import EventLog, Recorded, Recording, read_log

PROFILE = replace(a_profile(prefill_s=0.04, token_s=0.01), load_s=0.0)
PLAIN = PoolPolicies("round-robin")


def a_log(
    folder: Path,
    tasks: list[SimTask],
    *,
    lose_at_s: float = inf,
    leave: tuple[str, float] = ("", inf),
) -> Path:
    """What `round-robin` made of `tasks` with two replicas of two places each."""
    path = folder / "log.jsonl"
    fleet: Fleet = a_fleet(policies_of(PLAIN, PROFILE), replicas=2, max_running=2, profile=PROFILE)
    pool = fleet.pools[POOL]
    log = EventLog(path, POOL, PLAIN, PROFILE)
    pool.orchestrator = _Logged(PoolOrchestrator(POOL, policies_of(PLAIN, PROFILE)), log)  # type: ignore[assignment]
    for host in pool.replicas.values():
        pool._report(host)
    if lose_at_s < inf:
        fleet.kernel.at(lose_at_s, lambda: pool.lose_replica(next(iter(pool.replicas))))
    id, at_s = leave
    fleet.kernel.at(at_s, lambda: fleet.leave(id))
    fleet.run(tasks)
    log.close()
    return path


def a_mix(n: int = 120) -> list[SimTask]:
    """Long calls with much time in front of short ones with little: the order matters."""
    tasks = []
    for i in range(n):
        is_short = i % 3 == 1
        task = a_task(
            f"t{i}",
            at_s=0.03 * i,
            prompt=10,
            output=4 if is_short else 60,
            target_s=0.4 if is_short else 60.0,
        )
        name = TaskName("short" if is_short else "long")
        tasks.append(replace(task, name=name, metric=SloMetric.TTFT if is_short else SloMetric.E2E))
    return tasks


def test_the_recorded_scheduler_simulated_gives_what_was_recorded(tmp_path: Path) -> None:
    recording = read_log(a_log(tmp_path, a_mix()))
    _, report = compare(recording, ())
    for metric in ("slo_attainment", "ttft_s_mean", "e2e_s_p95"):
        was = report.mean(metric, RECORDED, task="all").mean
        assert report.mean(metric, "round-robin, simulated", task="all").mean == pytest.approx(was)


def test_a_better_order_would_have_saved_the_short_calls(tmp_path: Path) -> None:
    recording = read_log(a_log(tmp_path, a_mix()))
    _, report = compare(recording, ["foresight"])
    was = report.mean("slo_attainment", RECORDED, task="short").mean
    would = report.mean("slo_attainment", "foresight, simulated", task="short").mean
    assert was < 0.5 < 0.8 < would


def test_a_lost_replica_is_lost_again(tmp_path: Path) -> None:
    recording = read_log(a_log(tmp_path, a_mix(), lose_at_s=1.0))
    history = history_of(recording)
    assert sorted(s.until_s for s in history.replicas) == [1.0, inf]
    _, report = compare(recording, ())
    was = report.mean("e2e_s_p95", RECORDED, task="all").mean
    # What ran there goes on elsewhere; the place in the queue that it gets may differ.
    would = report.mean("e2e_s_p95", "round-robin, simulated", task="all").mean
    assert would == pytest.approx(was, rel=0.05)


def test_a_call_whose_client_left_frees_its_place_and_is_not_counted(tmp_path: Path) -> None:
    tasks = [a_task("stays", output=10), a_task("leaves", output=10_000)]
    recording = read_log(a_log(tmp_path, tasks, leave=("leaves", 0.2)))
    history, report = compare(recording, ())
    assert [t.cancelled_at_s for t in history.tasks] == [inf, pytest.approx(0.2)]
    assert report.mean("slo_attainment", RECORDED, task="all").n == 1


def test_a_log_without_calls_is_an_error_that_says_so() -> None:
    empty = Recording(POOL, PLAIN, PROFILE, (Recorded(Ticked(0.0), ()),))
    with pytest.raises(InputError, match="no calls"):
        history_of(empty)


def test_the_command_prints_a_row_for_each_policy_and_writes_the_picture(tmp_path: Path) -> None:
    log = a_log(tmp_path, a_mix())
    done = CliRunner(env={"COLUMNS": "160"}).invoke(
        app, ["replay", str(log), "--scheduler", "foresight", "--plot", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    for words in ("recorded", "round-robin, simulated", "foresight, simulated"):
        assert words in done.output.replace("\n", " ")
    assert (tmp_path / "out" / f"replay-{POOL}.png").stat().st_size > 10_000


def test_the_check_says_that_the_decisions_are_the_same(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(a_log(tmp_path, a_mix())), "--check"])
    assert done.exit_code == 0
    assert "repeat the recorded commands" in done.output


def test_a_scheduler_that_is_none_is_named_with_those_that_are(tmp_path: Path) -> None:
    log = a_log(tmp_path, a_mix(4))
    done = CliRunner().invoke(app, ["replay", str(log), "--scheduler", "zipper"])
    assert done.exit_code == 2
    assert "foresight" in done.output
