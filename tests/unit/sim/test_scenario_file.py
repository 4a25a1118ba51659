"""Scenario files: what they become, and every problem at once."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from cato.core.errors import ConfigError
from cato.core.slo import SloMetric
from cato.sim.scenario import DrawnTraffic, Scenario, TraceTraffic
from cato.sim.scenario_file import example_text, load_scenario
from cato.sim.seeds import parse_seeds

SMALL = """
name: two-pools
seeds: 2
duration: 60s
pools:
  fast: {profile: saber, replicas: 2, max_running: 4}
  deep: {profile: 7b, cold_start: 5s}
traffic:
  rate_per_s: 1.0
  tasks:
    review:
      sla: {metric: e2e, target: 20s}
      calls:
        judge: {pool: deep, prompt_tokens: 200, output_tokens: 50, needs: [draft], chance: 0.5}
        draft: {pool: fast, prompt_tokens: 100, output_tokens: 20, before: 10ms, spread: 0}
"""


def load(folder: Path, text: str) -> Scenario:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return load_scenario(path)


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    return [f"{p.path}: {p.rule}" for p in caught.value.problems]


def test_calls_stand_in_an_order_in_which_they_can_run(tmp_path: Path) -> None:
    traffic = load(tmp_path, SMALL).traffic
    assert isinstance(traffic, DrawnTraffic)
    (review,) = traffic.classes
    assert [c.pool for c in review.calls] == ["fast", "deep"]
    assert [c.needs for c in review.calls] == [(), (0,)]
    assert (review.sla.metric, review.sla.target_s, review.sla.tpot_target_s) == (
        SloMetric.E2E,
        20.0,
        inf,
    )


def test_pools_take_the_constants_and_defaults(tmp_path: Path) -> None:
    fast, deep = load(tmp_path, SMALL).pools
    assert (fast.profile.model, fast.replicas, fast.max_running) == ("saber", 2, 4)
    assert (deep.profile.model, deep.max_replicas, deep.cold_start_s) == ("7b", 64, 5.0)


def test_the_example_is_right(tmp_path: Path) -> None:
    scenario = load(tmp_path, example_text())
    assert [p.name for p in scenario.pools] == ["small", "large"]
    assert scenario.scheduler == "foresight"


def test_all_problems_are_reported_at_once_with_their_places(tmp_path: Path) -> None:
    text = """
name: wrong
scheduler: forsight
duration: 10
pools:
  a: {profile: 8b, replicas: 3, max_replicas: 2}
traffic:
  rate_per_s: 0
  colour: red
  tasks:
    t:
      sla: {metric: e2e, target: 1s}
      calls:
        x: {pool: a, prompt_tokens: 10, output_tokens: 10, needs: [y, z], chance: 0.5}
        y: {pool: a, prompt_tokens: 10, output_tokens: 10, needs: [x], chance: 0.5}
"""
    found = problems(tmp_path, text)
    assert [f.partition(":")[0] for f in found] == [
        "scheduler",
        "duration",
        "pools.a.max_replicas",
        "traffic.rate_per_s",
        "traffic.tasks.t.calls.x.needs[1]",
        "traffic.tasks.t.calls.x.needs",
        "traffic.tasks.t.calls",
        "traffic.colour",
        "pools.a.profile",
    ]
    assert "did you mean 'foresight'?" in found[0]
    assert "3" in found[2]
    assert "x -> y" in found[5]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("pool: deep", "pool: deeep", "calls.judge.pool: unknown pool (did you mean 'deep'?)"),
        ("rate_per_s: 1.0", "rate_per_s: 0.1", "rate_per_s: about 6 tasks in 60 s"),
        ("rate_per_s: 1.0", "arrivals: poisson", "rate_per_s: this key is required"),
        ("rate_per_s: 1.0", "rate_per_s: 1.0\n  pool: deep", "traffic.pool: goes with `trace`"),
        ("seeds: 2", "seeds: 9-3", "seeds: must name 1 to"),
        ("review:", "all:", "traffic.tasks: 'all' stands for all tasks"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, old: str, new: str, found: str) -> None:
    (problem,) = problems(tmp_path, SMALL.replace(old, new))
    assert found in problem


def a_trace(folder: Path, requests: int) -> None:
    lines = [f"2023-11-16 18:00:{i % 60:02d}.0,100,{5 + i}" for i in range(requests)]
    (folder / "trace.csv").write_text(
        "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]), encoding="utf-8"
    )


REPLAY = """
name: replay
pools:
  only: {profile: 7b}
traffic: {trace: trace.csv, pool: only, speed: 2.0}
"""


def test_a_trace_lies_beside_the_file(tmp_path: Path) -> None:
    a_trace(tmp_path, 60)
    traffic = load(tmp_path, REPLAY).traffic
    assert isinstance(traffic, TraceTraffic)
    assert (len(traffic.rows), traffic.speed) == (60, 2.0)
    assert [(c.name, c.up_to_tokens) for c in traffic.classes] == [
        ("short", 20),
        ("medium", 100),
        ("long", inf),
    ]


def test_a_trace_brings_its_own_arrivals_and_needs_a_known_pool(tmp_path: Path) -> None:
    a_trace(tmp_path, 60)
    text = REPLAY.replace("pool: only", "pool: none, rate_per_s: 3.0")
    assert problems(tmp_path, text) == [
        "traffic.rate_per_s: a trace brings its own: leave it out",
        "traffic.pool: unknown pool; known: only",
    ]


def test_a_trace_that_is_short_or_not_there_is_refused(tmp_path: Path) -> None:
    (missing,) = problems(tmp_path, REPLAY)
    assert missing.startswith("traffic.trace: not found")
    a_trace(tmp_path, 10)
    assert problems(tmp_path, REPLAY) == ["traffic.trace: needs at least 40 requests, has 10"]


def test_a_duration_that_cuts_a_trace_short_is_refused(tmp_path: Path) -> None:
    a_trace(tmp_path, 60)
    (problem,) = problems(tmp_path, "duration: 1ms\n" + REPLAY.lstrip())
    assert problem == (
        "duration: 1 request of the trace in 0.001 s; change it or `traffic.speed` so that there "
        "are at least 20"
    )


def test_classes_of_a_trace_ascend_to_one_without_a_bound(tmp_path: Path) -> None:
    a_trace(tmp_path, 60)
    text = REPLAY.replace(
        "speed: 2.0", "classes: {a: {up_to_tokens: 9, sla: {metric: e2e, target: 1s}}}"
    )
    (problem,) = problems(tmp_path, text)
    assert problem.startswith("traffic.classes: up_to_tokens must ascend")


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", (0, 1, 2)), ("100-102", (100, 101, 102)), ("7-7", (7,))]
)
def test_seeds_are_a_count_or_a_range(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0", "-1", "5-", "9-3", "1.5", "ten", "0-100000"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_seeds(text)
