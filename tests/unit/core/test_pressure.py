"""The pressure of a queue is the work that can still be in time, and the share that is missed."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.ids import InvocationId
from cato.core.pool.pressure import (
    CALM_LATE_SHARE,
    FEW_CALLS,
    FIRST_OFFERED_S,
    FIRST_RESTS,
    LATE_BURST_S,
    LATE_SHARE,
    LEAST_PACE,
    MEMORY_S,
    MOST_PACE,
    NEWCOMERS,
    OFFERED_CALLS,
    OFFERED_S,
    RECENT_S,
    RESTS_MEMORY_S,
    TREND_S,
    Kind,
    LateShare,
    Pressure,
)

CALLS = st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.01, 5.0)), max_size=30)


def test_a_rest_is_in_vain_if_newcomers_wait_when_it_ends() -> None:
    pressure, newcomer = Pressure(), InvocationId("new")
    pressure.join(InvocationId("begun"), 9.0, 1.0, 0.0, Kind.REST)
    pressure.goes_on(0.0)
    assert pressure.in_vain(0.0) == 0.0, "only streams that rest are queued"
    pressure.join(newcomer, 9.0, 1.0, 0.0)
    pressure.goes_on(0.0)
    assert pressure.in_vain(0.0) == pytest.approx(1 / (2 + FIRST_RESTS))
    pressure.leave(newcomer)
    pressure.goes_on(0.0)
    assert pressure.in_vain(0.0) == pytest.approx(1 / (3 + FIRST_RESTS))


def test_rests_count_as_in_vain_until_they_have_ended() -> None:
    pressure = Pressure()
    calls = [InvocationId(f"{n}") for n in range(40)]
    for call in calls:
        pressure.join(call, 9.0, 1.0, 0.0, Kind.PACED_REST)
    assert pressure.in_vain(0.0) == pytest.approx(40 / (40 + FIRST_RESTS))
    for call in calls:
        pressure.leave(call)
        pressure.goes_on(0.0)
    assert pressure.resting == pressure.in_vain(0.0) == 0.0


@pytest.mark.parametrize(
    ("kind", "in_vain"), [(Kind.PACED_REST, 1.0), (Kind.REST, 0.0), (Kind.OTHER, 0.0)]
)
def test_a_stream_that_falls_behind_its_target_pace_has_rested_in_vain(
    kind: Kind, in_vain: float
) -> None:
    pressure = Pressure()
    pressure.join(InvocationId("rests"), 1.0, 1.0, 0.0, kind)
    pressure.pass_to(2.0)
    assert pressure.in_vain(2.0) == pytest.approx(in_vain / (1 + FIRST_RESTS))


def test_a_newcomer_that_is_late_makes_no_rest_vain() -> None:
    pressure = Pressure()
    pressure.join(InvocationId("late"), 1.0, 1.0, 0.0)
    pressure.pass_to(2.0)
    pressure.goes_on(2.0)
    assert pressure.newcomers == 0
    assert pressure.in_vain(2.0) == 0.0


def test_without_rests_those_in_vain_are_forgotten() -> None:
    """Otherwise no stream would rest again once the overload is over."""
    pressure = Pressure()
    pressure.join(InvocationId("new"), 1e3, 1.0, 0.0)
    for _ in range(50):
        pressure.goes_on(0.0)
    assert pressure.in_vain(0.0) > 0.9
    assert pressure.in_vain(5 * RESTS_MEMORY_S) < 0.3


def test_a_crowd_lasts_while_calls_that_can_be_in_time_are_queued() -> None:
    pressure, first, second = Pressure(), InvocationId("first"), InvocationId("second")
    assert pressure.crowded_s(3.0) == 0.0
    pressure.join(first, 9.0, 1.0, 3.0)
    pressure.join(second, 6.0, 1.0, 4.0, Kind.REST)
    pressure.leave(first)
    assert pressure.crowded_s(5.0) == 2.0, "streams that rest belong to it"
    pressure.pass_to(7.0)
    assert pressure.crowded_s(7.0) == 0.0, "what is late does not"
    pressure.join(first, 9.0, 1.0, 8.0)
    assert pressure.crowded_s(8.5) == 0.5


@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.floats(9.0, 99.0), st.floats(0.1, 5.0))),
    st.floats(0.0, 99.0),
)
def test_a_stream_that_rests_follows_new_calls_and_what_must_go_on_sooner(
    calls: list[tuple[Kind, float, float]], latest_s: float
) -> None:
    pressure, long_after_s = Pressure(), 100 * RECENT_S
    for i, (kind, by_s, load_s) in enumerate(calls):
        pressure.join(InvocationId(f"{i}"), by_s, load_s, 0.0, kind)
    before_s = 0.0
    for kind, by_s, load_s in calls:
        if kind in NEWCOMERS or (kind is not Kind.REST and by_s <= latest_s):
            before_s += load_s
    ahead_s = pressure.ahead_s(long_after_s, 2) - pressure.needs_s(pressure.resting_s, 2)
    found_s = pressure.rests_before(ahead_s, 2)(latest_s)
    assert found_s == pytest.approx(before_s / 2, abs=1e-6)


@given(st.lists(st.tuples(st.sampled_from(Kind), st.floats(0.01, 5.0)), max_size=20))
def test_streams_that_rest_may_be_left_out_of_what_is_ahead(
    calls: list[tuple[Kind, float]],
) -> None:
    """Those whose pace is no SLO follow new calls."""
    pressure, long_after_s = Pressure(), 100 * RECENT_S
    for i, (kind, load_s) in enumerate(calls):
        pressure.join(InvocationId(f"{i}"), 1e9, load_s, 0.0, kind)
    others_s = sum(load_s for kind, load_s in calls if kind is not Kind.REST)
    ahead_s = pressure.ahead_s(long_after_s, 2) - pressure.needs_s(pressure.resting_s, 2)
    assert ahead_s == pytest.approx(others_s / 2)
    for i in range(len(calls)):
        pressure.changed(InvocationId(f"{i}"), 1.0)
    assert pressure.resting_s == pytest.approx(sum(kind is Kind.REST for kind, _ in calls))
    for i in range(len(calls)):
        pressure.leave(InvocationId(f"{i}"))
    assert pressure.resting_s == pressure.waiting_s == 0.0


@given(CALLS, st.sets(st.integers(0, 29)), st.floats(0.0, 100.0))
def test_what_waits_and_can_be_met_counts(
    calls: list[tuple[float, float]], gone: set[int], now_s: float
) -> None:
    pressure = Pressure()
    for i, (latest_s, load_s) in enumerate(calls):
        pressure.join(InvocationId(f"{i}"), latest_s, load_s, 0.0)
    for i in gone:
        assert pressure.leave(InvocationId(f"{i}")) == (i < len(calls))
    pressure.pass_to(now_s)
    left = [load for i, (latest, load) in enumerate(calls) if i not in gone and latest >= now_s]
    late = [load for i, (latest, load) in enumerate(calls) if i not in gone and latest < now_s]
    assert pressure.waiting_s == pytest.approx(sum(left))
    assert pressure.newcomers == len(left)
    assert pressure.missed == (1.0 if late else 0.0)


def test_a_call_that_joins_again_counts_by_its_new_time() -> None:
    pressure, id = Pressure(), InvocationId("i")
    pressure.join(id, 1.0, 2.0, 0.0)
    pressure.leave(id)
    pressure.join(id, 5.0, 2.0, 0.0)
    pressure.pass_to(3.0)
    assert pressure.waiting_s == 2.0
    assert pressure.missed == 0.0


def test_what_was_missed_is_forgotten_as_others_begin() -> None:
    pressure = Pressure()
    pressure.join(InvocationId("i"), 1.0, 1.0, 0.0)
    pressure.begins(3.0, 0.0)
    pressure.pass_to(1.5)
    assert 0.2 < pressure.missed < 0.3
    pressure.begins(1.0, 1.5 + 3 * MEMORY_S)
    assert pressure.missed < 0.05


def test_work_in_time_is_a_share_of_the_time_of_all_replicas() -> None:
    pressure = Pressure()
    assert pressure.in_time(0.0, 4) == 0.0
    pressure.begins(2.0, 0.0)
    assert pressure.in_time(0.0, 4) == pytest.approx(2.0 / (4 * MEMORY_S))
    assert pressure.in_time(20 * MEMORY_S, 4) < 1e-6


def test_a_queue_is_as_long_as_its_work_by_the_pace_of_the_replicas() -> None:
    pressure = Pressure()
    pressure.join(InvocationId("i"), 1e9, 6.0, 0.0)
    long_after_s = 100 * RECENT_S
    assert pressure.ahead_s(long_after_s, 2) == pytest.approx(3.0)
    for i in range(200):  # two replicas end calls that were believed to be twice as long
        pressure.worked(0.4, 0.1 * i, 2)
    assert pressure.pace == pytest.approx(2.0, rel=0.05)
    assert pressure.ahead_s(0.1 * 200, 2) == pytest.approx(1.5, rel=0.05)


def test_time_without_a_queue_does_not_count_for_the_pace() -> None:
    pressure = Pressure()
    for i in range(20):
        pressure.worked(0.1, 0.1 * i, 1)
    assert pressure.pace == pytest.approx(1.0, rel=0.1)
    pressure.rests()
    pressure.worked(0.1, 1000.0, 1)
    pressure.worked(0.1, 1000.1, 1)
    assert pressure.pace == pytest.approx(1.0, rel=0.1)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 50.0)), max_size=40))
def test_the_pace_keeps_its_bounds(ends: list[tuple[float, float]]) -> None:
    pressure, now_s = Pressure(), 0.0
    for after_s, load_s in ends:
        now_s += after_s
        pressure.worked(load_s, now_s, 3)
        assert LEAST_PACE <= pressure.pace <= MOST_PACE


def test_more_work_than_the_replicas_can_do_lengthens_the_queue_ahead() -> None:
    pressure = Pressure()
    pressure.join(InvocationId("i"), 1e9, 0.5, 0.0)
    rate = 0.5 / RECENT_S
    assert pressure.ahead_s(0.0, 1) == pytest.approx(0.5 + TREND_S * (rate - 1.0))
    assert pressure.ahead_s(0.0, 100) == pytest.approx(0.005)
    assert pressure.ahead_s(100 * RECENT_S, 1) == pytest.approx(0.5)


def test_the_pace_is_soon_that_of_the_last_calls() -> None:
    pressure = Pressure()
    for i in range(400):
        pressure.worked(0.3 if i < 200 else 0.1, 0.1 * i, 1)
    assert pressure.pace == pytest.approx(1.0, rel=0.3)


def test_work_that_is_estimated_anew_counts_with_its_new_load() -> None:
    pressure = Pressure()
    pressure.join(InvocationId("i"), 10.0, 2.0, 0.0)
    pressure.changed(InvocationId("i"), 1.0)
    pressure.changed(InvocationId("unknown"), 7.0)
    assert pressure.waiting_s == 1.0
    pressure.pass_to(11.0)
    pressure.begins(1.0, 11.0)
    assert pressure.missed == pytest.approx(0.5)


def test_late_turns_get_a_burst_and_then_their_share_of_the_time() -> None:
    for late, part in ((0.1, CALM_LATE_SHARE), (0.2, LATE_SHARE)):
        share = LateShare()
        assert share.left_s(100.0, 2, late) == 2 * LATE_BURST_S
        share.begins(2 * LATE_BURST_S + 1.0, 100.0, 2, late)
        assert share.left_s(100.0, 2, late) == pytest.approx(-1.0)
        until_s = 100.0 + 1.0 / (2 * part)
        before, after = (share.left_s(until_s + s, 2, late) for s in (-0.1, 0.1))
        assert before < 0.0 < after
        assert share.left_s(1e6, 2, late) == 2 * LATE_BURST_S


@given(
    st.sampled_from([(0.1, CALM_LATE_SHARE), (0.2, LATE_SHARE)]),
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 50.0)), max_size=40),
)
def test_late_turns_never_get_more_than_that(
    at: tuple[float, float], turns: list[tuple[float, float]]
) -> None:
    late, part = at
    share, now_s, used_s = LateShare(), 0.0, 0.0
    for after_s, load_s in turns:
        now_s += after_s
        if share.left_s(now_s, 1, late) > 0:
            share.begins(load_s, now_s, 1, late)
            used_s += load_s
        assert used_s <= LATE_BURST_S + part * now_s + 50.0


def test_late_turns_may_use_what_was_lost_with_a_replica_in_addition() -> None:
    share = LateShare()
    share.begins(2 * LATE_BURST_S, 100.0, 2, 0.5)
    share.lost(60.0)
    assert share.left_s(100.0, 2, 0.5) == 60.0
    share.begins(50.0, 100.0, 2, 0.5)
    share.lost(-60.0)  # the replica is back
    assert share.left_s(100.0, 2, 0.5) == -50.0
    assert share.left_s(1e6, 2, 0.5) == 2 * LATE_BURST_S


def test_what_no_session_asked_for_again_is_forgotten_in_time() -> None:
    share = LateShare()
    share.left_s(100.0, 2, 0.5)
    share.lost(60.0)
    assert share.left_s(100.0, 2, 0.5) == 2 * LATE_BURST_S + 60.0
    assert share.left_s(400.0, 2, 0.5) == 2 * LATE_BURST_S + 60.0 - 300.0 * 2 * LATE_SHARE
    assert share.left_s(1e6, 2, 0.5) == 2 * LATE_BURST_S


@given(st.floats(0.2, 3.0), st.integers(1, 8), st.floats(0.4, 20.0))
def test_the_offered_load_is_what_comes_as_a_share_of_what_can_be_done(
    load: float, replicas: int, for_s: float
) -> None:
    pressure, each_s = Pressure(), 0.01
    assert pressure.offered_load(5.0, replicas) == 0.0
    gap_s = each_s / (load * replicas)
    for n in range(int(for_s / gap_s)):
        pressure.join(InvocationId(f"{n}"), 1e9, each_s, n * gap_s)
    pressure.join(InvocationId("rests"), 1e9, 50.0, for_s, Kind.REST)
    # As if a few more calls had come in just the time that they take.
    over_s, few_s = OFFERED_S * (1 - exp(-for_s / OFFERED_S)), FEW_CALLS * each_s / replicas
    seen = (load * over_s + few_s) / (over_s + few_s)
    assert pressure.offered_load(for_s, replicas) == pytest.approx(seen, rel=0.1)
    pressure.pace, few_s = 2.0, few_s / 2
    seen = (load / 2 * over_s + few_s) / (over_s + few_s)
    assert pressure.offered_load(for_s, replicas) == pytest.approx(seen, rel=0.1)
    seen = few_s / (OFFERED_S + few_s)
    later_s = for_s + 10 * OFFERED_S
    assert pressure.offered_load(later_s, replicas) == pytest.approx(seen, abs=0.001)


def test_the_first_calls_are_no_overload() -> None:
    pressure = Pressure()
    pressure.join(InvocationId("first"), 9.0, 0.1, 0.0)
    few_s = FEW_CALLS * 0.1
    seen = (0.1 + few_s) / (FIRST_OFFERED_S + few_s)
    assert seen < 1.0
    assert pressure.offered_load(0.0, 1) == pytest.approx(seen)


@given(st.floats(0.5, 60.0), st.floats(0.0, 3.0))
def test_a_single_long_call_is_no_overload(load_s: float, later_s: float) -> None:
    pressure = Pressure()
    pressure.join(InvocationId("long"), 9.0, load_s, 0.0)
    assert pressure.offered_load(later_s, 1) <= 1.0 + 1.0 / FEW_CALLS


@given(st.floats(0.2, 2.0), st.floats(1.0, 20.0))
def test_the_load_of_long_calls_shows_after_some_of_them(load: float, load_s: float) -> None:
    pressure, gap_s = Pressure(), load_s / load
    for n in range(40):
        pressure.join(InvocationId(f"{n}"), 1e9, load_s, n * gap_s)
        pressure.offered_load(n * gap_s, 1)
    # Halfway between two calls: what has come by then.
    seen = 1.0 + (load - 1.0) * OFFERED_CALLS / (OFFERED_CALLS + FEW_CALLS)
    assert pressure.offered_load(39.5 * gap_s, 1) == pytest.approx(seen, rel=0.07)
