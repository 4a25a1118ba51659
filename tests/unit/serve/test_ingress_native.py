"""The native dialect: tasks by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, an_access, running, sse_events
from test_ingress_templates import near
from test_keys import foreign

from cato.serve.ingress.app import create_app

WORKFLOWS = (COMPLETION, GENERATION)
COMPLETE = {"inputs": {"prefix": "def add(a, b):\n    return "}}


async def post(folder: Path, path: str, body: Any, **headers: str) -> Any:
    async with running(folder, a_fast_pool(), workflows=WORKFLOWS) as kit, kit.http() as http:
        return await http.post(path, json=body, headers=headers)


async def get(folder: Path, path: str) -> Any:
    async with running(folder, a_fast_pool(), workflows=WORKFLOWS) as kit, kit.http() as http:
        return await http.get(path)


async def test_a_task_answers_with_output_text_and_receipt(tmp_path: Path) -> None:
    response = await post(tmp_path, "/v1/tasks/code-completion", COMPLETE)
    answer = response.json()
    assert response.status_code == 200
    assert answer["task"] == "code-completion"
    assert answer["text"] == answer["output"]["text"] != ""
    assert answer["cato"]["status"] == "done"
    assert answer["cato"]["simulated"] is True


async def test_streamed_text_adds_up_to_the_output_and_ends_with_done(tmp_path: Path) -> None:
    response = await post(tmp_path, "/v1/tasks/code-completion", {**COMPLETE, "stream": True})
    *texts, done, end = sse_events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert {name for name, _ in texts} == {"text"}
    assert done[0] == "done"
    assert "".join(value["text"] for _, value in texts) == done[1]["text"]
    assert done[1]["cato"]["met"] is True
    assert end == ("", "[DONE]")


async def test_the_output_counts_where_it_differs_from_the_streamed_text(tmp_path: Path) -> None:
    body = {"inputs": {"instruction": "add"}, "stream": True}
    response = await post(tmp_path, "/v1/tasks/code-generation", body)
    *texts, done, _ = sse_events(response.text)
    streamed = "".join(value["text"] for _, value in texts)
    assert done[1]["text"] == f"{streamed} # 8 tokens"


async def test_path_and_overhead_of_a_receipt_add_up_to_the_whole_time(tmp_path: Path) -> None:
    body = {"inputs": {"instruction": "add"}}
    response = await post(tmp_path, "/v1/tasks/code-generation", body)
    receipt = response.json()["cato"]
    on_path = sum(receipt["nodes"][i]["spent_s"] for i in receipt["path"])
    assert [receipt["nodes"][i]["node"] for i in receipt["path"]] == ["draft", "final"]
    assert on_path + receipt["overhead_s"] == pytest.approx(receipt["e2e_s"], abs=1e-5)
    assert 0 <= receipt["overhead_s"] < 0.1


async def test_headers_say_what_was_promised_and_what_came_of_it(tmp_path: Path) -> None:
    response = await post(tmp_path, "/v1/tasks/code-completion", COMPLETE)
    headers = response.headers
    assert headers["x-request-id"] == response.json()["id"]
    assert headers["X-CATO-Task"] == "code-completion"
    assert headers["X-CATO-SLA"] == "ttft=10000ms"
    assert headers["X-CATO-Met"] == "true"
    assert headers["X-CATO-Replica"] == "sim-fast#0"
    assert float(headers["X-CATO-Achieved-Ms"]) > 0
    assert float(headers["X-CATO-Queue-Ms"]) >= 0
    assert int(headers["openai-processing-ms"]) >= 0
    assert headers["Server-Timing"].startswith("fill;dur=")


FAN_OUT = """
name: fan-out
description: Looks at every part, twice.
sla: {metric: e2e, target: 60s}
inputs: {parts: {type: list}}
nodes:
  what_each_part_does: {type: transform, each: parts, max_items: 64, text: "{{ item }}"}
  who_may_call_each_part: {type: transform, each: parts, max_items: 64, text: "{{ item }}"}
  where_each_part_fails: {type: transform, each: parts, max_items: 64, text: "{{ item }}"}
  joined:
    type: transform
    needs: [what_each_part_does, who_may_call_each_part, where_each_part_fails]
    text: "{{ where_each_part_fails | join(' ', 'text') }}"
