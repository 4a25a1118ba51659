"""The main job on a live application: tasks over HTTP, as an IDE would send them."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from tests.live.conftest import App

pytestmark = pytest.mark.live

PYTHON = "def mean(values):\n    total = 0\n    for v in values:\n        total += v\n    return "
JAVA = "public class A {\n  public static int add(int a, int b) {\n    return a + b;\n  }\n}\n"

INPUTS: dict[str, dict[str, object]] = {
    "code-completion": {"prefix": PYTHON, "suffix": "\n\nprint(mean([1]))\n"},
    "code-generation": {"instruction": "Sum the numbers of a list."},
    "code-translation": {
        "code": JAVA,
        "source_language": "java",
        "target_language": "python",
    },
    "code-summarization": {"code": PYTHON + "total / len(values)\n"},
}


def path_seconds(receipt: dict[str, Any]) -> float:
    """Time of the executions that followed each other, queueing included."""
    return sum(receipt["nodes"][i]["spent_s"] for i in receipt["path"])


def test_every_task_answers_with_text_and_a_receipt(app: App) -> None:
    for task, inputs in INPUTS.items():
        answer = app.post(f"/v1/tasks/{task}", {"inputs": inputs})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["text"].strip(), task
        receipt = body["cato"]
        assert receipt["status"] == "done"
        assert receipt["task"] == task
        assert answer.headers["x-request-id"] == receipt["request_id"]
        llm = [n["llm"] for n in receipt["nodes"] if n["llm"]]
        assert llm
        assert all(x["replica"] and x["reasons"] for x in llm)


def test_a_receipt_can_be_read_again_by_its_request_id(app: App) -> None:
    answer = app.post("/v1/tasks/code-completion", {"inputs": INPUTS["code-completion"]})
    again = app.get(f"/v1/requests/{answer.headers['x-request-id']}")
    assert again.status_code == 200
    assert again.json()["path"] == answer.json()["cato"]["path"]
    assert app.get("/v1/requests/never-seen").status_code == 404


def test_a_streamed_task_sends_text_then_its_receipt(app: App) -> None:
    body = {"inputs": INPUTS["code-completion"], "stream": True}
    with httpx.stream("POST", f"{app.url}/v1/tasks/code-completion", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    text = "".join(e.get("text", "") for e in events[:-1])
    assert text
    assert events[-1]["output"]["text"] == text
    assert events[-1]["cato"]["ttft_s"] <= events[-1]["cato"]["e2e_s"]


def test_two_hundred_concurrent_tasks_of_all_kinds_finish_and_their_receipts_add_up(
    app: App,
) -> None:
    names = list(INPUTS) * 50
    random.Random(7).shuffle(names)

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=app.url, timeout=120, limits=limits) as client:
            calls = [
                client.post(f"/v1/tasks/{name}", json={"inputs": INPUTS[name]}) for name in names
            ]
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert [a.status_code for a in answers] == [200] * 200
    receipts = [a.json()["cato"] for a in answers]
    assert len({r["request_id"] for r in receipts}) == 200
    assert {r["status"] for r in receipts} == {"done"}
    # One of them may wait for the busy event loop between two nodes.
    paths_s, all_s = [path_seconds(r) for r in receipts], [r["e2e_s"] for r in receipts]
    assert all(path_s <= e2e_s + 0.001 for path_s, e2e_s in zip(paths_s, all_s, strict=True))
    assert sum(paths_s) == pytest.approx(sum(all_s), rel=0.05)


def test_metrics_count_the_runs_and_show_the_pools(app: App) -> None:
    app.post("/v1/tasks/code-completion", {"inputs": INPUTS["code-completion"]})
    text = app.get("/metrics").text
    assert 'cato_runs_total{status="done",task="code-completion"}' in text
    assert 'cato_pool_queued{pool="small"}' in text
    assert 'cato_replica_accepting{deployment="small-sim"' in text


def test_bad_input_is_refused_with_what_to_do(app: App) -> None:
    answer = app.post("/v1/tasks/code-translation", {"inputs": {"cod": "x"}})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "code" in message
    assert "cod" in message
    assert app.post("/v1/tasks/no-such-task", {"inputs": {}}).status_code == 404
