"""Arrival rates of models: lately, and at this time on other days."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cato.core.arrival_rates import AHEAD_S, DAY_S, HISTORY_S, SLICE_S, ArrivalRates
from cato.core.ids import ModelName

JAVA, RUST = ModelName("java"), ModelName("rust")
# 5 January 1970, and by how much the driver's clock is behind the wall's.
MONDAY_S = 4 * DAY_S
NINE_S, TEN_S = 9 * 3600.0, 10 * 3600.0


def at(day: int, time_s: float) -> float:
    """The driver's clock on a day of the first week."""
    return day * DAY_S + time_s


def a_week(days: int = 5, per_slice: int = 30) -> ArrivalRates:
    """Java is asked for from nine to ten on each of the first `days` days, Rust once a day."""
    rates = ArrivalRates()
    rates.tell_clock(at(0, 0), MONDAY_S)
    for day in range(days):
        for i in range(2 * per_slice):
            rates.note(at(day, NINE_S + i * SLICE_S / per_slice), JAVA)
        rates.note(at(day, 11 * 3600), RUST)
    rates.tell_clock(at(days, 0), MONDAY_S + at(days, 0))
    return rates


def test_without_a_clock_there_are_no_days() -> None:
    rates = ArrivalRates()
    for i in range(100):
        rates.note(i * 600.0, JAVA)
    assert rates.learnt() == ()
    rate, evidence = rates.rate(60_000.0, JAVA)
    assert rate == pytest.approx(1 / 600, rel=0.2)
    assert evidence < 4


def test_a_model_is_expected_shortly_before_the_time_at_which_it_usually_is_asked_for() -> None:
    rates = a_week()
    usual_per_s = 30 / SLICE_S
    expected = {}
    for minutes in (-30, -15, -7.5, 0, 20, 50, 60):
        now_s = at(5 - 1, NINE_S) + DAY_S * 3 + minutes * 60  # the next Monday
        rates.tell_clock(now_s, MONDAY_S + now_s)
        expected[minutes] = rates.rate(now_s, JAVA)[0]
    weight = HISTORY_S / (HISTORY_S + 1800)
    assert expected[-30] < 0.01 * usual_per_s
    assert expected[-15] < 0.01 * usual_per_s
    assert expected[-7.5] == pytest.approx(usual_per_s * weight * 450 / AHEAD_S, rel=0.05)
    assert expected[0] == pytest.approx(usual_per_s * weight, rel=0.05)
    assert expected[50] < expected[20]
    assert expected[60] < 0.01 * usual_per_s


def test_what_comes_today_counts_beside_what_usually_comes() -> None:
    rates = a_week()
    quiet_s = at(7, NINE_S + 1700)
    before = rates.rate(quiet_s, JAVA)[0]
    for i in range(200):
        rates.note(at(7, NINE_S) + i * 8, JAVA)
    assert rates.rate(quiet_s, JAVA)[0] > 2 * before


def test_weekends_are_days_of_another_kind() -> None:
    rates = a_week()
    saturday_s, monday_s = at(5, NINE_S), at(7, NINE_S)
    assert rates.rate(saturday_s, JAVA)[1] < 1  # nobody knows a weekend yet
    rates.tell_clock(at(7, 0), MONDAY_S + at(7, 0))
    assert rates.rate(monday_s, JAVA)[1] > 25


def test_what_was_learnt_is_told_once_and_can_be_remembered() -> None:
    rates, fresh = a_week(), ArrivalRates()
    slices = rates.learnt()
    assert {(s.model, s.slice, s.is_weekend) for s in slices if s.arrivals} == {
        (JAVA, 18, False),
        (JAVA, 19, False),
        (RUST, 22, False),
    }
    assert {s.days for s in slices} == {5}
    assert rates.learnt() == ()
    fresh.remember(slices)
    now_s = 1000.0  # another driver, another clock
    fresh.tell_clock(now_s, MONDAY_S + at(7, NINE_S))
    assert fresh.rate(now_s, JAVA)[1] == pytest.approx(HISTORY_S * 30 / SLICE_S)
    assert fresh.rate(now_s, RUST)[1] == 0


