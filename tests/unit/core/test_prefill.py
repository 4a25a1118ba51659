"""What prompts get of an engine's steps: bounded by time, by due date, and no prompt starves."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.pool.prefill import (
    LEAST_S,
    LEAST_TOKENS,
    MOST_DOUBLINGS,
    MOST_S,
    NO_TARGET_S,
    CallTarget,
    DecodingCall,
    DueDateRule,
    PromptCall,
    StepLaw,
)

ROOM = 2048
NOW_S = 100.0


def a_prompt(id: str, target_s: float = inf, *, left: int = 500, **more: object) -> PromptCall:
    """Asked for now, unless it says otherwise."""
    prompt = PromptCall(id, NOW_S, left, target=CallTarget(target_s))
    return replace(prompt, **more)  # type: ignore[arg-type]


def planned(
    *prompts: PromptCall,
    decoding: tuple[DecodingCall, ...] = (),
    rule: DueDateRule | None = None,
    places: int = 16,
    free_blocks: float = inf,
) -> dict[str, int]:
    rule = rule or DueDateRule()
    return rule.plan(
        NOW_S, decoding, prompts, room_tokens=ROOM, places=places, free_blocks=free_blocks
    )


targets = st.builds(
    CallTarget,
    st.one_of(st.just(inf), st.floats(-1.0, 100.0)),
    st.floats(0.0, 30.0),
    st.integers(1, 500),
    st.one_of(st.just(inf), st.floats(0.0, 1.0)),
    st.booleans(),
)
prompt_lists = st.lists(
    st.builds(
        PromptCall,
        st.uuids().map(str),
        st.floats(NOW_S - 60.0, NOW_S),
        st.integers(1, 60_000),
        st.integers(0, 60_000),
        targets,
        st.integers(-5, 5),
        st.integers(0, 400),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
)
streams = st.lists(
    st.builds(
        DecodingCall,
        st.integers(1, 1000),
        st.floats(0.0, 60.0),
        st.one_of(st.just(inf), st.floats(0.0, 1.0)),
    ),
    max_size=12,
).map(tuple)
steps = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),
        st.integers(0, 16),
        st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 60_000)), max_size=4),
    ),
    max_size=30,
)


@given(prompt_lists, streams, steps)
def test_a_step_never_has_more_than_its_budget(
    prompts: list[PromptCall],
    decoding: tuple[DecodingCall, ...],
    seen: list[tuple[float, int, list[tuple[int, int]]]],
) -> None:
    rule = DueDateRule()
    for step in seen:
        rule.law.saw(*step)
    pieces = planned(*prompts, decoding=decoding, rule=rule, places=20, free_blocks=1000)
    by_id = {p.id: p for p in prompts}
    assert sum(pieces.values()) + len(decoding) <= ROOM
    assert all(0 < n <= by_id[id].left_tokens for id, n in pieces.items())
    if len(pieces) > 1 or sum(pieces.values()) > LEAST_TOKENS:
        work_s = sum(rule.law.piece_s(n, by_id[id].context_tokens) for id, n in pieces.items())
        assert work_s <= rule.budget_s(decoding, len(prompts)) + 1e-6
    let_in = [by_id[id] for id in pieces if not by_id[id].is_running]
    running = [p for p in prompts if p.is_running]
    if decoding or running:
        assert sum(p.blocks for p in (*running, *let_in)) <= 1000 or not let_in
        assert len(decoding) + len(running) + len(let_in) <= 20 or not let_in


@given(prompt_lists, streams)
def test_there_is_always_a_prompt_that_goes_on(
    prompts: list[PromptCall], decoding: tuple[DecodingCall, ...]
) -> None:
    running = [replace(p, is_running=True) for p in prompts]
    assert bool(planned(*running, decoding=decoding)) == bool(prompts)
    waiting = [replace(p, is_running=False) for p in prompts]
    assert bool(planned(*waiting)) == bool(prompts)


def test_prompts_go_on_in_the_order_in_which_they_are_due() -> None:
    long = a_prompt("long", 20.0, left=12_000, is_running=True)
    short = a_prompt("short", 0.5, left=100)
    late = a_prompt("late", 2.0, left=100)
    pieces = planned(long, late, short)
    assert list(pieces) == ["short", "late", "long"]
    assert pieces["short"] == pieces["late"] == 100


def test_equal_prompts_end_one_after_the_other() -> None:
    one, other = (a_prompt(id, 20.0, left=5000) for id in ("a", "b"))
    assert next(iter(planned(replace(one, left_tokens=200), other))) == "a"
    assert next(iter(planned(one, replace(other, left_tokens=200)))) == "a"


def test_a_target_that_is_missed_is_doubled_until_it_can_be_met() -> None:
    rule = DueDateRule()
    prompt = a_prompt("p", 1.0, left=100, asked_at_s=NOW_S - 3.0)
    assert rule.due_at_s(NOW_S, 0, prompt) == NOW_S + 1.0
    impossible = a_prompt("i", 0.001, left=10_000)
    assert rule.due_at_s(NOW_S, 0, impossible) == pytest.approx(NOW_S + 0.001 * 2**MOST_DOUBLINGS)


def test_a_late_prompt_is_behind_no_one_that_comes_after_its_last_due_date() -> None:
    old = a_prompt("old", 0.5, left=5000, asked_at_s=NOW_S - 0.5 * 2**MOST_DOUBLINGS)
    new = a_prompt("new", 0.01, left=100)
    rule = DueDateRule()
    assert rule.in_order(NOW_S, 0, [new, old])[0] == old
    without = replace(old, target=CallTarget(), asked_at_s=NOW_S - 17 * NO_TARGET_S)
    assert rule.in_order(NOW_S, 0, [new, without])[0] == without


def test_under_steady_short_prompts_a_long_one_ends() -> None:
    rule, now_s, left, shorts = DueDateRule(), 0.0, 20_000, list[PromptCall]()
    number, long = 0, PromptCall("long", 0.0, left, target=CallTarget(5.0), is_running=True)
    streams = (DecodingCall(5, 0.1),)
    while long.left_tokens:
        while number * 0.05 <= now_s:  # more work than the steps have time for
            shorts.append(PromptCall(f"s{number}", number * 0.05, 400, target=CallTarget(0.2)))
            number += 1
        calls = [long, *shorts]
        pieces = rule.plan(now_s, streams, calls, room_tokens=ROOM, places=10**6)
        left_of = {p.id: p.left_tokens - pieces.get(p.id, 0) for p in calls}
        long = replace(long, left_tokens=left_of["long"])
        shorts = [
            replace(p, left_tokens=left_of[p.id], is_running=p.is_running or p.id in pieces)
            for p in shorts
            if left_of[p.id]
        ]
        now_s += rule.law.decode_s(1) + MOST_S
        assert now_s < 2 * 5.0 * 2**MOST_DOUBLINGS, "the long prompt starves"


def test_streams_keep_their_pace() -> None:
    rule = DueDateRule()
    step_s = rule.law.decode_s(2)
    ahead = DecodingCall(50, 1.0, tpot_s=0.1)
    assert rule.budget_s([ahead, ahead], 3) == MOST_S
    close = DecodingCall(10, 10 * 0.1 - step_s - 0.03, tpot_s=0.1)
    assert rule.budget_s([ahead, close], 3) == pytest.approx(0.03)
    behind = DecodingCall(10, 5.0, tpot_s=0.1)
    assert rule.budget_s([ahead, behind], 3) == LEAST_S


def test_an_impossible_pace_does_not_hold_prompts_back_for_ever() -> None:
    rule = DueDateRule()
    step_s = rule.law.decode_s(1)
    hopeless = DecodingCall(100, 100 * 2 * step_s, tpot_s=step_s / 3)
    assert rule.budget_s([hopeless], 3) > LEAST_S


def test_streams_whose_pace_the_batch_just_keeps_get_no_more_beside_them() -> None:
    rule = DueDateRule()
    paced = tuple(DecodingCall(5, 0.0, tpot_s=rule.law.decode_s(4)) for _ in range(4))
    waiting = a_prompt("w", 0.5)
    assert not planned(waiting, decoding=paced)
    assert planned(waiting, decoding=paced[:3])
    assert planned(replace(waiting, is_running=True), decoding=paced)


def test_blocks_that_paused_prompts_need_are_not_given_away() -> None:
    paused = a_prompt("paused", 50.0, left=12_000, is_running=True, blocks=60)
    short = a_prompt("short", 0.5, left=100, blocks=10)
    assert "short" in planned(paused, short, free_blocks=70)
    assert list(planned(paused, short, free_blocks=69)) == ["paused"]


def test_what_does_not_fit_is_not_passed_by_later_ones() -> None:
    running = a_prompt("running", 60.0, is_running=True)
    large = a_prompt("large", 1.0, blocks=50)
    small = a_prompt("small", 2.0, blocks=1)
    assert list(planned(running, large, small, free_blocks=40)) == ["running"]
    assert next(iter(planned(large, small, free_blocks=40))) == "large"  # nothing will free more


def test_answers_that_somebody_reads_go_first() -> None:
    begun = replace(a_prompt("begun"), target=CallTarget(has_begun=True))
    assert next(iter(planned(a_prompt("new", 0.2), begun))) == "begun"


def test_a_call_is_due_with_its_last_token_unless_its_first_one_counts() -> None:
    rule = DueDateRule()
    whole = replace(a_prompt("whole"), target=CallTarget(20.0, tokens=501))
    assert rule.due_at_s(NOW_S, 3, whole) == NOW_S + 20.0 - 500 * rule.law.decode_s(4)


@pytest.mark.parametrize(
    ("base_s", "request_s", "token_s", "attended_s"),
    [(0.006, 0.0003, 1.0e-4, 2.6e-8), (0.02, 0.0005, 1.2e-4, 0.0), (0.03, 0.002, 4e-4, 1e-7)],
)
def test_what_steps_take_is_learnt_from_them(
    base_s: float, request_s: float, token_s: float, attended_s: float
) -> None:
    law, context = StepLaw(), 0

    def true_s(streams: int, tokens: int, context: int) -> float:
        attended = tokens * (context + tokens / 2)
        return base_s + request_s * streams + token_s * tokens + attended_s * attended

    for step in range(60):
        tokens = law.tokens_in(MOST_S, context) if step % 3 else 0
        pieces = [(tokens, context)] if tokens else []
        law.saw(true_s(step % 9, tokens, context), step % 9, pieces)
        context = (context + tokens) % 12_000
    assert law.decode_s(8) == pytest.approx(true_s(8, 0, 0), rel=0.15)
    for context in (500, 6000, 11_000):
        tokens = law.tokens_in(MOST_S, context)
        added_s = true_s(8, tokens, context) - true_s(8, 0, 0)
        assert added_s == pytest.approx(MOST_S, rel=0.15)


def test_one_step_of_a_busy_machine_changes_little() -> None:
    law = StepLaw()
    for _ in range(50):
        law.saw(0.06, 8, [(400, 4000)])
    before = law.tokens_in(MOST_S, 4000)
    law.saw(5.0, 8, [(400, 4000)])
    assert law.tokens_in(MOST_S, 4000) > before / 2


def test_a_prompt_that_the_engine_admits_first_is_not_left_without_tokens() -> None:
    first = a_prompt("first", 60.0, left=100, enters_first=True)
    soon = a_prompt("soon", 1.0, left=60_000)
    assert list(planned(soon, first)) == ["first", "soon"]
    assert list(planned(soon, replace(first, left_tokens=60_000))) == ["first"]


def test_a_prompt_that_the_engine_cannot_admit_takes_nothing_from_those_that_run() -> None:
    first = a_prompt("first", 60.0, left=60_000, blocks=10, enters_first=True)
    runs = a_prompt("runs", 30.0, is_running=True)
    waits = a_prompt("waits", 1.0)
    assert list(planned(first, runs, waits, places=1)) == ["runs"]
    assert list(planned(first, runs, waits, free_blocks=9)) == ["runs"]
