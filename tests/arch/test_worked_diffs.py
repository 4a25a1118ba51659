"""The worked diffs of CONTRIBUTING.md apply to the code, and what they add works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIFF = re.compile(r"^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)
WORKFLOW = """
name: lines-of
sla: {metric: e2e, target: 1s}
inputs: {code: str}
nodes: {lines: {type: count, text: "{{ code }}"}}
output: lines
"""
USED = """
import asyncio
from pathlib import Path
import cato
from cato.lab.registry import study
from cato.policies.eviction.registry import EVICTIONS
from cato.serve.ingress import app, document
from cato.serve.nodes.runner import NodeRunner
from cato.workflows.load import load_workflow

assert Path(cato.__file__).is_relative_to(Path.cwd()), cato.__file__
assert "largest" in EVICTIONS
assert study("long-prompts").arms
assert app.plain in app.DIALECTS and document.PLAIN
(node,) = load_workflow(Path("lines.yaml")).nodes
result = asyncio.run(NodeRunner({}).run(node.id, node.settings, {"code": "a\\nb"}))
assert result == {"lines": 2}, result
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worked_diffs_apply_and_work(tmp_path: Path) -> None:
    page = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diffs = DIFF.findall(page)
    assert len(diffs) == 4
    shutil.copytree(ROOT / "cato", tmp_path / "cato", ignore=shutil.ignore_patterns("__pycache__"))
    for diff in diffs:
        applied = subprocess.run(
            ["git", "apply", "-C1"], input=diff, cwd=tmp_path, capture_output=True, text=True,
            check=False, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        )  # fmt: skip
        assert applied.returncode == 0, f"{applied.stderr}\n{diff}"
    (tmp_path / "lines.yaml").write_text(WORKFLOW, encoding="utf-8")
    used = subprocess.run(
        [sys.executable, "-c", USED], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert used.returncode == 0, used.stderr
