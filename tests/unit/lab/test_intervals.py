"""Percentiles and paired intervals of the benchmarks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cato.lab.intervals import mean_interval, paired_difference, summary

finite = st.floats(0, 1e3, allow_nan=False)
rounds_of_one_size = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(finite, min_size=n, max_size=n), min_size=1, max_size=4)
)


def noisy_rounds(
    base: float, *, rounds: int = 10, requests: int = 40, seed: int = 1
) -> list[list[float]]:
    """A drift from round to round far larger than the noise within one."""
    draw = random.Random(seed)
    return [[base + r * 0.5 + draw.gauss(0, 0.1) for _ in range(requests)] for r in range(rounds)]


def test_percentiles_are_of_all_rounds_together() -> None:
    found = summary([list(range(0, 50)), list(range(50, 101))])
    assert (found.count, found.mean, found.p50, found.p90, found.p99) == (101, 50, 50, 90, 99)


def test_a_summary_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summary([])


def test_the_difference_of_two_arms_is_found_under_a_common_drift() -> None:
    found = paired_difference(noisy_rounds(11.0, seed=1), noisy_rounds(10.0, seed=2))
    assert found.value == pytest.approx(1.0, abs=0.1)
    assert found.low < 1.0 < found.high
    assert found.high - found.low < 0.5  # the drift of 5 over the rounds is not in it


def test_equal_arms_have_an_interval_around_zero() -> None:
    found = paired_difference(noisy_rounds(10.0, seed=1), noisy_rounds(10.0, seed=2))
    assert found.low < 0 < found.high


def test_the_same_seed_gives_the_same_interval() -> None:
    arm, baseline = noisy_rounds(11.0, seed=1), noisy_rounds(10.0, seed=2)
    assert paired_difference(arm, baseline, seed=3) == paired_difference(arm, baseline, seed=3)
    assert paired_difference(arm, baseline, seed=3) != paired_difference(arm, baseline, seed=4)


def test_one_round_gives_the_spread_of_its_requests() -> None:
    found = paired_difference(noisy_rounds(11.0, rounds=1), noisy_rounds(10.0, rounds=1, seed=2))
    assert found.low < found.value < found.high


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="1 and 2 rounds"):
        paired_difference([[1.0]], [[1.0], [2.0]])
    with pytest.raises(ValueError, match="the same number of samples"):
        paired_difference([[1.0], []], [[1.0], [2.0]])


def test_turns_of_a_session_count_as_one_observation() -> None:
    """Twenty sessions of fifty equal turns each know as much as twenty turns."""
    draw = random.Random(1)
    sessions = [float(draw.random() < 0.7) for _ in range(20)]
    turns = [[met for met in sessions for _ in range(50)]]
    names = [[f"s{i}" for i in range(20) for _ in range(50)]]
    alone = mean_interval([sessions])
    grouped, apart = mean_interval(turns, groups=names), mean_interval(turns)
    assert grouped.value == apart.value == alone.value
    width = alone.high - alone.low
    assert grouped.high - grouped.low == pytest.approx(width, rel=0.1)
    assert apart.high - apart.low < 0.25 * width


def test_groups_of_different_sizes_keep_the_mean_of_all_values() -> None:
    found = mean_interval([[1.0, 1.0, 1.0, 0.0], [0.0, 1.0]], groups=[list("aaab"), list("ab")])
    assert found.value == pytest.approx(4 / 6)
    assert found.low <= found.value <= found.high


@settings(max_examples=20)
@given(rounds_of_one_size, finite)
def test_an_arm_that_is_slower_by_a_constant_differs_by_it(
    rounds: list[list[float]], more: float
) -> None:
    arm = [[x + more for x in r] for r in rounds]
    assert paired_difference(arm, rounds).value == pytest.approx(more, abs=1e-6)
