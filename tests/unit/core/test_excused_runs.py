"""Which runs count for an SLO, how a hard deadline ends one, and what receipts say of bad cases."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ingress_kit import (
    COMPLETION,
    SLOW,
    Kit,
    a_fast_pool,
    a_pool,
    a_slow_pool,
    running,
    until,
    until_busy,
)

from cato.core.receipt import DEADLINE_EXCEEDED, SlaReceipt
from cato.lab.chaos.local_pools import LocalPool

ASK = {"inputs": {"instruction": "x"}}


def receipt_of(kit: Kit, id: str) -> SlaReceipt:
    return kit.records.receipts["", id]


def runs_counted(kit: Kit, page: bytes) -> Mapping[str, float]:
    """Of the metric of SLOs and of that of excuses, by their labels."""
    found = {}
    for line in page.decode().splitlines():
        if line.startswith(("cato_slo_runs_total", "cato_excused_runs_total")):
            name, _, number = line.rpartition(" ")
            found[name] = float(number)
    return found


async def ask(kit: Kit, id: str, path: str = "/v1/tasks/slow", **more: Any) -> Any:
    async with kit.http() as http:
        headers = {"x-request-id": id, **more.pop("headers", {})}
        return await http.post(
            path, json={**ASK, **more} if "tasks" in path else more, headers=headers
        )


async def test_errors_of_clients_and_who_left_are_no_misses_but_refusals_are(
    tmp_path: Path,
) -> None:
    pool = a_slow_pool(slots=1, max_queued=0)
    async with running(tmp_path, pool, a_fast_pool(), workflows=(SLOW, COMPLETION)) as kit:
        long = {"model": "fast", "prompt": "x" * 90_000}
        too_long = await ask(kit, "long", "/v1/completions", **long)
        leaving = asyncio.create_task(ask(kit, "left"))
        await until_busy(pool)
        refused = await ask(kit, "refused")
        leaving.cancel()
        await until(lambda: ("", "left") in kit.records.receipts, within_s=10)
        page = await kit.records.metrics()
    assert (too_long.status_code, refused.status_code) == (400, 429)
    assert receipt_of(kit, "long").excuse == "client_error"
    assert receipt_of(kit, "left").excuse == "client_left"
    assert receipt_of(kit, "refused").excuse == ""
    counted = runs_counted(kit, page)
    assert sum(n for name, n in counted.items() if name.startswith("cato_slo_runs")) == 1
    assert sum(n for name, n in counted.items() if name.startswith("cato_excused")) == 2
    assert sum(p.runs for t in (await kit.records.overview(None)).tasks for p in t.points) == 1


NO_MODEL = """
name: no-model
description: Names a model that the deployment does not have.
sla: {metric: e2e, target: 10s}
inputs: {instruction: {type: str}}
nodes:
  hint: {type: llm, model: gone, optional: OPTIONAL, prompt: "{{ instruction }}?", max_tokens: 4}
  answer: {type: llm, model: fast, needs: [hint], prompt: "{{ hint.text }} so", max_tokens: 4}
stream: answer
output: answer
"""


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_model_that_is_not_there_fails_its_node_and_no_client_is_to_blame(
    tmp_path: Path, is_streamed: bool
) -> None:
    workflow = NO_MODEL.replace("OPTIONAL", "false")
    async with running(tmp_path, a_fast_pool(), workflows=(workflow,)) as kit:
        answer = await ask(kit, "r", "/v1/tasks/no-model", stream=is_streamed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "node_failed")
    assert answer.headers["X-CATO-Problem"].startswith("node 'hint': no model named 'gone'")
    receipt = receipt_of(kit, "r")
    assert (receipt.status, receipt.met, receipt.excuse) == ("failed", False, "")
    assert receipt.problem.startswith("node 'hint': no model named 'gone'")


async def test_an_optional_node_whose_model_is_not_there_is_left_out(tmp_path: Path) -> None:
    workflow = NO_MODEL.replace("OPTIONAL", "true")
    async with running(tmp_path, a_fast_pool(), workflows=(workflow,)) as kit:
        answer = await ask(kit, "r", "/v1/tasks/no-model")
    assert answer.status_code == 200
    receipt = receipt_of(kit, "r")
    assert [(n.node, n.status) for n in receipt.nodes] == [("hint", "absent"), ("answer", "done")]
    assert receipt.notes[0].startswith("hint left out: no model named 'gone'")


CONDITION = """
name: condition
description: Looks at the whole input in a condition.
sla: {metric: e2e, target: 10s}
inputs: {instruction: {type: str}}
nodes:
  big:
    type: transform
    when: (instruction ~ instruction ~ instruction ~ instruction ~ instruction) | length > 9
    text: "{{ instruction }}"
