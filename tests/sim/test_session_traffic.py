"""Users who play recorded sessions in a closed loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
from kits.recorded_sessions import a_session, a_trace, a_turn

from cato.core.errors import InputError
from cato.core.ids import PoolName
from cato.core.length import LengthBelief
from cato.core.profile import Profile
from cato.core.topology import EngineSpec
from cato.lab.registry import experiment
from cato.lab.studies import agent_fleet, agents, agents_search
from cato.lab.study import as_experiment
from cato.policies import schedulers
from cato.sim.experiment import Options, silent
from cato.sim.fleet import PoolSetup
from cato.sim.playing import PATIENCE_S
from cato.sim.report import Sample
from cato.sim.session_traces import MAX_GAP_S, read_sessions
from cato.sim.sessions import PlayedTurn, Users

LARGE = agent_fleet.card_profile("large")
LENGTH = LengthBelief.of([50, 100, 200])


LONG = a_session(
    "long",
    a_turn(20_000, 0, base=None),
    a_turn(21_000, 20_000),
    a_turn(22_000, 21_000, gap=10_000.0),
    a_turn(3_000, 0, agent=1, base=None, shared=[1280, 64]),
    a_turn(23_000, 1_900, after=[2, 3]),
)

SHORT = a_session("short", *(a_turn(9_000 + 500 * k, 9_000 * (k > 0)) for k in range(9)))


def played(
    path: Path,
    scheduler: str = "sticky",
    profile: Profile = LARGE,
    users: int = 1,
    replicas: int = 1,
    until_s: float = 900.0,
) -> list[PlayedTurn]:
    policies = schedulers.OF_PROFILE[scheduler](profile, profile.max_running)
    pool = PoolSetup(
        PoolName("p"), (profile,) * replicas, policies, chunk_tokens=8192, cache_block_tokens=64
    )
    return Users(read_sessions(path), users, pool, LENGTH, seed=1).run(until_s)


def test_a_turn_begins_its_gap_after_the_answers_that_it_waits_for(tmp_path: Path) -> None:
    turns = played(a_trace(tmp_path, LONG))
    first, agent, second, third, last = turns[:5]
    assert agent.outcome.task.arrived_at_s == first.outcome.task.arrived_at_s + 5.0
    assert second.outcome.task.arrived_at_s == pytest.approx(first.outcome.ended_at_s + 5.0)
    assert third.outcome.task.arrived_at_s == pytest.approx(second.outcome.ended_at_s + MAX_GAP_S)
    assert last.outcome.task.arrived_at_s == pytest.approx(third.outcome.ended_at_s + 5.0)


def test_prompts_share_the_blocks_that_the_trace_says(tmp_path: Path) -> None:
    first, agent, second, third, last = (
        p.outcome.task.nodes[0].blocks for p in played(a_trace(tmp_path, LONG))[:5]
    )

    def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))

    assert common(first, second) == 20_000 // 64
    assert common(second, third) == 21_000 // 64
    assert common(third, last) == -(-1_900 // 64)
    assert common(first, agent) == 1280 // 64  # the same tools, another system prompt
    assert [len(b) for b in (first, second, last)] == [20_000 // 64, 21_000 // 64, 23_000 // 64]


def test_a_warm_turn_is_told_as_cached_and_is_in_time(tmp_path: Path) -> None:
    second = played(a_trace(tmp_path, LONG))[2]
    assert second.outcome.cached_tokens == 20_000 // 64 * 64
    assert second.outcome.is_met
    assert second.outcome.e2e_s == pytest.approx(second.unloaded_s, rel=0.05)


@pytest.mark.parametrize(("gap_after", "is_retained"), [("tool_use", True), ("end_turn", False)])
def test_continuum_retains_blocks_after_tool_calls_alone(
    tmp_path: Path, gap_after: str, is_retained: bool
) -> None:
    row = a_session("a", a_turn(20_000, 0, base=None), a_turn(21_000, 20_000, gap_after=gap_after))
    first, second = played(a_trace(tmp_path, row), "continuum", until_s=90.0)[:2]
    calls = [p.outcome.task.nodes[0].calls_tool for p in (first, second)]
    assert calls == [is_retained, False]
    assert schedulers.continuum().retain_s == schedulers.CONTINUUM_S
    assert replace(schedulers.continuum(), retain_s=0.0) == schedulers.early("sticky")


def test_a_session_ends_before_its_first_turn_above_the_window(tmp_path: Path) -> None:
    card = replace(LARGE, context_tokens=21_500)
    turns = played(a_trace(tmp_path, LONG), profile=card, until_s=60.0)
    assert [p.outcome.task.nodes[0].prompt_tokens for p in turns[:2]] == [20_000, 21_000]
    with pytest.raises(InputError, match="within 10000 tokens"):
        played(a_trace(tmp_path, LONG), profile=replace(card, context_tokens=10_000))


def test_a_turn_without_an_answer_is_asked_again_and_counts_once(tmp_path: Path) -> None:
    """One card for eight long prompts: some clients leave, or are refused, before they begin."""
    rows = [a_session(f"s{i}", a_turn(120_000, 0, base=None)) for i in range(8)]
    slow = replace(LARGE.slowed(5.0), kv_capacity_tokens=130_000)
    turns = played(a_trace(tmp_path, *rows), "foresight", slow, users=8, until_s=4000.0)
    missing = [p for p in turns if not p.outcome.is_finished and p.took_s == p.took_s]
    assert missing, "some got their answers from later requests"
    assert all(p.took_s > PATIENCE_S or p.outcome.refused for p in missing)
    assert len({p.outcome.task.id for p in turns}) == len(turns)
    done = [p for p in turns if p.outcome.is_finished]
    assert all(p.took_s == pytest.approx(p.outcome.e2e_s) for p in done)


@pytest.mark.parametrize("scheduler", agents.ARMS)
def test_every_arm_serves_all_turns_of_a_light_load(tmp_path: Path, scheduler: str) -> None:
    path = a_trace(tmp_path, LONG, a_session("b", a_turn(4_000, 0, base=None)))
    turns = played(path, scheduler, users=4, replicas=3)
    begun = [p for p in turns if p.outcome.task.arrived_at_s < 880.0]
    assert len(begun) > 20
    assert all(p.outcome.is_finished for p in begun)


@pytest.mark.parametrize("scheduler", ["foresight", "sticky"])
def test_sessions_stay_where_their_context_is(tmp_path: Path, scheduler: str) -> None:
    rows = [
        a_session(
            f"s{i}",
            a_turn(40_000, 0, base=None),
            *(a_turn(40_000 + 500 * k, 39_500 + 500 * k) for k in range(1, 20)),
        )
        for i in range(6)
    ]
    turns = played(a_trace(tmp_path, *rows), scheduler, users=6, replicas=3, until_s=300.0)
    later = [p for p in turns if p.reused_tokens]
    assert len(later) > 60
    assert all(p.outcome.cached_tokens == p.reused_tokens for p in later if p.outcome.is_finished)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "JSONDecodeError"),
        ('{"id": "a"}', "KeyError"),
        (json.dumps(a_session("a", a_turn(10, 0, base=3))), "not before it"),
        (json.dumps(a_session("a", a_turn(0, 0))), "turn 0 has impossible token counts: in 0"),
        (json.dumps(a_session("a", a_turn(10, 0), a_turn(20, 21))), "turn 1 has .* hit 21"),
        (json.dumps(a_session("a", a_turn(10, 0, out=-1))), "out -1"),
        (json.dumps(a_session("a", a_turn(10, 0, gap=-1.0))), "gap of -1 s"),
        (json.dumps(a_session("a", a_turn(10, 0, gap=float("nan")))), "gap of nan s"),
        (json.dumps(a_session("a", a_turn(10, 0))).replace("10", "1e999", 1), "infinity"),
    ],
)
def test_a_line_that_is_no_session_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LONG) + "\n" + line + "\n")
    with pytest.raises(InputError, match=f"line 2: .*{why}"):
        read_sessions(path)


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        ("a.jsonl.gz", lambda data: data[: len(data) // 2], r"cut off .* after \d+ whole sessions"),
        ("a.jsonl.gz", lambda data: data[:-20] + bytes(12) + data[-8:], "damaged"),
        ("a.jsonl.gz", lambda data: b'{"id": "a"}', "[Nn]ot a gzipped file"),
        ("a.jsonl", lambda data: data, r"not UTF-8 text; a compressed trace ends in \.gz"),
    ],
)
def test_a_damaged_trace_is_refused_as_a_file(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], why: str
) -> None:
    rows = [LONG | {"id": f"{i * 7919 % 1000}"} for i in range(200)]
    path = tmp_path / name
    path.write_bytes(damage(a_trace(tmp_path, *rows).read_bytes()))
    with pytest.raises(InputError, match=why):
        read_sessions(path)


def test_a_damaged_trace_is_found_before_the_first_cell_runs(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{")
    begun: list[int] = []
    for name in ("agents", "agents-and-completions", "agents-and-changes", "robustness"):
        with pytest.raises(InputError, match="line 1: no session"):
            experiment(name).run(
                Options((1,), trace=path, quick=True), lambda done, of: begun.append(done)
            )
    assert not begun


def test_the_study_repeats_itself_and_names_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_fleet, "WARM_UP_S", 100.0)
    monkeypatch.setattr(agent_fleet, "COUNTED_S", 300.0)
    path = a_trace(tmp_path, *(SHORT | {"id": str(i)} for i in range(4)))
    options = Options((1, 2), trace=path, quick=True, users=(1.0,))
    study = as_experiment(agents.STUDY)
    report = study.run(options, silent)
    assert study.run(options, silent).to_json() == report.to_json()
    assert report.seeds == (1,)
    assert {m.metric for m in report.means} == set(agents.STUDY.metrics)
    assert report.mean("hit_rate", "sticky", profile="large", users_per_card=1.0).mean > 0.5
    rows = json.loads(report.to_json())["extra"]["rows"]
    assert [(r["profile"], r["scheduler"]) for r in rows] == [
        (card, arm)
        for card in sorted(agent_fleet.STOCK_CARDS | agent_fleet.DUE_CARDS)
        for arm in ("foresight", "sticky")
    ]
    assert set(rows[0]) == {"scheduler", "profile", "users_per_card", *agents.ROWS}
    with pytest.raises(InputError, match="--trace"):
        study.run(Options((1,), quick=True), silent)


def a_sample(arm: str, users: float, in_time: float, seed: int = 1, card: str = "large") -> Sample:
    metrics = {"in_time": in_time, "turn_rate": in_time}
    return Sample({"profile": card, "users_per_card": users}, arm, seed, metrics)


def test_users_in_time_lie_between_the_numbers_that_were_run() -> None:
    runs = [a_sample("sticky", u, t) for u, t in ((8.0, 0.9), (4.0, 0.99), (6.0, 0.96))]
    (found,) = agents_search.users_in_time(runs)
    assert found.metrics["users_in_time"] == pytest.approx(6 + 2 / 6)
    assert found.metrics["turn_rate_there"] == pytest.approx(0.95)
    (never,) = agents_search.users_in_time(runs[:1])
    assert never.metrics["users_in_time"] != never.metrics["users_in_time"]


def test_users_who_wait_for_others_to_be_in_time_do_not_count() -> None:
    """Where some wait for minutes, their turns are late, but too few to lower the share much."""
    runs = [
        a_sample("sticky", 6.0, 0.96),
        a_sample("sticky", 8.0, 0.96),
        a_sample("sticky", 9, 0.9),
    ]
    slow = replace(runs[1], metrics={"in_time": 0.96, "turn_rate": 0.8})
    (found,) = agents_search.users_in_time([runs[0], slow, runs[2]])
    assert found.metrics["users_in_time"] == pytest.approx(6 + 2 / 11)
    assert found.metrics["turn_rate_there"] == pytest.approx(0.96 - 0.16 / 11)
    (without,) = agents_search.users_in_time(runs)
    assert without.metrics["users_in_time"] == pytest.approx(8 + 1 / 6)


def test_a_turn_that_no_kv_cache_holds_ends_its_session(tmp_path: Path) -> None:
    """As one above the model's window does; an engine refuses it."""
    small = replace(LARGE, kv_capacity_tokens=22_000)
    turns = played(a_trace(tmp_path, LONG, SHORT), profile=small)
    asked = {p.outcome.task.nodes[0].prompt_tokens for p in turns}
    assert 21_000 in asked
    assert max(asked) < 22_000
    with pytest.raises(InputError, match="no session has a turn within 6976 tokens"):
        played(a_trace(tmp_path, LONG, SHORT), profile=replace(LARGE, kv_capacity_tokens=7_000))


