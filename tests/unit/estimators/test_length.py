"""Beliefs about lengths: conditioned on progress, and no point where chances depend on them."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.length import LEAST_SPREAD, LengthBelief, around

beliefs = st.lists(st.floats(1, 5000), min_size=1, max_size=32).map(
    lambda points: LengthBelief(tuple(sorted(points)))
)


def spread(belief: LengthBelief) -> float:
    return pstdev(belief.points) / fmean(belief.points)


def test_a_length_that_is_told_exactly_is_believed_within_a_margin() -> None:
    wide = LengthBelief((200.0,)).wide
    assert wide.mean == pytest.approx(200, rel=0.01)
    assert spread(wide) == pytest.approx(LEAST_SPREAD, rel=0.15)
    assert replace(wide, overrun=1.0) == around(200)


def test_a_belief_that_max_tokens_cuts_is_no_point_at_the_bound() -> None:
    cut = LengthBelief((50.0, 80.0, *[100.0] * 6))
    assert len(set(cut.wide.points[8:])) > 8


def test_a_wide_belief_stays_as_it_is() -> None:
    belief = LengthBelief.of(range(50, 500))
    assert belief.wide is belief


@given(beliefs)
def test_widening_moves_no_mean_and_repeats_itself(belief: LengthBelief) -> None:
    assert belief.wide.mean == pytest.approx(belief.mean, rel=0.05)
    assert belief.wide is belief.wide


@given(beliefs, st.integers(0, 6000))
def test_a_chance_grows_with_the_tokens_that_may_come(belief: LengthBelief, g: int) -> None:
    chances = [belief.wide.chance_within(tokens, g) for tokens in (0, 1, 10, 100, 10_000)]
    assert chances == sorted(chances)
    assert 0 <= chances[0] <= chances[-1] <= 1


def test_what_has_outgrown_every_belief_still_has_a_chance_that_is_neither_none_nor_sure() -> None:
    belief = LengthBelief((100.0,))
    assert 0.3 < belief.chance_within(20, 200) < 0.5
    assert belief.chance_within(0, 200) == 0


def test_an_output_of_which_nothing_is_known_goes_on_for_as_long_again() -> None:
    assert around(64).left_mean(10) == pytest.approx(54, abs=2)
    assert around(64).left_mean(400) == pytest.approx(400)
    assert around(64).chance_within(400, 400) == pytest.approx(0.63, abs=0.01)
    assert LengthBelief((64.0,)).wide.left_mean(400) == pytest.approx(80)