def test_a_slice_that_was_not_watched_from_its_beginning_says_nothing() -> None:
    rates = ArrivalRates()
    rates.tell_clock(0.0, MONDAY_S + NINE_S + 600)
    for i in range(50):
        rates.note(10.0 * i, JAVA)
    rates.tell_clock(SLICE_S, MONDAY_S + NINE_S + 600 + SLICE_S)
    assert rates.learnt() == ()


def test_a_clock_that_was_put_right_spoils_only_the_slice_that_it_was_in() -> None:
    rates = ArrivalRates()
    rates.tell_clock(0.0, MONDAY_S)
    rates.note(10.0, JAVA)
    rates.tell_clock(20.0, MONDAY_S + 20 + 3600)
    for now_s in (SLICE_S, 2 * SLICE_S, 3 * SLICE_S):
        rates.tell_clock(now_s, MONDAY_S + now_s + 3600)
    assert [s for s in rates.learnt() if s.arrivals] == []


def test_days_before_the_last_ten_fade() -> None:
    rates = ArrivalRates()
    rates.tell_clock(0.0, MONDAY_S)
    for day in range(28):
        for i in range(30 if day < 14 else 0):
            rates.note(at(day, NINE_S + i), JAVA)
        rates.tell_clock(at(day + 1, 0), MONDAY_S + at(day + 1, 0))
    seen = [s for s in rates.learnt() if s.slice == 18 and not s.is_weekend]
    assert 30 * 0.9**11 < seen[0].arrivals < 30 * 0.9**9


def test_a_long_silence_is_days_without_arrivals() -> None:
    rates = a_week(days=2)
    now_s = at(4, 0)
    rates.tell_clock(now_s, MONDAY_S + now_s)
    (nine, *_) = [s for s in rates.learnt() if s.model == JAVA and s.slice == 18]
    assert (nine.days, nine.arrivals) == (3, 20.0)


def test_expectation_moves_without_jumps() -> None:
    rates = a_week()
    found = [rates.rate(at(7, NINE_S - 1800 + s), JAVA)[0] for s in range(0, 5400, 30)]
    assert max(abs(b - a) for a, b in pairwise(found)) < 0.1 * max(found)


def at_work(gap_s: float = 60.0, rounds: int = 20) -> ArrivalRates:
    """Somebody who asks for Java and Rust in turns, and somebody else once."""
    rates = ArrivalRates()
    rates.note(0.0, JAVA, "other")
    for i in range(rounds):
        rates.note(i * gap_s, (JAVA, RUST)[i % 2], "one")
    return rates


def test_who_asked_for_one_model_is_expected_to_ask_for_what_follows_it() -> None:
    rates = at_work(rounds=200)
    last_s = 199 * 60.0  # Rust
    java, rust = (rates.rate(last_s + 10, m)[0] for m in (JAVA, RUST))
    assert java == pytest.approx((99 - 99**0.5) / 100 / 60)  # a standard error below the share
    assert rust < java / 1.5
    rates.note(last_s + 60, JAVA, "one")
    assert rates.rate(last_s + 70, RUST)[0] > 0.8 / 60
    assert rates.rate(last_s + 70, JAVA)[0] < 0.6 / 60


def test_who_has_gone_home_is_expected_no_more() -> None:
    rates, unknown = at_work(), ArrivalRates()
    unknown.note(0.0, JAVA)
    for i in range(20):
        unknown.note(i * 60.0, (JAVA, RUST)[i % 2])
    later_s = 19 * 60.0 + 130
    assert rates.rate(later_s, RUST) == unknown.rate(later_s, RUST)
    assert rates.rate(later_s, JAVA) == unknown.rate(later_s, JAVA)


def test_two_who_are_at_work_are_expected_twice() -> None:
    rates = at_work()
    now_s = 19 * 60.0 + 5
    before = rates.rate(now_s, JAVA)[0]
    rates.note(now_s, RUST, "two")
    assert rates.rate(now_s, JAVA)[0] == pytest.approx(2 * before, rel=0.1)


def test_a_call_the_next_day_follows_nothing() -> None:
    rates = ArrivalRates()
    for day in range(10):
        rates.note(day * DAY_S, JAVA, "one")
        rates.note(day * DAY_S + 3600, RUST, "one")
    assert rates.rate(9 * DAY_S + 10, RUST)[0] <= 1 / 1800
