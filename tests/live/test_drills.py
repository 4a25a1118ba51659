"""`cato chaos --ray` with faults that only a cluster has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.live

REAL = """
seed: 6
streams: 4
tokens: 60
replicas: 2
hosts: 2
faults: 6
gap: 3s
engine: vllm
dialects: {completions: 1}
mix: {zygote_kill: 1, engine_stop: 1}
"""


def drilled(plan: str, folder: Path) -> dict[str, Any]:
    (folder / "plan.yaml").write_text(plan)
    cato, report = str(Path(sys.executable).with_name("cato")), folder / "report.json"
    command = [cato, "chaos", "--ray", "--plan", str(folder / "plan.yaml"), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif("CATO_DRILLS" not in os.environ, reason="takes minutes: `make drills`")
def test_killed_zygotes_and_stopped_engines_cost_no_answer(tmp_path: Path) -> None:
    found = drilled(REAL, tmp_path)
    assert found["faults"] == 6
    assert set(found["recovery_s"]) == {"zygote_kill", "engine_stop"}
    assert set(found["calls"]) <= {"ok", "hung"}
