"""Clients from PyPI that need an environment of their own, unmodified."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.live.clients.conftest import Cato, Shell
from tests.live.clients.installed import HERE, python_folder

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.timeout(1800)]
SAID = "Read a file."
CODE = "def read(path):\n    with open(path) as file:\n        return "


def test_litellm_in_five_dialects(served: Cato, shell: Shell) -> None:
    python = python_folder("litellm") / "bin" / "python"
    env = {"CATO_URL": served.url, "CATO_API_KEY": served.key}
    done = shell.run(python, HERE / "litellm_calls.py", LITELLM_LOCAL_MODEL_COST_MAP="True", **env)
    said = json.loads(done.stdout.splitlines()[-1])
    tasks = {
        "chat": "model:demo-coder",
        "stream": "model:demo-coder",
        "completions": "code-completion",
        "responses": "model:demo-coder",
        "messages": "model:demo-coder",
    }
    for dialect, task in tasks.items():
        assert said[dialect].strip(), dialect
        served.answered(f"litellm-{dialect}", task, is_agent=False)


@pytest.mark.parametrize("form", ["chat", "completion"])
def test_llm(served: Cato, shell: Shell, form: str) -> None:
    model = {
        "model_id": "cato",
        "model_name": "cato-auto" if form == "chat" else "cato-completion",
        "api_base": f"{served.url}/v1",
        "headers": {"x-request-id": f"llm-{form}"},
        "completion": form == "completion",
        "api_key_name": "cato",
    }
    shell.write("llm/extra-openai-models.yaml", yaml.safe_dump([model]))
    llm = python_folder("llm") / "bin" / "llm"
    said = shell.run(
        llm,
        "-m",
        "cato",
        "--key",
        served.key,
        "--no-log",
        SAID if form == "chat" else CODE,
        LLM_USER_PATH=str(shell.home / "llm"),
    )
    assert said.stdout.strip()
    task = "model:demo-coder" if form == "chat" else "code-completion"
    served.answered(f"llm-{form}", task, is_agent=False)


def test_aider(served: Cato, shell: Shell) -> None:
    config = served.example("aider.conf.yml").replace("key: none", f"key: {served.key}")
    assert served.key in config
    shell.write(".aider.conf.yml", config)
    settings = {
        "name": "openai/cato-auto",
        "extra_params": {"extra_headers": {"x-request-id": "aider"}},
    }
    shell.write(".aider.model.settings.yml", yaml.safe_dump([settings]))
    done = shell.run(
        python_folder("aider") / "bin" / "aider",
        "--message",
        SAID,
        "--no-git",
        "--yes-always",
        "--no-check-update",
        "--analytics-disable",
        "--no-stream",
        "--no-suggest-shell-commands",
    )
    # Its status is 0 after errors, too. The demo model says nothing that ends before its limit, of
    # which aider tells at length.
    assert "litellm." not in done.stdout, done.stdout  # how it names an error of the server
    assert "Tokens:" in done.stdout or "has hit a token limit" in done.stdout, done.stdout
    served.answered("aider", "model:demo-coder", is_agent=False)
