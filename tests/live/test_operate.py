"""What operators see of a live deployment, and change without a restart."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.live.conftest import ROOT, App
from tests.live.test_tasks import INPUTS

pytestmark = pytest.mark.live
WITHIN_S = 60.0


def wait_for(holds: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline_s:
        if found := holds():
            return found
        time.sleep(0.2)
    return pytest.fail(f"not within {WITHIN_S:.0f} s: {what}")


def state(app: App) -> dict[str, Any]:
    answer = app.get("/ui/state")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def summarize(app: App) -> str:
    answer = app.post("/v1/tasks/code-summarization", {"inputs": INPUTS["code-summarization"]})
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-cato-sla"])


def test_the_page_shows_the_fleet_runs_and_decisions(app: App) -> None:
    assert "<title>CATO" in app.get("/ui").text
    summarize(app)
    seen = wait_for(
        lambda: (s := state(app))["runs"] and not s["missing"] and s, "a run on the page"
    )
    replicas = [r for p in seen["pools"] for r in p["replicas"] if r["state"] == "ready"]
    assert {"small-sim", "large-sim"} <= {r["deployment"] for r in replicas}
    assert all(r["model"] for r in replicas if r["deployment"] == "small-sim")
    assert {d["name"] for d in seen["deployments"]} >= {"small-sim", "large-sim", "demo-cpu"}
    assert "code-summarization" in {t["task"] for t in seen["tasks"]}
    assert any(d["task"] == "code-summarization" and d["reason"] for d in seen["decisions"])
    receipt = app.get(f"/v1/requests/{seen['runs'][0]['request_id']}").json()
    assert receipt["nodes"], "the waterfall's receipt"


def test_a_dead_replica_is_on_the_page_and_in_the_metrics(app: App) -> None:
    import ray

    ready = [
        r
        for p in state(app)["pools"]
        for r in p["replicas"]
        if r["deployment"] == "small-sim" and r["state"] == "ready"
    ]
    victim = ready[0]["id"]
    name = next(
        a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if victim in a["name"]
    )
    ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)

    def gone() -> Any:
        replicas = [r for p in state(app)["pools"] for r in p["replicas"]]
        return next((r for r in replicas if r["id"] == victim and r["state"] == "gone"), None)

    assert wait_for(gone, "the dead replica as gone")["note"]
    page = app.get("/metrics").text
    assert re.search(r'cato_decisions_total\{decision="lost",pool="small"', page)


def test_a_live_scrape_has_no_undocumented_metric(app: App) -> None:
    documented = (ROOT / "cato" / "telemetry" / "README.md").read_text(encoding="utf-8")
    for family in text_string_to_metric_families(app.get("/metrics").text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name.endswith("_created") or f"| `{name}` |" in documented, name


def test_a_changed_workflow_takes_effect_without_a_restart(app: App) -> None:
    assert app.workflows is not None
    path = app.workflows / "code-summarization.yaml"
    before = path.read_text(encoding="utf-8")
    was = summarize(app)
    try:
        path.write_text(re.sub(r"target: [\d.]+s", "target: 7.5s", before, count=1))
        wait_for(lambda: summarize(app).endswith("=7500ms"), "the new target")
        path.write_text("name: [")
        wait_for(lambda: "code-summarization.yaml" in state(app)["problem"], "the problem")
        assert summarize(app).endswith("=7500ms")
    finally:
        path.write_text(before)
    wait_for(lambda: summarize(app) == was and state(app)["problem"] == "", "the old one again")
