"""The fault drill: what it would see, and that the application passes a small one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cato.cli import app
from cato.core.errors import ConfigError
from cato.lab.chaos.clients import Call, Clients, Outcome, Struck, Target, difference
from cato.lab.chaos.drill import Drill, slope
from cato.lab.chaos.hostile_callers import judged as judged_hostile
from cato.lab.chaos.local_stage import LocalStage, local_stage
from cato.lab.chaos.overload import judged
from cato.lab.chaos.plan import (
    Dialect,
    Fault,
    Hostile,
    Overload,
    Plan,
    PlanFile,
    Planned,
    load_plan,
    schedule,
)
from cato.lab.chaos.real_engines import begins_right, problem_of

ROOT = Path(__file__).resolve().parents[3]


def test_the_command_does_not_import_ray_before_the_environment_of_its_ray_is_set() -> None:
    check = "import sys, cato.cli.chaos; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def a_plan(**fields: object) -> Plan:
    quick: dict[str, object] = {"streams": 6, "tokens": 20, "faults": 6, "gap": "100ms"}
    return PlanFile.model_validate({**quick, "step": "10ms", "pause": "200ms", **fields}).to_plan()


def test_the_same_seed_makes_the_same_faults() -> None:
    plan = a_plan(faults=50, seed=7)
    possible = frozenset({Fault.ENGINE_CRASH, Fault.ROUTER_KILL})
    assert schedule(plan, possible) == schedule(plan, possible)
    assert schedule(plan, possible) != schedule(replace(plan, seed=8), possible)
    assert {p.fault for p in schedule(plan, possible)} == possible


def test_faults_come_in_the_mix_of_the_plan() -> None:
    plan = a_plan(faults=400, mix={"engine_crash": 3, "router_kill": 1})
    crashes = sum(p.fault is Fault.ENGINE_CRASH for p in schedule(plan, frozenset(Fault)))
    assert 250 < crashes < 350


def test_a_plan_without_a_possible_fault_says_so() -> None:
    with pytest.raises(ValueError, match="possible"):
        schedule(a_plan(mix={"store_lock": 1}), frozenset({Fault.ENGINE_CRASH}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mix: {engine_crush: 1}", "engine_crash"),
        ("mix: {engine_crash: 0}", "above 0"),
        ("dialects: {soap: 1}", "completions"),
        ("streams: 0", "streams"),
        ("gap: 0s", "gap"),
        ("kills: 3", "unknown key"),
        ("overload: {factor: 5}", "dialects: {task: 1}"),
        ("{overload: {factor: 0.5}, dialects: {task: 1}}", "factor"),
    ],
)
def test_a_wrong_plan_says_what_to_write(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_plan(path)


@pytest.mark.parametrize("path", sorted((ROOT / "deployments" / "drills").glob("*.yaml")))
def test_shipped_plans_can_be_read(path: Path) -> None:
    plan = load_plan(path)
    assert len(schedule(plan, frozenset(Fault))) == plan.faults
    assert plan.slots * plan.replicas >= 2 * plan.streams


@pytest.mark.parametrize(
    ("text", "at"),
    [("abde", 2), ("abccde", 3), ("abdce", 2), ("abcd", 4), ("abcdef", 5), ("", 0)],
)
def test_lost_doubled_and_swapped_text_is_seen(text: str, at: int) -> None:
    assert f"different from {at}:" in difference(text, "abcde")
    assert difference("abcde", "abcde") == ""


def test_memory_that_grows_is_told_from_memory_that_does_not() -> None:
    flat = [(float(i), 100_000_000 + (i % 3) * 1000) for i in range(100)]
    grows = [(float(i), 100_000_000 + i * 1000) for i in range(100)]
    warms_up = [(float(i), 100_000_000 + min(i, 20) * 1_000_000) for i in range(100)]
    assert slope(flat[:5]) is None
    for samples, rate in ((flat, 0.0), (warms_up, 0.0), (grows, 3.6)):
        found = slope(samples)
        assert found is not None
        assert found["mb_per_hour"] == pytest.approx(rate, abs=0.3)


def test_a_fault_took_as_long_as_the_longest_call_stood_still() -> None:
    struck = Struck(Planned(0.0, Fault.ROUTER_KILL, 0.0), "", 0.0)
    assert struck.recovery_s is None
    struck.waits_s += [0.1, 0.7, 0.2]
    assert struck.recovery_s == 0.7


OVERLOAD = Overload(factor=5.0, lasts_s=10.0, after_s=60.0, slo_s=2.0, max_queued=5)


def an_outcome(began_s: float, took_s: float, kind: str = "ok") -> Outcome:
    retry_after_s = 3.0 if kind == "refused" else None
    return Outcome(kind, Dialect.TASK, "", "", 100.0 + began_s, took_s, retry_after_s)


@pytest.mark.parametrize(
    ("more", "queue", "broken"),
    [
        ([], 5, []),
        ([an_outcome(1.0, 0.1, "refused")] * 50, 5, []),
        ([an_outcome(1.0, 1.5, "refused")] * 2, 5, ["attainment of what was admitted: 0.833"]),
        ([an_outcome(1.0, 2.1)] * 2, 5, ["attainment of what was admitted: 0.833"]),
        ([], 6, ["the queue: 6"]),
        ([an_outcome(30.0, 0.1, "refused")], 5, []),
        ([an_outcome(50.0, 0.1, "refused")], 5, ["as usual only after 40 s"]),
    ],
)
def test_what_a_pool_owes_under_overload(
    more: list[Outcome], queue: int, broken: list[str]
) -> None:
    kept = [an_outcome(float(i), 1.0) for i in range(9)] + [an_outcome(8.5, 1.0)]
    report = judged([*kept, *more], OVERLOAD, 1.0, 100.0, queue)
    assert report["broken"] == broken
    idle = judged(kept, OVERLOAD, 2.0, 100.0, queue)
    assert "use of the capacity: 0.50" in idle["broken"]


async def drilled(plan: Plan) -> tuple[dict[str, Any], LocalStage]:
    async with local_stage(plan) as stage:
        return await Drill(plan, stage).run(), stage


async def test_faults_of_every_kind_cost_no_token() -> None:
    plan = a_plan(faults=15)
    report, stage = await drilled(plan)
    assert report["passed"], report
    assert report["faults"] == 15
    assert set(report["recovery_s"]) <= {fault.value for fault in stage.possible}
    assert report["calls"]["ok"] > 0


async def test_no_fault_begins_after_the_time_of_the_plan() -> None:
    report, _ = await drilled(a_plan(faults=1000, gap="200ms", within="1s"))
    assert report["passed"], report
    assert 0 < report["faults"] < 100


async def test_what_comes_too_fast_is_refused_at_once_and_what_is_admitted_is_right() -> None:
    plan = a_plan(
        faults=0,
        streams=4,
        replicas=2,
        step="50ms",
        dialects={"task": 1},
        overload={"factor": 5, "lasts": "4s", "after": "1s", "slo": "2s", "max_queued": 60},
    )
    report, _ = await drilled(plan)
    assert set(report["calls"]) <= {"ok", "refused", "hung"}, report
    assert report["calls"]["hung"] == 0
    assert not report["leaks"]
    overload = report["overload"]
    assert 0 < overload["admitted"] < overload["offered"]
    assert 0 < overload["longest_queue"] <= 60


def a_completion(began_s: float, first_token_s: float) -> Outcome:
    return Outcome("ok", Dialect.COMPLETIONS, began_s=began_s, first_token_s=first_token_s)


@pytest.mark.parametrize(("keeps_all", "kept"), [(True, 3), (False, 1)])
def test_clients_of_a_long_drill_only_count_what_was_right(keeps_all: bool, kept: int) -> None:
    clients = Clients(
        Target("http://localhost", "m", "t", 0),
        streams=1,
        tokens=9,
        dialects={Dialect.CHAT: 1.0},
        seed=0,
        ingress_killed_since=lambda _: False,
        keeps_all=keeps_all,
    )
    for kind in ("ok", "ok", "wrong"):
        clients.note(Outcome(kind, Dialect.CHAT))
    assert clients.kinds == {"ok": 2, "wrong": 1}
    assert len(clients.outcomes) == kept


@pytest.mark.parametrize(
    ("late", "broken"),
    [(2, []), (3, ["3.0 points of completions were lost to hostile requests"])],
)
def test_hostile_requests_may_cost_two_points_of_completions(late: int, broken: list[str]) -> None:
    hostile = Hostile(callers=24, spell_s=10.0, slo_s=1.0)
    alone = [a_completion(20.0 + i / 50, 0.5) for i in range(100)]
    beside = [a_completion(30.0 + i / 50, 1.5 if i < late else 0.5) for i in range(100)]
    assert judged_hostile([*alone, *beside], hostile, 0.0)["broken"] == broken
    assert judged_hostile(alone, hostile, 0.0)["broken"] == ["no completions to compare"]


async def test_hostile_requests_are_answered_beside_completions() -> None:
    plan = a_plan(faults=0, duration="3s", hostile={"callers": 4, "spell": "1s", "slo": "60s"})
    report, _ = await drilled(plan)
    assert report["passed"], report["hostile"]
    assert set(report["hostile"]["hostile"]) == {"200"}


@pytest.mark.parametrize(
    ("text", "lost", "tokens", "is_right"),
    [
        ("abcdef", [], 6, True),
        ("abcxyz", [], 6, False),
        ("abcxyz", [3], 6, True),
        ("abcxyz", [4, 3], 7, True),
        ("abcxyz", [4], 6, False),
        ("abcdef", [], 7, False),
        ("abcxyz", [3], 99, False),
    ],
)
def test_an_answer_of_a_real_model_is_right_up_to_where_it_was_lost(
    text: str, lost: list[int], tokens: int, *, is_right: bool
) -> None:
    call = Call(Dialect.CHAT, "", 6, 0.0, text, {"id"}, ["length"], tokens)
    assert (problem_of(call, "abcdef", lost, 6) == "") is is_right


def test_an_answer_of_a_real_model_must_not_go_on_behind_its_end() -> None:
    call = Call(Dialect.CHAT, "", 6, 0.0, "abcdefghijkl", {"id"}, ["length"], 6)
    assert problem_of(call, "abcdef", [3], 12) == "12 tokens of text for 6"
    assert problem_of(call, "abcdef", [3], 8) == "", "others may split a text into other tokens"


@pytest.mark.parametrize(
    ("text", "lost", "is_right"),
    [("abc", [], True), ("abx", [], False), ("abx", [2], True), ("axx", [2], False)],
)
def test_an_answer_that_was_cut_is_right_up_to_where_it_was_lost(
    text: str, lost: list[int], *, is_right: bool
) -> None:
    assert begins_right(text, "abcdef", lost) is is_right


async def test_clients_of_a_real_model_first_ask_what_it_says() -> None:
    report, _ = await drilled(a_plan(engine="vllm", faults=4, mix={"engine_crash": 1}))
    assert report["passed"], report
    assert report["calls"]["ok"] > 0


QUICK = "{streams: 4, tokens: 10, faults: 3, gap: 100ms, step: 10ms, pause: 100ms}"


def test_the_command_says_what_came_of_it(tmp_path: Path) -> None:
    plan, report = tmp_path / "plan.yaml", tmp_path / "report.json"
    plan.write_text(QUICK)
    asked = ["chaos", "--plan", str(plan), "--json", str(report)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "3 faults" in done.output
    assert json.loads(report.read_text())["passed"] is True


@pytest.mark.parametrize(("text", "words"), [("streams: 0", "streams"), ("engine: vllm", "--ray")])
def test_the_command_refuses_a_wrong_plan(tmp_path: Path, text: str, words: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(text)
    done = CliRunner().invoke(app, ["chaos", "--plan", str(plan)])
    assert done.exit_code == 2
    assert words in done.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_minutes_of_work_and_faults_leave_memory_flat_and_no_lease(tmp_path: Path) -> None:
    """In a process of its own, whose memory is of this work alone."""
    report = tmp_path / "report.json"
    plan = ROOT / "deployments" / "drills" / "soak-5m.yaml"
    command = [Path(sys.executable).with_name("cato"), "chaos", "--plan", plan, "--growth", "120"]
    done = subprocess.run([*command, "--json", report], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["calls"]["ok"] > 500
    assert not found["leaks"]
    (memory,) = found["memory"].values()
    assert memory["seconds"] > 150


async def test_a_drill_whose_clients_ended_has_not_passed() -> None:
    async with local_stage(a_plan(faults=0, duration="300ms")) as stage:
        nothing_to_send: Any = object()
        stage.target = replace(stage.target, model=nothing_to_send)
        report = await Drill(a_plan(faults=0, duration="300ms"), stage).run()
    assert not report["passed"]
    assert "the clients ended with TypeError" in report["problems"][0]


async def test_engines_that_say_something_else_fail_the_drill() -> None:
    plan = a_plan(faults=0, duration="300ms")
    async with local_stage(plan) as stage:
        stage.target = replace(stage.target, seed=99)
        report = await Drill(plan, stage).run()
    assert not report["passed"]
    assert report["calls"]["wrong"] > 0
    assert "different from" in report["problems"][0]
