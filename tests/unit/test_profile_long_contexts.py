"""Terms of a profile that count where contexts are long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cato.core.profile import UNMEASURED, Profile
from cato.profiles.load import load_profile, save_profile
from cato.profiles.schema import Provenance

PROFILES = Path(__file__).parents[2] / "profiles"
LARGE = load_profile(PROFILES / "reference-large-32b@gpu-80gb.yaml")
SMALL = load_profile(PROFILES / "reference-small-7b@gpu-24gb.yaml")


@pytest.mark.parametrize(
    ("card", "cold_s", "warm_s", "one_s", "three_s"),
    [(LARGE, 21.2, 0.15, 0.0167, 0.0245), (SMALL, 40.5, 0.29, 0.0220, 0.0384)],
)
def test_the_reference_cards_have_the_assumed_times(
    card: Profile, cold_s: float, warm_s: float, one_s: float, three_s: float
) -> None:
    assert card.prefill_s(140_000) == pytest.approx(cold_s, rel=0.005)
    assert card.prefill_s(100_764, cached_tokens=100_000) == pytest.approx(warm_s, rel=0.03)
    assert card.decode_step_s(1, 100_000) == pytest.approx(one_s, rel=0.005)
    assert card.decode_step_s(3, 100_000) == pytest.approx(three_s, rel=0.005)


def test_a_step_lasts_as_long_as_its_reads_or_its_prompt_tokens() -> None:
    read_s = LARGE.step_s(2, 200_000)
    assert LARGE.step_s(2, 200_000, prompt_tokens=16) == pytest.approx(read_s)
    assert LARGE.step_s(2, 200_000, prompt_tokens=4096) > 10 * read_s


def test_the_pieces_of_a_prompt_cost_what_the_whole_costs() -> None:
    whole_s = LARGE.prefill_s(32_768) - LARGE.prefill_base_s
    pieces_s = sum(
        LARGE.step_s(0, at, 8192, attended=8192 * (at + 4096)) - LARGE.prefill_base_s
        for at in range(0, 32_768, 8192)
    )
    assert pieces_s == pytest.approx(whole_s)


def test_without_these_terms_cached_tokens_cost_nothing_and_the_others_as_before() -> None:
    assert UNMEASURED.prefill_s(3000, cached_tokens=1000) == UNMEASURED.prefill_s(2000)


def test_slower_is_slower_in_every_term() -> None:
    twice = LARGE.slowed(2.0)
    assert twice.prefill_s(50_000) == pytest.approx(2 * LARGE.prefill_s(50_000))
    assert twice.decode_step_s(2, 9e4) == pytest.approx(2 * LARGE.decode_step_s(2, 9e4))


def test_a_profile_file_keeps_the_terms(tmp_path: Path) -> None:
    card = replace(LARGE, prefill_per_attended_token_s=1.25e-9)
    path = tmp_path / "reference-large-32b@gpu-80gb.yaml"
    save_profile(path, card, Provenance())
    assert load_profile(path).prefill_per_attended_token_s == 1.25e-9
