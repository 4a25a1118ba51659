"""What a turn gets of the time that its session has left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.pool.sessions import MEMORY_S
from cato.core.session_slo import (
    MOST_SESSIONS,
    PRIOR_LEFT_TURNS,
    PRIOR_SESSIONS,
    PRIOR_THINK_S,
    REMEMBERED_SESSIONS,
    SessionBelief,
    SessionBook,
    share_of_turn,
)

TEN_TURNS = SessionBelief(left_turns=10.0, think_s=5.0)
seconds = st.floats(0.01, 10_000)


def test_turns_share_what_think_times_leave_in_proportion_to_their_times() -> None:
    share = share_of_turn(1e6, 1e6, own_s=4.0, next_s=2.0, belief=TEN_TURNS)
    later = share.later_turns
    assert 6 < later < 7
    assert share.budget_s == pytest.approx((1e6 - 5.0 * later) * 4.0 / (4.0 + 2.0 * later))


def test_a_part_makes_a_turn_less_urgent_than_usual_and_never_more() -> None:
    share = share_of_turn(600.0, 600.0, 4.0, 2.0, TEN_TURNS)
    assert share.budget_s is not None
    assert share.first_token_s(2.0, 8.0) == share.budget_s - 8.0 > 2.0
    assert share_of_turn(600.0, 9.0, 4.0, 2.0, TEN_TURNS).first_token_s(2.0, 8.0) == 2.0
    assert share_of_turn(600.0, 3.0, 4.0, 2.0, TEN_TURNS).first_token_s(2.0, 8.0) == 2.0


def test_turns_whose_times_nobody_knows_share_evenly() -> None:
    share = share_of_turn(100.0, 100.0, 0.0, 0.0, SessionBelief(10.0, 0.0))
    assert share.budget_s == pytest.approx(100.0 / (1 + share.later_turns))


def test_what_a_turn_leaves_unused_is_carried_to_the_next() -> None:
    first = share_of_turn(1000.0, 1000.0, 2.0, 2.0, TEN_TURNS)
    quick = share_of_turn(1000.0, 1000.0 - 2.0 - 5.0, 2.0, 2.0, TEN_TURNS)
    slow = share_of_turn(1000.0, 1000.0 - 60.0 - 5.0, 2.0, 2.0, TEN_TURNS)
    assert (first.budget_s or 0.0) > (slow.budget_s or 0.0)
    assert (quick.budget_s or 0.0) > (slow.budget_s or 0.0) > 0.0
    assert quick.slack_s(2.0) - slow.slack_s(2.0) > 50.0


def test_a_turn_that_cannot_end_in_time_has_no_part() -> None:
    share = share_of_turn(600.0, 3.0, own_s=4.0, next_s=2.0, belief=TEN_TURNS)
    assert share.budget_s is None
    assert share.slack_s(4.0) < 0


@given(left_s=seconds, own_s=seconds, next_s=seconds, turns=st.floats(0, 500), think_s=seconds)
def test_a_part_is_enough_for_the_turn_and_no_more_than_is_left(
    left_s: float, own_s: float, next_s: float, turns: float, think_s: float
) -> None:
    share = share_of_turn(left_s, left_s, own_s, next_s, SessionBelief(turns, think_s))
    if share.budget_s is None:
        assert own_s >= left_s
    else:
        assert own_s * (1 - 1e-6) <= share.budget_s <= left_s * (1 + 1e-6)
        assert share.slack_s(own_s) >= -1e-6 * left_s


@given(turns=st.floats(0, 1000), most=st.floats(0, 1000))
def test_turns_to_come_are_at_most_those_that_fit_and_those_expected(
    turns: float, most: float
) -> None:
    within = SessionBelief(turns).turns_within(most)
    assert 0 <= within <= min(turns, most) + 1e-6


def test_turns_to_come_within_a_bound_are_the_median_of_a_cut_geometric() -> None:
    for most in (5, 20, 200):
        weights = [(10 / 11) ** k for k in range(most + 1)]
        median = TEN_TURNS.turns_within(most)
        assert sum(weights[: int(median) + 1]) <= sum(weights) / 2
        assert sum(weights[: int(median) + 2]) >= sum(weights) / 2


def play(book: SessionBook, session: str, turns: int, at_s: float, think_s: float = 7.0) -> float:
    """`turns` of 1 s each from `at_s` on; when the last ended."""
    for _ in range(turns):
        book.begin(session, "agent", at_s)
        book.ended(session, at_s + 1.0)
        at_s += 1.0 + think_s
    return at_s - think_s


def test_a_belief_starts_from_recorded_sessions_and_follows_those_that_end() -> None:
    book = SessionBook()
    assert book.belief("agent") == SessionBelief(PRIOR_LEFT_TURNS, PRIOR_THINK_S)
    for n in range(300):
        play(book, f"s{n}", 5, at_s=n * 2 * MEMORY_S)
    belief = book.belief("agent")
    ended = 299  # the last may go on
    assert belief.left_turns == pytest.approx(
        (300 * 4 + PRIOR_SESSIONS * PRIOR_LEFT_TURNS) / (ended + PRIOR_SESSIONS)
    )
    assert belief.think_s == pytest.approx(7.0, abs=1.0)
    assert book.belief("other").left_turns == PRIOR_LEFT_TURNS


def test_a_session_that_comes_back_after_a_silence_had_not_ended() -> None:
    book = SessionBook()
    last_s = play(book, "s", 3, at_s=0.0)
    back = book.begin("s", "agent", last_s + 2 * MEMORY_S)
    assert (back.began_at_s, back.think_s) == (0.0, 2 * MEMORY_S)
    again = SessionBook()
    play(again, "s", 3, at_s=0.0)
    again.begin("s", "agent", last_s + 2.0)
    assert book.belief("agent").left_turns == again.belief("agent").left_turns


def test_sessions_that_all_come_back_leave_no_negative_number_of_ended_ones() -> None:
    """An evening's sessions go on in the morning, after their counts were halved."""
    book = SessionBook()
    sessions = [f"s{n}" for n in range(round(REMEMBERED_SESSIONS))]
    for session in sessions:
        book.begin(session, "agent", 0.0)
        book.ended(session, 1.0)
    for session in sessions:
        book.begin(session, "agent", 10 * MEMORY_S)
        book.ended(session, 10 * MEMORY_S)
        assert book.belief("agent").left_turns > 0.0
    followed = len(sessions)
    assert book.belief("agent").left_turns == pytest.approx(
        (followed + PRIOR_SESSIONS * PRIOR_LEFT_TURNS) / PRIOR_SESSIONS
    )


