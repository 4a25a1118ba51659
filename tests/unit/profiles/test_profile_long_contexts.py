"""The law of a step, with the terms that count where contexts are long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import an_invocation

from cato.core.length import LengthBelief
from cato.core.profile import UNMEASURED, Profile
from cato.policies.outlook import Prospect, chances
from cato.profiles.load import load_profile, save_profile
from cato.profiles.schema import Provenance

PROFILES = Path(__file__).parents[3] / "profiles"
LARGE = load_profile(PROFILES / "reference-large-32b@gpu-80gb.yaml")
SMALL = load_profile(PROFILES / "reference-small-7b@gpu-24gb.yaml")


@pytest.mark.parametrize(
    ("card", "cold_s", "warm_s", "one_s", "three_s"),
    [(LARGE, 21.2, 0.15, 0.0167, 0.0245), (SMALL, 40.5, 0.29, 0.0220, 0.0384)],
)
def test_the_reference_cards_have_the_assumed_times(
    card: Profile, cold_s: float, warm_s: float, one_s: float, three_s: float
) -> None:
    assert card.prefill_s(140_000) == pytest.approx(cold_s, rel=0.006)
    assert card.prefill_s(100_764, cached_tokens=100_000) == pytest.approx(warm_s, rel=0.03)
    assert card.decode_step_s(1, 100_000) == pytest.approx(one_s, rel=0.005)
    assert card.decode_step_s(3, 100_000) == pytest.approx(three_s, rel=0.005)


def test_a_step_lasts_as_long_as_its_reads_or_its_prompt_tokens() -> None:
    read_s = LARGE.step_s(2, 200_000)
    assert LARGE.step_s(2, 200_000, prompt_tokens=16) == pytest.approx(read_s)
    assert LARGE.step_s(2, 200_000, prompt_tokens=4096) > 10 * read_s


def test_tokens_of_a_large_batch_are_computed_longer_than_the_weights_are_read() -> None:
    for batch in (1, 100):
        assert LARGE.decode_step_s(batch) == LARGE.decode_base_s + LARGE.weights_read_s
    computed_s = LARGE.prompt_token_s * 256
    assert LARGE.decode_step_s(256) == pytest.approx(LARGE.decode_base_s + computed_s)
    half = LARGE.step_s(128, 0.0, prompt_tokens=128)
    assert half == pytest.approx(LARGE.prefill_base_s + computed_s)


LINEAR = replace(UNMEASURED, prefill_base_s=UNMEASURED.decode_base_s, prefill_per_token_s=1e-5)
cards = st.sampled_from([LARGE, SMALL, LINEAR, replace(LARGE, decode_per_request_s=1e-4)])


@given(cards, st.integers(1, 512), st.integers(0, 200_000))
def test_a_decode_step_is_a_step_without_prompts(card: Profile, batch: int, context: int) -> None:
    assert card.decode_step_s(batch, context) == pytest.approx(card.step_s(batch, batch * context))


@given(cards, st.integers(1, 40_000), st.integers(0, 60_000), st.sampled_from([0, 256, 8192]))
def test_a_prompt_takes_as_long_as_the_steps_that_it_fills(
    card: Profile, tokens: int, cached: int, budget: int
) -> None:
    card = replace(card, step_tokens=budget, prefill_per_request_s=1e-3)
    pieces_s, done = 0.0, cached
    while done < cached + tokens:
        piece = min(budget or tokens, cached + tokens - done)
        is_last = done + piece == cached + tokens
        pieces_s += card.step_s(0, done, piece, int(is_last), piece * (done + piece / 2))
        done += piece
    # Only of a step of which it depends on the piece whether reading or computing takes longer.
    slack_s = 0.0 if card.is_linear else card.read_s(cached + tokens)
    whole_s = card.prefill_s(cached + tokens, cached_tokens=cached)
    assert whole_s == pytest.approx(pieces_s, abs=1e-12 + slack_s)


def test_without_these_terms_cached_tokens_cost_nothing_and_the_others_as_before() -> None:
    assert UNMEASURED.prefill_s(3000, cached_tokens=1000) == UNMEASURED.prefill_s(2000)


def test_slower_is_slower_in_every_term() -> None:
    twice = LARGE.slowed(2.0)
    assert twice.prefill_s(50_000) == pytest.approx(2 * LARGE.prefill_s(50_000))
    assert twice.decode_step_s(2, 9e4) == pytest.approx(2 * LARGE.decode_step_s(2, 9e4))


def test_a_profile_file_keeps_the_terms(tmp_path: Path) -> None:
    card = replace(  # files have four digits
        LARGE,
        prefill_per_batch_token_s=6.3e-5,
        prefill_per_attended_token_s=1.25e-9,
        weights_read_s=0.0098,
        step_tokens=2048,
        block_tokens=128,
        host_capacity_tokens=1000,
        host_load_token_s=0.5,
    )
    path = tmp_path / "reference-large-32b@gpu-80gb.yaml"
    save_profile(path, card, Provenance())
    assert load_profile(path) == card


def test_a_file_without_the_terms_loads_as_before() -> None:
    saber = load_profile(PROFILES / "saber@gpu.yaml")
    assert saber.is_linear
    assert (saber.step_tokens, saber.block_tokens, saber.host_capacity_tokens) == (0, 16, 0)
    assert saber.prefill_s(1000) == pytest.approx(0.038)
    assert saber.step_s(10, 5000, prompt_tokens=100) == pytest.approx(0.008 + 0.0035 + 0.003)


def test_a_projection_of_a_large_batch_counts_what_it_computes() -> None:
    steps = 50
    for batch in (4, 256):
        step_s = LARGE.decode_step_s(batch, steps / 2)
        for due_s, chance in ((0.99 * steps * step_s, 0.0), (1.01 * steps * step_s, 1.0)):
            length = LengthBelief.of([steps])
            invocation = an_invocation("i", prompt=1)
            one = Prospect(steps, 0.0, due_s, invocation, 0, length, length.points, 0)
            assert chances(LARGE, 0.0, [one] * batch) == [chance] * batch