def test_a_seed_in_which_nobody_is_in_time_lowers_the_answer() -> None:
    """Without it, two of three seeds would promise six users to everybody."""
    runs = [a_sample("sticky", u, t, s) for s in (1, 2) for u, t in ((5.0, 1.0), (7.0, 0.9))]
    late = [a_sample("sticky", u, 0.9, 3) for u in (0.25, 5.0)]
    answer = agents_search.answer_of([*runs, *late], 0.95, 1)
    assert answer.users_per_card == pytest.approx((6 + 6 + 0) / 3)
    assert (answer.is_none, answer.turn_rate) == (False, pytest.approx(0.95))
    none = agents_search.answer_of(late, 0.95, 1)
    assert (none.is_none, none.words) == (True, "fewer than 0.25")
    all_fine = agents_search.answer_of([a_sample("sticky", 64.0, 0.99)], 0.95, 1)
    assert (all_fine.is_none, all_fine.words) == (False, "more than 64")


def test_a_turn_without_an_answer_makes_the_turn_rate_worse(tmp_path: Path) -> None:
    one, two = played(a_trace(tmp_path, LONG))[:2]
    at_s, end_s = 900.0, 4200.0

    def turn(p: PlayedTurn, took_s: float) -> PlayedTurn:
        task = replace(p.outcome.task, arrived_at_s=at_s)
        return replace(p, outcome=replace(p.outcome, task=task), gap_s=5.0, took_s=took_s)

    answered, waits = turn(one, one.unloaded_s), turn(two, nan)
    assert agent_fleet.metrics_of([answered], at_s, end_s)["turn_rate"] == pytest.approx(1.0)
    so_far_s = end_s - at_s + agent_fleet.GRACE_S
    alone_s = one.unloaded_s + two.unloaded_s + 10.0
    rate = agent_fleet.metrics_of([answered, waits], at_s, end_s)["turn_rate"]
    assert rate == pytest.approx(alone_s / (one.unloaded_s + so_far_s + 10.0))