def test_a_name_that_comes_back_after_its_target_is_a_new_session() -> None:
    book = SessionBook()
    book.begin("nightly", "", 0.0, target_s=100.0)
    book.ended("nightly", 50.0)
    soon = book.begin("nightly", "", 130.0)
    assert soon.began_at_s == 0.0
    assert soon.share is not None
    assert soon.share.left_s == -30.0
    book.ended("nightly", 140.0)
    next_day = book.begin("nightly", "", 86_400.0, target_s=100.0)
    assert (next_day.began_at_s, next_day.think_s) == (86_400.0, None)


def test_a_turn_without_an_answer_is_none_and_asking_again_is_no_thinking() -> None:
    book = SessionBook()
    book.begin("s", "agent", 0.0)
    book.ended("s", 1.0, is_answered=False)
    again = book.begin("s", "agent", 4.0)
    assert again.think_s is None
    assert book.belief("agent") == SessionBelief(PRIOR_LEFT_TURNS, PRIOR_THINK_S)


def test_think_time_begins_when_all_of_a_sessions_calls_have_ended() -> None:
    book = SessionBook()
    book.begin("s", "agent", 0.0)
    book.begin("s", "agent", 1.0)
    book.ended("s", 2.0)
    book.ended("s", 5.0)
    assert book.begin("s", "agent", 8.0).think_s == 3.0


def test_a_sub_agent_shares_the_time_of_the_session_that_started_it() -> None:
    book = SessionBook()
    book.begin("main", "agent", 0.0, target_s=600.0)
    book.ended("main", 10.0)
    sub = book.begin("sub", "agent", 100.0, parent="main")
    assert sub.share is not None
    assert (sub.began_at_s, sub.share.target_s, sub.share.left_s) == (0.0, 600.0, 500.0)


def test_a_session_that_had_turns_elsewhere_is_as_old_as_these() -> None:
    began = SessionBook().begin("s", "agent", 1000.0, number=5, times_s=(9.0, 5.0)).began_at_s
    assert began == 1000.0 - 4 * (5.0 + PRIOR_THINK_S)


def test_memory_is_bounded() -> None:
    book = SessionBook()
    for n in range(MOST_SESSIONS + 10):
        book.begin(f"s{n}", "agent", 0.0)
    assert len(book) == MOST_SESSIONS
    for n in range(MOST_SESSIONS + 10):
        book.begin(f"t{n}", "agent", 2 * MEMORY_S)
    assert len(book) == 2 * MOST_SESSIONS
