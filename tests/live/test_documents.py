"""The first steps of the README, as a reader would take them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.conftest import App

pytestmark = [pytest.mark.live, pytest.mark.vllm]

README = Path(__file__).parents[2] / "README.md"
URL = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    """Of the section on the first steps."""
    text = README.read_text(encoding="utf-8").partition("## First steps")[2]
    section = text.partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def done(command: list[str], app: App) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "CATO_URL": app.url, "PATH": path}
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_the_shell_commands_work(app: App) -> None:
    (block,) = blocks("sh")
    serve, *steps, explain = block.strip().split("\n\n")
    assert serve.startswith("make serve"), "the application that answers here"
    assert len(steps) == 2
    answers = [done(["bash", "-c", step.replace(URL, app.url)], app) for step in steps]
    assert '"object":"text_completion"' in answers[0].replace(" ", "")
    (request_id,) = re.findall(r"x-request-id: (\S+)", answers[0], re.IGNORECASE)
    assert '"text"' in answers[1]
    told = explain.partition("#")[0].replace(".venv/bin/", "").replace("REQUEST_ID", request_id)
    assert "code-completion" in done(["bash", "-c", told], app)


def test_the_python_example_prints_a_completion(app: App) -> None:
    (block,) = blocks("python")
    assert done([sys.executable, "-c", block.replace(URL, app.url)], app).strip()
