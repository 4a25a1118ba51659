"""The terms of a profile come back from samples, with outliers among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.builders import a_profile

from cato.core.errors import InputError
from cato.core.profile import Profile
from cato.profiles.fit import Sample, Step, fit, r2
from cato.profiles.load import load_profile

PROFILES = Path(__file__).parents[3] / "profiles"
LINEAR = replace(
    a_profile(prefill_s=0.003, token_s=0.003, prefill_token_s=0.0, batch_token_s=7e-5),
    prefill_per_batch_token_s=3e-5,
    prefill_per_attended_token_s=4e-9,
    prefill_per_request_s=5e-4,
    decode_per_context_token_s=3e-7,
    latency_s=0.004,
)
CARD = replace(
    load_profile(PROFILES / "reference-large-32b@gpu-80gb.yaml"),
    prefill_per_request_s=1e-3,
    decode_per_request_s=2e-5,
    latency_s=0.004,
)
BLANK = a_profile()
TERMS = (
    "prefill_base_s",
    "decode_base_s",
    "prefill_per_batch_token_s",
    "prefill_per_token_s",
    "prefill_per_attended_token_s",
    "prefill_per_request_s",
    "decode_per_request_s",
    "decode_per_context_token_s",
    "weights_read_s",
    "kv_read_token_s",
    "latency_s",
)


def a_prompt(tokens: int, cached: int = 0, batch: int = 0) -> tuple[Step, ...]:
    return (Step(batch, cached, tokens, 1, tokens * (cached + tokens / 2)),)


def samples_of(profile: Profile, noise: float = 0.0, seed: int = 1) -> list[Sample]:
    """Prompts alone, after cached tokens and beside streams, and decode steps."""
    steps = [(a_prompt(n), True) for n in (16, 64, 256, 1024, 8192, 32_768)]
    steps += [(a_prompt(24, cached), True) for cached in (1024, 16_384, 65_536)]
    steps += [(a_prompt(n, batch=4), False) for n in (16, 256, 1024)]
    steps += [
        ((Step(b, b * c),), False) for b in (1, 2, 8, 64, 200) for c in (64.0, 1024.0, 9000.0)
    ]
    draw = np.random.default_rng(seed)
    blank = [Sample(s, 1.0, has_latency) for s, has_latency in steps * 2]
    return [
        replace(s, duration_s=s.predicted_s(profile) * float(np.exp(noise * draw.normal())))
        for s in blank
    ]


def largest_error(found: Profile, truth: Profile) -> float:
    return max(abs(s.predicted_s(found) / s.duration_s - 1) for s in samples_of(truth))


@pytest.mark.parametrize("truth", [LINEAR, CARD])
def test_exact_samples_give_their_terms(truth: Profile) -> None:
    samples = samples_of(truth)
    found = fit(samples, BLANK)
    for term in TERMS:
        assert getattr(found, term) == pytest.approx(getattr(truth, term), rel=1e-3), term
    assert r2(samples, found) == pytest.approx(1.0)


@pytest.mark.parametrize("truth", [LINEAR, CARD])
def test_a_few_disturbed_samples_hardly_move_the_fit(truth: Profile) -> None:
    samples = [
        replace(s, duration_s=s.duration_s * (10 if i % 11 == 5 else 1))
        for i, s in enumerate(samples_of(truth, noise=0.02))
    ]
    found = fit(samples, BLANK)
    assert largest_error(found, truth) < 0.1
    assert r2(samples, found) < 0.9  # and the quality says that something disturbed it


@pytest.mark.parametrize("truth", [LINEAR, CARD])
def test_the_form_of_the_law_is_told_from_noisy_samples(truth: Profile) -> None:
    for seed in range(3):
        found = fit(samples_of(truth, noise=0.05, seed=seed), BLANK)
        assert (found.weights_read_s > 0) == (truth.weights_read_s > 0)
        assert largest_error(found, truth) < 0.15


def test_what_nothing_shows_is_the_prompts_where_latency_is_not_known() -> None:
    found = fit(samples_of(LINEAR), BLANK, knows_latency=False)
    assert found.latency_s == 0.0
    assert found.prefill_per_request_s > LINEAR.prefill_per_request_s


def decode_steps(seconds: Sequence[float] = (0.1, 0.1, 0.1, 0.1)) -> list[Sample]:
    return [Sample((Step(b, 0.0),), s, False) for b, s in zip((1, 2, 1, 2), seconds, strict=True)]


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.tuples(st.integers(1, 8192), st.floats(1e-6, 1e3)), min_size=4, max_size=20),
    st.tuples(*[st.floats(1e-6, 1e3)] * 4),
)
def test_no_fit_has_a_negative_or_infinite_term(
    prompts: list[tuple[int, float]], steps: tuple[float, ...]
) -> None:
    if len({tokens for tokens, _ in prompts}) < 2:
        return
    samples = [Sample(a_prompt(tokens), s, True) for tokens, s in prompts]
    found = fit([*samples, *decode_steps(steps)], BLANK)
    terms = [getattr(found, term) for term in TERMS]
    assert all(t >= 0 for t in terms)
    assert np.isfinite(terms).all()


def test_samples_that_cannot_tell_are_refused_with_what_to_measure() -> None:
    prompts = [Sample(a_prompt(n), 0.1, True) for n in (1, 2, 3, 4)]
    with pytest.raises(InputError, match="at least 4 samples of prompts, there are 1: measure"):
        fit([*prompts[:1], *decode_steps()], BLANK)
    with pytest.raises(InputError, match="at least 4 samples of decode steps"):
        fit(prompts, BLANK)
    with pytest.raises(InputError, match="at least two lengths"):
        fit([*prompts[:1] * 4, *decode_steps()], BLANK)
    with pytest.raises(InputError, match="two batch sizes"):
        fit([*prompts, *decode_steps()[:1] * 4], BLANK)
    with pytest.raises(InputError, match="positive time"):
        fit([*prompts, *decode_steps((0.1, 0.0, 0.1, 0.1))], BLANK)
