"""What a deployment's file and its workflows say about each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cato.cli import app

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("source", "family", "is_noted"),
    [
        ("Qwen/Qwen2.5-Coder-1.5B", None, False),
        ("acme/our-model", None, True),
        ("acme/our-model", "qwen", False),
    ],
)
def test_a_model_that_is_not_known_to_fill_in_the_middle_is_noted(
    tmp_path: Path, source: str, family: str | None, is_noted: bool
) -> None:
    deployment = yaml.safe_load((ROOT / "deployments" / "simulated.yaml").read_text())
    [args] = [a["args"] for a in deployment["applications"] if a["name"] == "engines"]
    model = args["models"]["simulated-1.5b"]
    model["source"] = source
    if family is None:
        del model["family"]
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment))
    result = CliRunner().invoke(app, ["check", str(file)])
    said = " ".join(result.output.split())
    assert result.exit_code == 0, said
    assert ("note: " in said and "the code behind the cursor is left out" in said) is is_noted


@pytest.mark.parametrize(("max_tokens", "is_wrong"), [(8000, False), (8180, True), (9000, True)])
def test_a_token_limit_without_room_for_a_prompt_is_a_problem(
    tmp_path: Path, max_tokens: int, is_wrong: bool
) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(
        "name: w\nsla: {metric: e2e, target: 9s}\ninputs: {code: str}\nnodes:\n"
        "  a: {type: llm, model: coder-large, prompt: '{{ code }}', "
        f"max_tokens: {max_tokens}}}\n"
        "output: a\n"
    )
    deployment = str(ROOT / "deployments" / "simulated.yaml")  # a context of 8,192 tokens
    result = CliRunner().invoke(app, ["workflows", "check", str(file), "--deployment", deployment])
    said = " ".join(result.output.split())
    assert (result.exit_code, "nodes.a.max_tokens: leaves no room" in said) == (
        int(is_wrong),
        is_wrong,
    ), said


def test_a_fallback_without_room_for_a_prompt_is_a_problem(tmp_path: Path) -> None:
    deployment = yaml.safe_load((ROOT / "deployments" / "simulated.yaml").read_text())
    [args] = [a["args"] for a in deployment["applications"] if a["name"] == "engines"]
    for shape in args["pools"]["coder-fast"]["deployments"].values():
        shape["engine"]["max_model_len"] = 2048
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment))
    workflow = tmp_path / "w.yaml"
    workflow.write_text(
        "name: w\nsla: {metric: e2e, target: 9s}\ninputs: {code: str}\nnodes:\n"
        "  a: {type: llm, model: coder-large, fallback: coder-fast, prompt: '{{ code }}', "
        "max_tokens: 4000}\n"
        "output: a\n"
    )
    asked = ["workflows", "check", str(workflow), "--deployment", str(file)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "max_tokens: leaves no room for a prompt in the 2048 tokens of 'coder-fast'" in said