output: big
"""


async def test_an_input_too_large_for_a_condition_is_the_clients_error(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(CONDITION,)) as kit:
        big = {"inputs": {"instruction": "x" * 90_000}}
        answer = await ask(kit, "r", "/v1/tasks/condition", **big)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "inputs_too_large")
    assert (receipt_of(kit, "r").status, receipt_of(kit, "r").excuse) == ("failed", "client_error")


@pytest.mark.parametrize("where", ["header", "body"])
async def test_a_deadline_of_the_client_ends_the_run(tmp_path: Path, where: str) -> None:
    pool = a_slow_pool()
    more: dict[str, Any] = {"headers": {"X-CATO-Deadline-Ms": "300"}}
    if where == "body":
        more = {"model": "slow", "prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        more |= {"cato": {"deadline_ms": 300}}
    path = "/v1/completions" if where == "body" else "/v1/tasks/slow"
    async with running(tmp_path, pool, workflows=(SLOW, COMPLETION)) as kit:
        answer = await ask(kit, "r", path, **more)
        await until(lambda: ("", "r") in kit.records.receipts, within_s=10)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, DEADLINE_EXCEEDED)
    receipt = receipt_of(kit, "r")
    assert (receipt.status, receipt.met, receipt.excuse) == (DEADLINE_EXCEEDED, False, "")
    (llm,) = (n.llm for n in receipt.nodes)
    assert llm is not None
    assert llm.service_s > 0.2


async def waiting_for(pool: LocalPool, folder: Path) -> SlaReceipt:
    """The receipt of a run that waited for `pool` until its deadline."""
    async with running(folder, pool, workflows=(SLOW, COMPLETION)) as kit:
        first = asyncio.create_task(ask(kit, "first"))
        await until_busy(pool)
        await ask(kit, "r", headers={"X-CATO-Deadline-Ms": "400"})
        first.cancel()
        await until(lambda: ("", "r") in kit.records.receipts, within_s=10)
        return receipt_of(kit, "r")


async def test_a_call_that_waited_until_its_deadline_says_so(tmp_path: Path) -> None:
    pool = a_pool("sim-slow", "slow", prefill_s=5.0, slots=1)  # a stream would be paused
    receipt = await waiting_for(pool, tmp_path)
    assert receipt.status == DEADLINE_EXCEEDED
    assert receipt.queue_s > 0.3
    (node,) = receipt.nodes
    assert node.llm is not None
    assert node.llm.queue_s > 0.3
    assert " s in sim-slow" in node.llm.reasons[-1]


async def test_a_refused_call_waited_as_long_as_it_did(tmp_path: Path) -> None:
    pool = a_pool("sim-slow", "slow", step_s=0.02, slots=1, max_queued=0)
    async with running(tmp_path, pool, workflows=(SLOW, COMPLETION)) as kit:
        first = asyncio.create_task(ask(kit, "first"))
        await until_busy(pool)
        refused = await ask(kit, "r")
        first.cancel()
    assert refused.status_code == 429
    (node,) = receipt_of(kit, "r").nodes
    assert node.llm is not None
    assert node.llm.queue_s > 0
    assert node.llm.reasons[-1].startswith("refused: ")
