"""The wheel alone, in a fresh environment and an empty folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from cato.serve.ports import free_port, own_cluster
from tests.live.conftest import ROOT, wait_ready

pytestmark = pytest.mark.timeout(400)
SOURCES = ("cato", "workflows", "profiles", "deployments")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel, and the packages of this one beside it.

    The packages are on its path by a .pth file, which reads no other .pth: the checkout that this
    environment may be linked to is not seen.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done([*build, "-w", str(folder), str(source)])
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    bin_ = folder / "env" / "bin"
    packages = next((folder / "env" / "lib").glob("python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (wheel,) = folder.glob("*.whl")
    done([sys.executable, "-m", "pip", "--python", str(bin_ / "python"), "install", "-q",
          "--no-deps", "--no-index", str(wheel)])  # fmt: skip
    return bin_


def environment(**more: str) -> dict[str, str]:
    """Without what would lead to the checkout."""
    hidden = ("PYTHONPATH", "CATO_HOME", "RAY_ADDRESS")
    return {k: v for k, v in os.environ.items() if k not in hidden} | more


def done(command: list[str], folder: Path | None = None, env: dict[str, str] | None = None) -> str:
    env = env or environment()
    found = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_an_empty_folder_is_enough_to_check_the_shipped_deployments(
    installed: Path, tmp_path: Path
) -> None:
    for name in ("local-cpu", "simulated", "shared"):
        said = done([str(installed / "cato"), "check", f"deployments/{name}.yaml"], tmp_path)
        assert "site-packages/cato/shipped/deployments" in said
    assert list(tmp_path.iterdir()) == []


def test_init_writes_a_set_that_is_used_once_it_is_edited(installed: Path, tmp_path: Path) -> None:
    cato = str(installed / "cato")
    assert "wrote" in done([cato, "init", "."], tmp_path)
    deployment = tmp_path / "deployments" / "local-cpu.yaml"
    deployment.write_text(deployment.read_text().replace("coder-review", "coder-mine"))
    (tmp_path / "workflows" / "code-translation.yaml").unlink()
    assert f"{tmp_path}/deployments/local-cpu.yaml: no problems" in done([cato, "check"], tmp_path)
    again = done([cato, "init", "."], tmp_path)
    assert "wrote 1 file\n" in again
    assert "coder-mine" in deployment.read_text()
    assert (tmp_path / "deployments" / "clients" / "continue.yaml").exists()


@pytest.mark.live
def test_the_wheel_serves_from_an_empty_folder(
    installed: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run, port = f"/tmp/cato-w{os.getpid()}", free_port()
    Path(run).mkdir(mode=0o700)
    ports = own_cluster(run)
    env = environment(**ports, CATO_RUN_DIR=run, XDG_STATE_HOME=run)
    process = subprocess.Popen(
        [str(installed / "cato"), "serve", "deployments/simulated.yaml", "--port", str(port)],
        env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_ready(f"http://127.0.0.1:{port}", 200, process)
        task = ["task", "code-generation", "-i", "instruction=Sum a list."]
        url = ["--url", f"http://127.0.0.1:{port}"]
        assert done([str(installed / "cato"), *task, *url], tmp_path).strip()
        named = done([str(installed / "cato"), "down"], tmp_path, env | {"COLUMNS": "200"})
        assert f"at http://127.0.0.1:{port}; Ctrl-C there stops it whole" in named
        assert "application engines:" in named
    finally:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=90)
        shutil.rmtree(run, ignore_errors=True)
    assert process.returncode == 0, said
