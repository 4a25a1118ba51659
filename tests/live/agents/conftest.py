"""CATO with a scripted engine, as agents meet it: `cato serve`, two replicas, one application."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cato.serve.ports import free_port, own_cluster
from tests.live.agents import table
from tests.live.agents.roster import AGENTS
from tests.live.agents.shapes import SHAPES
from tests.live.conftest import ROOT, small_index, wait_ready

BIN = Path(sys.executable).parent
CONTEXT_TOKENS = 262_144
KV_TOKENS = 1_000_000
# What `cato serve` itself waits for; a busy machine takes minutes.
START_S = 600
LOG_CHARS = 3000


@dataclass(frozen=True)
class Served:
    """A running CATO, and the log of its engines."""

    url: str
    log: Path

    def notes(self) -> list[dict[str, Any]]:
        """What the engines noted, in order."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def write_script(folder: Path) -> Path:
    """The scripts of all agents and of the requests that are written by hand."""
    steps: dict[str, Any] = {}
    rules: list[dict[str, Any]] = []
    for agent in AGENTS:
        steps |= agent.steps()
        rules += agent.rules()
    for shape in SHAPES:
        steps |= shape.steps()
    script = {
        "log": str(folder / "engines.jsonl"),
        "steps": steps,
        "rules": rules,
        # Qwen Code's words, and Claude Code's.
        "resumes": "^(The connection dropped mid-response|Your response above was cut off)",
        "aborted": "^Tool execution aborted",  # opencode's
    }
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    return path


def deployment(folder: Path, port: int) -> dict[str, Any]:
    """`deployments/simulated.yaml` with one pool, whose engines are scripted."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deployments" / "simulated.yaml").read_text())
    config["http_options"]["port"] = port
    engines, cato = (application["args"] for application in config["applications"])
    names = ["coder-fast", "coder-large", "coder-review"]
    engines["models"] = {
        "scripted": {"source": "scripted", "family": "qwen", "aliases": names},
    }
    engines["profiles"] = profiles(folder / "profiles")
    engine = {"kind": "scripted", "script": str(write_script(folder)), "max_num_seqs": 32}
    engines["pools"] = {
        "scripted": {
            "model": "scripted",
            "scaling": {"policy": "none"},
            "deployments": {
                "scripted-cpu": {
                    "accelerator": "cpu",
                    "cpus": 0.1,
                    "replicas": {"min": 2, "initial": 2, "max": 2},
                    "profile": "scripted@gpu",
                    "engine": engine,
                }
            },
        }
    }
    cato["indexes"] = {"code": small_index(folder / "code")}
    cato["workflows"] = str(ROOT / "workflows")
    return config


def profiles(folder: Path) -> str:
    """One profile: a 7B model with room for agents."""
    from cato.profiles.load import load_profile_file, save_profile

    file = load_profile_file(ROOT / "profiles" / "reference-7b@gpu-32gb.yaml")
    profile = replace(
        file.to_profile(),
        model="scripted",
        accelerator="gpu",
        context_tokens=CONTEXT_TOKENS,
        kv_capacity_tokens=KV_TOKENS,
        load_s=0.1,
    )
    save_profile(folder / "scripted@gpu.yaml", profile, file.provenance)
    return str(folder)


_running = ExitStack()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End CATO after the last test here: the other live tests need the cores."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _running.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("agents")
    run_dir = tempfile.mkdtemp(prefix="cato-g-")  # short: it holds sockets
    env = {**os.environ, **own_cluster(run_dir), "CATO_RUN_DIR": run_dir, "CATO_HOME": str(ROOT)}
    env["XDG_STATE_HOME"] = run_dir
    env.pop("RAY_ADDRESS", None)
    port = free_port()
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment(folder, port)))
    log = _running.enter_context((folder / "log").open("wb"))
    process = subprocess.Popen(
        [str(BIN / "cato"), "serve", str(file)],
        env=env,
        cwd=folder,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    _running.callback(shutil.rmtree, run_dir, ignore_errors=True)
    _running.callback(process.wait, 120)
    _running.callback(process.send_signal, signal.SIGINT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, START_S, process)
    except pytest.fail.Exception:
        for path in (folder / "log", *Path(run_dir).glob("serve-*.log")):
            print(path.name, path.read_text()[-LOG_CHARS:] if path.exists() else "is missing")
        raise
    return Served(url, folder / "engines.jsonl")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """What an agent cannot do stands in the table, too."""
    report = yield
    agent = getattr(item, "callspec", None) and item.callspec.params.get("agent")
    if report.failed and agent is not None:
        name = item.originalname.removeprefix("test_").replace("_", " ")
        table.failed(agent, name)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "CATO_AGENTS" in os.environ and table.found:
        table.write()
