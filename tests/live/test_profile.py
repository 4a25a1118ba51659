"""`cato profile` on a running deployment, and a smoke run of `cato bench overhead`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cato.profiles.load import load_profile_file
from tests.live.conftest import ROOT, App

pytestmark = pytest.mark.live


def run_cato(*words: str, timeout_s: float, fails: bool = False) -> str:
    """The output of a command line that must end well, or must not."""
    program = [sys.executable, "-c", "from cato.cli import main; main()", *words]
    done = subprocess.run(
        program,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


@pytest.mark.timeout(180)
def test_profile_measures_a_deployment_that_serves(app: App, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    out = tmp_path / "profiles"
    words = ("profile", "small-sim", "--address", address, "--out", str(out))
    text = run_cato(*words, "--quick", "--seconds", "12", timeout_s=120)
    [path] = out.iterdir()
    file = load_profile_file(path)
    assert path.name == "sim-small@cpu.yaml"
    assert file.provenance.simulated
    assert file.provenance.samples >= 8
    # Within what a busy machine adds to the timings that the engine was made with.
    known = load_profile_file(ROOT / "profiles/saber@gpu.yaml").to_profile()
    assert file.to_profile().decode_step_s(1, 100) == pytest.approx(
        known.decode_step_s(1, 100), rel=0.5
    )
    assert str(path.name) in text
    assert app.get("/readyz").status_code == 200


@pytest.mark.timeout(240)
def test_bench_overhead_measures_all_arms(tmp_path: Path) -> None:
    """Starts a Ray of its own, beside the one of these tests."""
    file = tmp_path / "overhead.json"
    words = ("bench", "overhead", "--engine", "simulated", "--requests", "5", "--rounds", "1")
    run_cato(*words, "--concurrency", "2", "--json", str(file), timeout_s=200)
    [result] = json.loads(file.read_text())["results"]
    assert set(result["arms"]) == {"engine", "plain", "cato", "http only"}
    assert all(arm["e2e"]["count"] == 8 for arm in result["arms"].values())
    assert set(result["differences_p50"]) == {"plain - engine", "cato - plain", "cato - engine"}
    assert result["receipts"] == 8
    assert result["messages_per_call"] >= 6, "offer, lease, call, tokens, first token, end"
    assert all(rate > 0 for rate in result["calls_per_s"].values())
