"""CATO as the clients meet it: `cato serve`, real vLLM, and an API key that every request needs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cato.demo import demo_model_path
from cato.serve.ports import free_port, own_cluster
from tests.live.conftest import ROOT, patient_workflows, small_index, wait_ready

BIN = Path(sys.executable).parent
EXAMPLES = ROOT / "deployments" / "clients"
# Where every example says that CATO is.
EXAMPLE_URL = "http://127.0.0.1:8000"
# The first request of an agent has 6,000 to 10,000 tokens of instructions and tools.
CONTEXT_TOKENS = 32_768
WHOLE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}{{ '<|im_start|>' + message['role'] }}
{{ (message['content'] or '') | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# The demo model never says that it is done with a conversation, and agents set no limit.
CAP_TOKENS = 32
# Of a conversation without tools: long enough to be left before its end.
CHAT_TOKENS = 2000
# What `cato serve` itself waits for; a busy machine takes minutes.
START_S = 900
# Of each log, when CATO does not start.
LOG_CHARS = 3000
# Clients start slowly on a busy machine.
CLIENT_S = 400


@dataclass(frozen=True)
class Cato:
    """A running CATO, and a key of its tenant `clients`."""

    url: str
    key: str
    run_dir: Path

    def receipt(self, request_id: str) -> dict[str, Any]:
        """The receipt of the latest request that a client gave this id."""
        deadline_s = time.monotonic() + 30
        while True:
            answer = httpx.get(
                f"{self.url}/v1/requests/{request_id}",
                headers={"Authorization": f"Bearer {self.key}"},
                timeout=30,
            )
            if answer.status_code == 200:
                receipt: dict[str, Any] = answer.json()
                return receipt
            assert time.monotonic() < deadline_s, answer.text
            time.sleep(0.2)

    def answered(self, request_id: str, task: str, *, is_agent: bool = True) -> dict[str, Any]:
        """What the call of the model says in the receipt of a request that was answered whole."""
        receipt = self.receipt(request_id)
        assert receipt["status"] == "done", receipt
        assert receipt["task"] == task
        assert receipt["tenant"] == "clients"
        llm: dict[str, Any] = next(n["llm"] for n in reversed(receipt["nodes"]) if n["llm"])
        assert llm["output_tokens"] > 0
        if task.startswith("model:"):  # a task's own caps stand in its workflow
            assert llm["output_tokens"] <= (CAP_TOKENS if is_agent else CHAT_TOKENS)
        return llm

    def example(self, name: str) -> str:
        """A file of `deployments/clients/`, with this CATO's URL."""
        return (EXAMPLES / name).read_text().replace(EXAMPLE_URL, self.url)


_running = ExitStack()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End CATO after the last test here: the other live tests need the cores."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _running.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Cato:
    """`cato serve` with one vLLM engine whose context holds an agent's first request."""
    folder = tmp_path_factory.mktemp("clients")
    run_dir = tempfile.mkdtemp(prefix="cato-a-")  # short: it holds sockets
    env = {**os.environ, **own_cluster(run_dir), "CATO_RUN_DIR": run_dir, "CATO_HOME": str(ROOT)}
    env["XDG_STATE_HOME"] = run_dir
    env.pop("RAY_ADDRESS", None)
    port = free_port()
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment(folder, port)))
    create = [str(BIN / "cato"), "keys", "create", "--tenant", "clients"]
    said = subprocess.run(create, env=env, capture_output=True, text=True, check=True).stdout
    key = next(word for word in said.split() if word.startswith("cato_"))
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
    return Cato(url, key, Path(run_dir))


def deployment(folder: Path, port: int) -> dict[str, Any]:
    """`deployments/local-cpu.yaml` with a longer context, short answers and small, fixed inputs."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deployments" / "local-cpu.yaml").read_text())
    config["http_options"]["port"] = port
    engines, cato = (application["args"] for application in config["applications"])
    engines["models"]["demo-coder"]["source"] = long_model(folder / "model")
    engines["profiles"] = long_profiles(folder / "profiles")
    pool = engines["pools"]["demo"]["deployments"]["demo-cpu"]
    pool["replicas"] = {"min": 1, "initial": 1, "max": 1}
    pool["engine"] |= {"max_model_len": CONTEXT_TOKENS, "max_num_batched_tokens": 2048}
    cato["workflows"] = patient_workflows(folder / "workflows")
    cato["indexes"] = {"code": small_index(folder / "code")}
    cato["keys"] = "required"
    cato["output_caps"] = {"completion": CAP_TOKENS, "chat": CHAT_TOKENS, "agent": CAP_TOKENS}
    return config


def long_model(folder: Path) -> str:
    """The demo model with room for long prompts, which it does not understand, and a template that
    renders tools and system texts: agents are refused without."""
    shutil.copytree(demo_model_path(), folder)
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": WHOLE}))
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": CONTEXT_TOKENS})
    )
    return str(folder)


def long_profiles(folder: Path) -> str:
    from cato.profiles.load import load_profile_file, save_profile

    file = load_profile_file(ROOT / "profiles" / "demo-coder@cpu.yaml")
    profile = replace(file.to_profile(), context_tokens=CONTEXT_TOKENS)
    save_profile(folder / "demo-coder@cpu.yaml", profile, file.provenance)
    return str(folder)


@dataclass(frozen=True)
class Shell:
    """Runs a client in a home of its own, from which nothing but this machine can be reached."""

    home: Path

    def env(self, **more: str) -> dict[str, str]:
        nowhere = "http://127.0.0.1:9"  # the discard port: refused at once
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1,localhost",
            "NO_COLOR": "1",
            "CI": "1",
            **more,
        }

    def run(self, *argv: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run to the end; fails on a status that is not 0."""
        done = subprocess.run(
            [str(a) for a in argv],
            cwd=self.home,
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
        )
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def write(self, path: str, text: str) -> Path:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)
