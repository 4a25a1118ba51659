"""Every block of the guides runs as printed, or this table says why not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cato.config.deploy_file import deploy_file_of
from cato.config.engines import EngineArgs
from cato.config.shared_pools import SharedPoolArgs
from cato.telemetry.tracing import from_environment

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
GUIDES = (
    README,
    ROOT / "workflows" / "README.md",
    ROOT / "deployments" / "README.md",
    ROOT / "deployments" / "clients" / "README.md",
    ROOT / "cato" / "telemetry" / "README.md",
)
BLOCK = re.compile(r"^```(sh|python|yaml|json)\n(.*?)^```", re.MULTILINE | re.DOTALL)
Check = Callable[[str, Path, pytest.MonkeyPatch], None]


def merged(into: Any, more: Any) -> Any:
    if not isinstance(into, dict) or not isinstance(more, dict):
        return more
    return into | {key: merged(into.get(key), value) for key, value in more.items()}


def a_deployment(application: int, args: dict[str, Any]) -> None:
    """The shipped simulated deployment with these `args` besides is valid."""
    path = ROOT / "deployments" / "simulated.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    app = config["applications"][application]
    for model in (app["args"].get("models") or {}).values():
        model["aliases"] = []  # the block's own names may be the same
    app["args"] = merged(app["args"], args)
    deploy_file_of(path, config)


def ingress_args(block: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    a_deployment(1, yaml.safe_load(block)["args"])


def more_ingress_args(block: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The same of a block that begins below `args`."""
    a_deployment(1, yaml.safe_load(block))


def engine_of_a_deployment(block: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    EngineArgs.model_validate(yaml.safe_load(block)["engine"])


def models(block: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    a_deployment(0, yaml.safe_load(block))


def shared_pool(block: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    (pool,) = yaml.safe_load(block)["shared_pools"].values()
    SharedPoolArgs.model_validate(pool)


def prometheus(block: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    (job,) = yaml.safe_load(block)["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]


def log_line(block: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    assert json.loads(block)["logger"] == "cato.run"


def exports(block: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """What it exports turns tracing on."""
    shown = subprocess.run(
        ["bash", "-euc", f"{block}\nenv"], capture_output=True, text=True, check=True
    ).stdout
    for line in shown.splitlines():
        name, _, value = line.partition("=")
        if name.startswith("OTEL_"):
            patch.setenv(name, value)
    tracing = from_environment()
    assert tracing is not None
    tracing.close()


def own_model(block: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """All but the last command, which needs a GPU."""
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    said = subprocess.run(
        ["bash", "-euc", block.partition(" && ../.venv/bin/cato serve")[0]],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    assert f"{folder}/my-cato/deployments/nvidia.yaml: no problems" in said.stdout
    assert "YOUR/MODEL" in (folder / "my-cato" / "deployments" / "nvidia.yaml").read_text()


LIVE = "tests/live/test_documents.py runs it"
TUTORIAL = "tests/unit/cli/test_docs.py runs all blocks of the tutorial in one shell"
CHECKED = "tests/unit/serve/test_nodes_checkers.py runs it"
# How a block begins -> its check, or why it is not run here.
HOW: dict[str, Check | str] = {
    "make serve ": "this test is a part of the second line; the first starts what others ask",
    "curl -i http://127.0.0.1:8000/v1/completions": LIVE,
    ".venv/bin/cato explain": LIVE,
    "from openai import OpenAI": LIVE,
    ".venv/bin/cato init": own_model,
    "# on every host": "tests/live/test_serve_cli.py deploys on a head node of its own",
    "cato top --once": TUTORIAL,
    "curl -s http://127.0.0.1:8000/v1/tasks/code-generation": TUTORIAL,
    "cat > workflows/code-review.yaml": TUTORIAL,
    "until curl -sf http://127.0.0.1:8000": TUTORIAL,
    "sed -i 's/target: 2s": TUTORIAL,
    "rm workflows/code-review.yaml": TUTORIAL,
    "args:\n  reuse:": ingress_args,
    "args:\n  sign_in:": ingress_args,
    "args:                     #": ingress_args,
    "engine: {": engine_of_a_deployment,
    "cato rollout start": "tests/live/test_rollouts.py begins and judges rollouts",
    "helm -n": "needs Kubernetes; tests/unit/deployments/test_helm.py renders the chart",
    "  prices:": more_ingress_args,
    "checkers:": more_ingress_args,
    "  check:\n": "a part of a file; tests/unit/serve/test_nodes_checkers.py runs such a node",
    "name: code-generation-reviewed": CHECKED,
    "pools:\n  coder-large:": models,
    "models:\n  small:": models,
    "models:\n  qwen-coder-7b:": models,
    "shared_pools:\n": shared_pool,
    "cato models add billing-coder": "needs a LoRA adapter; tests/live/test_adapters.py adds one",
    "docker build": "needs Docker; tests/unit/deployments/test_docker.py reads its files",
    "docker compose": "needs Docker",
    "docker run": "needs Docker and an NPU",
    "kubectl create": "needs Kubernetes; tests/unit/deployments/test_kubernetes.py checks them",
    "scrape_configs:": prometheus,
    "export OTEL_": exports,
    '{"at":': log_line,
}


def blocks() -> list[tuple[str, str]]:
    return [
        (str(guide.relative_to(ROOT)), block)
        for guide in GUIDES
        for _, block in BLOCK.findall(guide.read_text(encoding="utf-8"))
    ]


def how(block: str) -> Check | str:
    (found,) = (check for begin, check in HOW.items() if block.startswith(begin))
    return found


@pytest.mark.parametrize(("guide", "block"), blocks(), ids=lambda text: text.split("\n")[0][:60])
def test_a_block_runs_as_printed_or_has_a_reason_not_to(
    guide: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = how(block)
    if isinstance(check, str):
        test = re.match(r"tests/\S+\.py", check)
        assert test is None or (ROOT / test[0]).exists()
    else:
        check(block, tmp_path, monkeypatch)


def test_no_reason_is_left_of_a_block_that_is_gone() -> None:
    there = [block for _, block in blocks()]
    assert [begin for begin in HOW if not any(b.startswith(begin) for b in there)] == []
