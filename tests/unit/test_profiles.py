"""Profiles are written, read back the same, and fitted from samples with outliers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cato.config.schema import EnginesArgs
from cato.core.errors import ConfigError, InputError
from cato.core.profile import Profile
from cato.profiles.fit import DecodeSample, PrefillSample, fit_decode, fit_prefill
from cato.profiles.load import (
    check_profiles,
    load_profile,
    load_profile_file,
    load_profiles,
    profile_name,
    save_profile,
)
from cato.profiles.schema import Provenance


def a_profile(model: str = "m", accelerator: str = "cpu") -> Profile:
    return Profile(
        model=model,
        accelerator=accelerator,
        engine="vllm",
        prefill_per_batch_token_s=2.94e-5,
        prefill_per_request_s=0.0,
        prefill_per_token_s=1e-5,
        prefill_base_s=0.0021,
        decode_per_context_token_s=3e-7,
        decode_per_request_s=7.4e-5,
        decode_base_s=0.00319,
        kv_capacity_tokens=4096,
        max_running=16,
        context_tokens=1024,
        load_s=1.0,
        latency_s=0.0042,
        chars_per_token=3.1,
    )


def saved(folder: Path, profile: Profile, provenance: Provenance | None = None) -> Path:
    path = folder / f"{profile_name(profile.model, profile.accelerator)}.yaml"
    save_profile(path, profile, provenance or Provenance())
    return path


def test_a_saved_profile_is_read_back_the_same(tmp_path: Path) -> None:
    origin = Provenance(
        command="cato profile", date="2026-01-31", machine="2 cores", samples=17, prefill_r2=0.962
    )
    path = saved(tmp_path / "new", a_profile("org/m"), origin)
    assert path.name == "org--m@cpu.yaml"
    assert load_profile(path) == a_profile("org/m")
    assert load_profile_file(path).provenance == origin
    assert path.read_text(encoding="utf-8").startswith("# Service times")
    assert path.stat().st_mode & 0o777 == 0o644


@settings(max_examples=30)  # each is a file, synced to disk
@given(st.floats(0, 1e3), st.floats(1e-3, 1e3))
def test_a_saved_time_keeps_four_digits(
    tmp_path_factory: pytest.TempPathFactory, load_s: float, chars_per_token: float
) -> None:
    profile = replace(a_profile(), load_s=load_s, chars_per_token=chars_per_token)
    read = load_profile(saved(tmp_path_factory.getbasetemp(), profile))
    assert read.load_s == pytest.approx(load_s, rel=1e-3)
    assert read.chars_per_token == pytest.approx(chars_per_token, rel=1e-3)


def test_saving_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    saved(tmp_path, a_profile())
    saved(tmp_path, a_profile())
    assert [p.name for p in tmp_path.iterdir()] == ["m@cpu.yaml"]


def test_a_folder_is_read_by_name(tmp_path: Path) -> None:
    for model in ("b", "a"):
        saved(tmp_path, a_profile(model))
    assert list(load_profiles(tmp_path)) == ["a@cpu", "b@cpu"]
    with pytest.raises(ConfigError, match="no such folder"):
        load_profiles(tmp_path / "none")


def test_problems_of_all_files_come_at_once(tmp_path: Path) -> None:
    text = saved(tmp_path, a_profile()).read_text(encoding="utf-8")
    (tmp_path / "other@cpu.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "m@gpu.yaml").write_text(
        text.replace("accelerator: cpu", "accelerator: gpu")
        .replace("max_running: 16", "max_running: 0")
        .replace("base_s: 0.00319", "base_s: -1.0"),
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        load_profiles(tmp_path)
    assert [(Path(p.file).name, p.path, p.rule) for p in caught.value.problems] == [
        ("m@gpu.yaml", "decode.base_s", "must be at least 0"),
        ("m@gpu.yaml", "max_running", "must be at least 1"),
        ("other@cpu.yaml", "", "a file with this model and accelerator is named m@cpu.yaml"),
    ]


def test_a_profile_that_a_deployment_names_must_be_there() -> None:
    engine = {"kind": "simulated", "profile": "x@cpu"}
    deployment = {"accelerator": "cpu", "profile": "m@cup", "engine": engine}
    data = {
        "models": {"m": {"source": "demo"}},
        "pools": {"p": {"model": "m", "deployments": {"d": deployment}}},
    }
    topology = EnginesArgs.model_validate(data).to_topology()
    with pytest.raises(ConfigError) as caught:
        check_profiles(topology, {"m@cpu": a_profile()})
    assert [(p.path, p.rule) for p in caught.value.problems] == [
        ("pools.p.deployments.d.profile", "no file of this name (did you mean 'm@cpu'?)"),
        ("pools.p.deployments.d.engine.profile", "no file of this name (did you mean 'm@cpu'?)"),
    ]
    check_profiles(topology, {"m@cup": a_profile(), "x@cpu": a_profile()})


def prefills(
    alpha: float, beta: float, gamma: float, delta: float, noise: float = 0.0
) -> list[PrefillSample]:
    draw = np.random.default_rng(1)
    return [
        PrefillSample(
            b, t, (alpha * b * t + beta * b + gamma * t + delta) * (1 + noise * draw.normal())
        )
        for b in (1, 2, 4, 8)
        for t in (16, 64, 256, 1024)
    ]


def decodes(alpha: float, beta: float, delta: float, noise: float = 0.0) -> list[DecodeSample]:
    draw = np.random.default_rng(2)
    return [
        DecodeSample(b, c, (alpha * b * c + beta * b + delta) * (1 + noise * draw.normal()))
        for b in (1, 2, 4, 8, 16)
        for c in (64.0, 256.0, 1024.0)
    ]


def test_exact_samples_give_their_coefficients() -> None:
    prefill = fit_prefill(prefills(3e-5, 5e-4, 1e-5, 2e-3))
    assert (
        prefill.per_batch_token_s,
        prefill.per_request_s,
        prefill.per_token_s,
        prefill.base_s,
        prefill.r2,
    ) == pytest.approx((3e-5, 5e-4, 1e-5, 2e-3, 1.0), rel=1e-6)
    decode = fit_decode(decodes(3e-7, 7e-5, 3e-3))
    assert (
        decode.per_context_token_s,
        decode.per_request_s,
        decode.base_s,
        decode.r2,
    ) == pytest.approx((3e-7, 7e-5, 3e-3, 1.0), rel=1e-6)


def test_a_few_disturbed_samples_hardly_move_the_fit() -> None:
    samples = decodes(3e-7, 7e-5, 3e-3, noise=0.02)
    disturbed = [
        DecodeSample(s.batch, s.context_tokens, s.step_s * (10 if i in (3, 11) else 1))
        for i, s in enumerate(samples)
    ]
    fit = fit_decode(disturbed)
    for b, c in ((1, 64.0), (16, 1024.0), (4, 256.0)):
        predicted = fit.per_context_token_s * b * c + fit.per_request_s * b + fit.base_s
        assert predicted == pytest.approx(3e-7 * b * c + 7e-5 * b + 3e-3, rel=0.1)
    assert fit.r2 < 0.9  # and the quality says that something disturbed it


def test_short_prompts_are_fitted_as_well_as_long_ones() -> None:
    fit = fit_prefill(prefills(3e-5, 0.0, 0.0, 2e-3, noise=0.05))
    for tokens in (16, 1024):
        predicted = (fit.per_batch_token_s + fit.per_token_s) * tokens
        predicted += fit.per_request_s + fit.base_s
        assert predicted == pytest.approx(3e-5 * tokens + 2e-3, rel=0.1)


@given(
    st.lists(
        st.builds(PrefillSample, st.integers(1, 64), st.integers(1, 8192), st.floats(1e-6, 1e3)),
        min_size=4,
        max_size=20,
    )
)
def test_no_fit_has_a_negative_or_infinite_coefficient(samples: list[PrefillSample]) -> None:
    if len({s.prompt_tokens for s in samples}) < 2:
        return
    fit = fit_prefill(samples)
    coefficients = (fit.per_batch_token_s, fit.per_request_s, fit.per_token_s, fit.base_s)
    assert all(c >= 0 for c in coefficients)
    assert np.isfinite([*coefficients, fit.r2]).all()
    assert fit.r2 <= 1


def test_one_batch_size_is_enough_for_prefill_and_one_context_for_decode() -> None:
    prefill = fit_prefill([PrefillSample(1, t, 1e-5 * t + 0.01) for t in (10, 100, 500, 1000)])
    assert (prefill.per_batch_token_s, prefill.base_s) == pytest.approx((1e-5, 0.01))
    assert (prefill.per_request_s, prefill.per_token_s) == (0.0, 0.0)
    decode = fit_decode([DecodeSample(b, 64, 1e-4 * b + 0.01) for b in (1, 2, 4, 8)])
    assert (decode.per_request_s, decode.base_s) == pytest.approx((1e-4, 0.01))
    assert decode.per_context_token_s == 0.0


def test_samples_that_cannot_tell_are_refused_with_what_to_measure() -> None:
    with pytest.raises(InputError, match="at least 4 samples, there are 1: measure more"):
        fit_prefill([PrefillSample(1, 16, 0.1)])
    with pytest.raises(InputError, match="two prompt lengths"):
        fit_prefill([PrefillSample(b, 16, 0.1) for b in (1, 2, 3, 4)])
    with pytest.raises(InputError, match="two batch sizes"):
        fit_decode([DecodeSample(1, c, 0.1) for c in (1, 2, 3, 4)])
    with pytest.raises(InputError, match="not positive"):
        fit_decode([DecodeSample(b, 1, 0.0) for b in (1, 2, 3, 4)])
    with pytest.raises(InputError, match="batch below 1"):
        fit_prefill([PrefillSample(0, t, 0.1) for t in (1, 2, 3, 4)])