@pytest.mark.parametrize("limit", [0.3, 1.3, 6.1, 17.4])
def test_the_search_finds_the_most_users_in_time_wherever_they_are(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(search: agents_search.Search, users: float) -> Sample:
        return a_sample("sticky", users, 0.95 + 0.01 * (limit - users))

    monkeypatch.setattr(agents_search.Search, "sample", sample)
    tried = agents_search.searched(
        agents_search.Search(Path("trace"), "large", LARGE, "sticky", 1, close=0.5)
    )
    assert len(tried) == len({s.setting["users_per_card"] for s in tried}) <= 10
    (found,) = agents_search.users_in_time(tried)
    assert found.metrics["users_in_time"] == pytest.approx(limit)


def test_a_search_ends_where_no_number_of_users_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = agents_search.Search(Path("trace"), "large", LARGE, "sticky", 1)
    for in_time in (0.5, 1.0):
        with monkeypatch.context() as patch:
            patch.setattr(
                agents_search.Search,
                "sample",
                lambda s, users, t=in_time: a_sample("sticky", users, t),
            )
            assert len(agents_search.searched(search)) < 20


def test_the_targets_are_those_of_the_worst_profile_against_its_best_baseline() -> None:
    (users,) = agents.targets(
        [
            a_sample("foresight", 4.0, 0.96),
            a_sample("foresight", 6.0, 0.94),
            a_sample("sticky", 4.0, 0.99),
            a_sample("sticky", 6.0, 0.95),
            a_sample("sticky", 7.0, 0.90),
            a_sample("session-hash", 2.0, 0.96),
            a_sample("session-hash", 4.0, 0.90),
        ]
    )
    assert users.measured == pytest.approx(5 / 6)
    assert "sticky" in users.text


def test_a_session_that_moves_fetches_its_blocks(tmp_path: Path) -> None:
    """Round robin moves every turn; with fetched blocks each is computed once."""
    rows = [
        a_session(
            f"s{n}", *(a_turn(9_000 + 500 * k, 9_000 + 500 * (k - 1) if k else 0) for k in range(9))
        )
        for n in range(3)
    ]
    path = a_trace(tmp_path, *rows)
    plain = played(path, "round-robin", replicas=3, until_s=600.0)
    card = replace(LARGE, fetch_token_s=LARGE.host_load_token_s)
    fetched = played(path, "round-robin", profile=card, replicas=3, until_s=600.0)

    def hit_rate(turns: list[PlayedTurn]) -> float:
        tokens = sum(t.outcome.task.nodes[0].prompt_tokens for t in turns)
        return sum(t.outcome.cached_tokens for t in turns) / tokens

    assert hit_rate(fetched) > 0.8 > hit_rate(plain) + 0.1


def test_limits_are_those_that_a_deployment_with_the_profile_gets() -> None:
    engine = EngineSpec("vllm")
    for name in agent_fleet.LIMITED_CARDS:
        profile = agent_fleet.card_profile(name)
        fleet = agent_fleet.cell_of(name, profile, 1.0, None, engine=agent_fleet.LIMITS).fleet
        started = engine.on("gpu", profile)
        assert fleet.chunk_tokens == started.max_num_batched_tokens
        assert fleet.prompt_cap_tokens == started.long_prefill_token_threshold
        assert fleet.prompt_cap_tokens == (256 if name.startswith("large") else 128)


def test_other_engines_have_the_goals_of_the_users_of_sticky_routing_on_stock_ones() -> None:
    whole, quick = (agents.cards(Options((1,), quick=quick)) for quick in (False, True))
    assert set(whole) - set(quick) == set(agent_fleet.LIMITED_CARDS | agent_fleet.FETCHING_CARDS)
    for name in agent_fleet.FETCHING_CARDS:
        profile = agent_fleet.card_profile(name)
        assert profile.fetch_token_s == profile.host_load_token_s > 0
        assert agent_fleet.card_profile(name.replace(" + fetch", "")).fetch_token_s == 0
    samples = [
        a_sample("sticky", 4.0, 0.96),
        a_sample("sticky", 6.0, 0.94),
        a_sample("foresight", 6.0, 0.96, card="large, due date"),
        a_sample("foresight", 8.0, 0.94, card="large, due date"),
        a_sample("sticky", 12.0, 0.94, card="large, due date"),
    ]
    (ratio,) = agents.targets(samples)
    assert (ratio.measured, ratio.goal, ratio.is_met) == (pytest.approx(7 / 5), 1.3, True)
    assert agents.arms_of(agent_fleet.CARDS["large, due date"], agents.ARMS) == [
        "foresight",
        "sticky",
    ]
