"""Sessions on a live application: their targets, where their turns go, and who sees them."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest

from tests.live.conftest import App

pytestmark = pytest.mark.live


def test_a_session_keeps_its_home_its_clock_and_its_books(app: App) -> None:
    session = f"live-{uuid.uuid4().hex}"
    headers = {"x-cato-session": session, "X-CATO-Session-Deadline-Ms": "3600000"}
    said: list[dict[str, str]] = [{"role": "user", "content": "Fix the bug. " * 100}]
    receipts: list[dict[str, Any]] = []
    for n in range(3):
        body = {"model": "sim-small", "max_tokens": 8, "messages": said}
        answer = app.post("/v1/messages", body, headers=headers)
        assert answer.status_code == 200, answer.text
        receipts.append(answer.json()["cato"])
        said += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"Go {n}."}]
        time.sleep(0.2)
    calls = [r["nodes"][0]["llm"] for r in receipts]
    assert [c["placement"] for c in calls] == ["new", "home", "home"]
    assert {c["home"] for c in calls[1:]} == {calls[0]["replica"]}
    assert all(c["uncached_prompt_tokens"] < calls[0]["uncached_prompt_tokens"] for c in calls[1:])
    assert receipts[0]["think_s"] is None
    assert all(r["think_s"] >= 0.2 for r in receipts[1:])
    assert all(0 < r["session_slack_s"] < r["session_target_s"] == 3600 for r in receipts)

    turns = app.get(f"/v1/usage?session={session}").json()["data"]
    assert [(t["turn"], t["placement"], t["met"]) for t in turns] == [
        (1, "new", True), (2, "home", True), (3, "home", True),
    ]  # fmt: skip
    seen = app.get("/ui/state").json()
    line = next(s for s in seen["sessions"]["newest"] if s["session"] == session)
    assert (line["turns"], line["moved"]) == (3, 0)
    replicas = [r for p in seen["pools"] for r in p["replicas"]]
    home = next(r for r in replicas if r["id"] == calls[0]["replica"])
    assert home["sessions"] >= 1
    assert 0 < home["working_set_tokens"] < home["kv_tokens"]
    assert "cato_session_turns_total{" in app.get("/metrics").text


def test_a_target_that_is_no_number_is_refused(app: App) -> None:
    body = {"model": "sim-small", "max_tokens": 8, "messages": [{"role": "user", "content": "a"}]}
    answer = app.post("/v1/messages", body, headers={"X-CATO-Session-Deadline-Ms": "soon"})
    assert answer.status_code == 400
    assert "X-CATO-Session-Deadline-Ms must be a number above 0" in answer.text
