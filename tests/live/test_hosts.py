"""Several hosts: raylets on this machine, of which one is lost or leaves with all it runs; and the
proxy before them is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

# Three hosts with two replicas each, or so: either of the last two takes a third of the streams.
PLAN = """
seed: 29
streams: 12
tokens: 40
step: 100ms
replicas: 6
hosts: 3
faults: 6
gap: 6s
mix: {host_kill: 1, host_drain: 1, haproxy_kill: 1}
"""


@pytest.mark.timeout(420)
def test_a_host_or_a_proxy_that_is_lost_costs_no_token_of_any_answer(tmp_path: Path) -> None:
    plan, report = tmp_path / "plan.yaml", tmp_path / "report.json"
    plan.write_text(PLAN)
    cato = Path(sys.executable).with_name("cato")
    command = [cato, "chaos", "--ray", "--plan", plan, "--json", report]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["faults"] == 6
    assert set(found["recovery_s"]) == {"host_kill", "host_drain", "haproxy_kill"}
    assert found["calls"]["ok"] > 20
    # HAProxy, or an ingress replica that was there, cut its connections. A 404 would be wrong.
    assert set(found["calls"]) <= {"ok", "cut", "refused", "hung"}
