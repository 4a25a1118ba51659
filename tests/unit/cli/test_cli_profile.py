"""`cato profile` finds what to measure, or says why it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cato.cli import app
from cato.cli.profile import spec_of
from cato.config.deploy_file import load_deploy_file
from cato.core.errors import CatoError, ReplicaLostError, UnknownNameError


def test_a_deployment_is_found_with_its_pool() -> None:
    topology = load_deploy_file("deployments/local-cpu.yaml").topology
    pool, spec = spec_of(topology, "demo-cpu")
    assert (pool.name, spec.name) == ("demo", "demo-cpu")
    with pytest.raises(UnknownNameError, match=r"'demo-cpus' \(did you mean 'demo-cpu'\?\)"):
        spec_of(topology, "demo-cpus")


def test_the_models_of_a_shared_pool_are_measured_by_another_command() -> None:
    topology = load_deploy_file("deployments/shared.yaml").topology
    (pool,) = topology.shared_pools
    with pytest.raises(CatoError, match="cato models profile NAME"):
        spec_of(topology, pool.deployments[0].name)


@pytest.mark.parametrize("options", [["--quick"], ["--seconds", "9"], ["--out", "profiles"]])
def test_a_check_refuses_the_options_of_a_measurement(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["profile", "demo-cpu", "--check", *options])
    assert result.exit_code == 2
    assert "--check takes no --out, --quick or --seconds" in result.output


def test_a_folder_that_cannot_be_written_is_refused_before_the_measurement(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    arguments = ["profile", "demo-cpu", "--out", str(taken)]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)
    assert result.exit_code == 2
    assert "is a file; name a folder" in result.output


@pytest.mark.parametrize(
    ("saved", "status", "told"),
    [
        (False, 130, "Interrupted. Nothing was written."),
        (True, 130, "Interrupted. The profile is in m@cpu.yaml; how well it predicts was not"),
        (False, 1, "Nothing was written. The pool scaled down"),
        (True, 1, "The profile is in m@cpu.yaml; how well it predicts was not"),
    ],
)
def test_who_interrupts_is_told_whether_the_profile_was_written(
    monkeypatch: pytest.MonkeyPatch, saved: bool, status: int, told: str
) -> None:
    """The check comes after the files."""

    async def measured(*arguments: object) -> None:
        written = arguments[-1]
        assert isinstance(written, list)
        if saved:
            written.append(Path("m@cpu.yaml"))
        raise KeyboardInterrupt if status == 130 else ReplicaLostError("one", "it is gone")

    command = sys.modules["cato.cli.profile"]
    monkeypatch.setenv(command.TRANSPORT_VARIABLE, "1")
    monkeypatch.setattr(command, "connect", lambda address: None)
    monkeypatch.setattr(command, "_profile", measured)
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["profile", "demo-cpu"])
    assert result.exit_code == status
    assert told in result.output
