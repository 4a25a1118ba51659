"""Profiles are written and read back the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cato.config.schema import EnginesArgs
from cato.core.errors import ConfigError
from cato.core.profile import Profile
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