output: joined
"""


async def test_a_wide_fan_out_has_headers_that_proxies_take(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(FAN_OUT,)) as kit, kit.http() as http:
        body = {"inputs": {"parts": ["x"] * 64}}
        answer = await http.post("/v1/tasks/fan-out", json=body)
    receipt = answer.json()["cato"]
    assert len(receipt["nodes"]) == 3 * 64 + 1
    timing = dict(entry.split(";dur=") for entry in answer.headers["Server-Timing"].split(", "))
    assert set(timing) == {node["node"] for node in receipt["nodes"]}
    items = [n["spent_s"] for n in receipt["nodes"] if n["node"] == "where_each_part_fails"]
    assert float(timing["where_each_part_fails"]) == pytest.approx(max(items) * 1000, abs=0.01)
    assert sum(len(k) + len(v) for k, v in answer.headers.items()) < 4096


@pytest.mark.parametrize(
    ("offered", "is_kept"), [("my-id.1", True), ("a/b", False), ("x" * 200, False), ("", False)]
)
async def test_only_a_sane_request_id_of_the_client_is_kept(
    tmp_path: Path, offered: str, is_kept: bool
) -> None:
    path = "/v1/tasks/code-completion"
    response = await post(tmp_path, path, COMPLETE, **{"x-request-id": offered})
    assert (response.headers["x-request-id"] == offered) is is_kept


async def test_inputs_at_top_level_are_refused_with_the_right_shape(tmp_path: Path) -> None:
    response = await post(tmp_path, "/v1/tasks/code-completion", {"prefix": "x"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prefix"
    assert '{"inputs": {...}' in error["message"]


async def test_a_missing_input_is_named(tmp_path: Path) -> None:
    response = await post(tmp_path, "/v1/tasks/code-completion", {"inputs": {}})
    assert response.status_code == 400
    assert "prefix" in response.json()["error"]["message"]


async def test_an_unknown_task_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    response = await post(tmp_path, "/v1/tasks/code-complation", COMPLETE)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "task_not_found"
    assert "code-completion" in response.json()["error"]["message"]


async def test_tasks_are_listed_with_inputs_promise_and_model_name(tmp_path: Path) -> None:
    response = await get(tmp_path, "/v1/tasks")
    completion, generation = response.json()["data"]
    assert [completion["model"], generation["model"]] == ["cato-completion", "cato-generation"]
    assert completion["sla"]["metric"] == "ttft"
    assert completion["sla"]["target_ms"] == 10_000
    prefix, suffix = completion["inputs"]
    assert (prefix["name"], prefix["type"], prefix["required"]) == ("prefix", "str", True)
    assert (suffix["required"], suffix["default"]) == (False, "")


async def test_one_task_can_be_asked_for(tmp_path: Path) -> None:
    assert (await get(tmp_path, "/v1/tasks/code-completion")).json()["name"] == "code-completion"
    sla = (await get(tmp_path, "/v1/tasks/code-completion/sla")).json()
    assert (sla["task"], sla["target_ms"]) == ("code-completion", 10_000)
    assert (await get(tmp_path, "/v1/tasks/nope")).status_code == 404


@pytest.mark.parametrize(
    ("sla", "header", "expected"),
    [
        ({"target_ms": 150}, None, "ttft=150ms"),
        ({"metric": "ttft", "target_ms": 99_000}, None, "ttft=10000ms"),
        (None, "80", "ttft=80ms"),
        ({"target_ms": 150}, "80.5", "ttft=80.5ms"),
    ],
)
async def test_a_hint_tightens_the_promise_and_never_loosens_it(
    tmp_path: Path, sla: dict[str, object] | None, header: str | None, expected: str
) -> None:
    headers = {} if header is None else {"X-CATO-Deadline-Ms": header}
    path = "/v1/tasks/code-completion"
    response = await post(tmp_path, path, {**COMPLETE, "sla": sla}, **headers)
    assert response.headers["X-CATO-SLA"] == expected


@pytest.mark.parametrize(
    ("sla", "header", "param"),
    [
        ({"metric": "e2e", "target_ms": 5}, "50", "sla.metric"),
        ({"target_ms": -1}, "50", "sla.target_ms"),
        ({"target_ms": True}, "50", "sla.target_ms"),
        ({"target": 5}, "50", "target"),
        ("fast", "50", "sla"),
        (None, "soon", "X-CATO-Deadline-Ms"),
        (None, "nan", "X-CATO-Deadline-Ms"),
    ],
)
async def test_an_unreadable_hint_is_an_error(
    tmp_path: Path, sla: object, header: str, param: str
) -> None:
    path = "/v1/tasks/code-completion"
    body = {**COMPLETE, "sla": sla}
    response = await post(tmp_path, path, body, **{"X-CATO-Deadline-Ms": header})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_receipt_is_readable_by_request_id_after_the_answer(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=WORKFLOWS) as kit, kit.http() as http:
        answer = await http.post("/v1/tasks/code-completion", json=COMPLETE)
        receipt = await http.get(f"/v1/requests/{answer.json()['id']}")
        unknown = await http.get("/v1/requests/req-nobody")
    assert receipt.json() == answer.json()["cato"]
    assert receipt.json()["nodes"][0]["llm"]["reasons"]
    assert unknown.status_code == 404
    assert "x-request-id" in unknown.json()["error"]["message"]


async def test_metrics_count_runs_and_name_pools(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=WORKFLOWS) as kit, kit.http() as http:
        await http.post("/v1/tasks/code-completion", json=COMPLETE)
        page = (await http.get("/metrics")).text
        head = await http.head("/metrics")
    assert 'cato_runs_total{status="done",task="code-completion"} 1.0' in page
    assert 'cato_pool_queued{pool="sim-fast-pool"} 0.0' in page
    assert (head.status_code, head.content) == (200, b"")


async def test_what_monitors_probe_answers_head_as_get_without_a_body(tmp_path: Path) -> None:
    paths = ("/health", "/livez", "/readyz", "/", "/v1/models")
    async with (
        running(tmp_path, a_fast_pool(), workflows=WORKFLOWS) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        told = [(await http.get(p), await http.head(p)) for p in paths]
    for got, head in told:
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers["content-length"] == got.headers["content-length"]
        assert head.headers.get("location") == got.headers.get("location")


async def test_health_is_always_ok_but_readiness_gives_its_reason(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=WORKFLOWS) as kit:
        kit.app = create_app(
            kit.service,
            max_body_bytes=1,
            ready=lambda: (False, "no replica of sim-fast yet"),
            access=an_access(),
        )
        async with kit.http() as http:
            health, ready = await http.get("/health"), await http.get("/readyz")
    assert health.json() == {"status": "ok"}
    assert ready.status_code == 503
    assert ready.json()["reason"] == "no replica of sim-fast yet"


async def test_a_server_that_is_ready_tells_its_operator_alone_what_to_mend(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=WORKFLOWS) as kit:
        app = create_app(
            kit.service,
            max_body_bytes=1,
            ready=lambda: (True, "the last deployment failed"),
            access=an_access(),
        )
        async with near(app) as here, foreign(app) as far:
            mine, theirs = await here.get("/readyz"), await far.get("/readyz")
    assert mine.json() == {"status": "ready", "notes": ["the last deployment failed"]}
    assert theirs.json() == {"status": "ready"}
