"""A node that fails: whether its run goes on, who is at fault, and what the client is told."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_kit import Kit, a_pool, a_profile, a_slow_pool, running

from cato.core.errors import EngineError
from cato.core.receipt import Excuse, SlaReceipt
from cato.core.topology import EngineSpec
from cato.engines.base import EngineChunk, EngineRequest
from cato.engines.simulated import SimulatedEngine
from cato.lab.chaos.local_pools import LocalPool

HINTED = """
name: hinted
description: Answers with a hint, if there is one.
sla: {metric: e2e, target: 10s}
inputs: {prompt: {type: str}}
nodes:
  hint: {type: llm, model: odd, optional: OPTIONAL, prompt: "{{ prompt }}", max_tokens: 4}
  answer: {type: transform, needs: [hint], text: "with {{ hint.text or 'nothing' }}"}
output: answer
"""

TUNED = """
name: tuned
description: Sets a field of the engine's request.
sla: {metric: e2e, target: 10s}
inputs: {prompt: {type: str}}
nodes:
  only: {type: llm, model: odd, prompt: "{{ prompt }}", max_tokens: 4, extra: {top_k: -7}}
output: only
"""

PICKED = """
name: picked
description: As long and as often as its inputs say.
sla: {metric: e2e, target: 10s}
inputs:
  tokens: {type: int, default: 5}
  groups: {type: list, default: []}
nodes:
  each:
    {type: llm, model: odd, each: groups | first, prompt: "{{ item }}", max_tokens: 4,
     token_limit: tokens, optional: OPTIONAL}
  said: {type: transform, needs: [each], text: "{{ each | length if each else 0 }}"}
output: said
"""

OWN_FAULT = """
name: own-fault
description: Its own node writes no count.
sla: {metric: e2e, target: 10s}
inputs: {prompt: {type: str, default: x}}
nodes:
  count: {type: transform, text: "0", as_json: true}
  only:
    {type: llm, model: odd, needs: [count], prompt: "{{ prompt }}", max_tokens: 4,
     token_limit: count.value}
output: only
"""


class OddEngine(SimulatedEngine):
    """Fails every call with `error`, if that is set."""

    error: Exception | None = None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        if self.error is not None:
            raise self.error
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


def a_pool_with(error: Exception | None) -> LocalPool:
    pool = a_pool("sim-odd", "odd", replicas=0)
    engine = OddEngine(a_profile(), EngineSpec(kind="simulated", max_num_seqs=64), "sim-odd")
    engine.error = error
    pool.add(engine)
    return pool


async def ask(kit: Kit, task: str, body: dict[str, Any]) -> tuple[httpx.Response, SlaReceipt]:
    async with kit.http() as http:
        answer = await http.post(f"/v1/tasks/{task}", json=body, headers={"x-request-id": "r"})
    return answer, kit.records.receipts["", "r"]


FAILURES = [
    RuntimeError("a defect"),
    EngineError("not so", 400),
    EngineError("not here", 404),
    EngineError("broke", 502),
]


@pytest.mark.parametrize("error", FAILURES, ids=repr)
async def test_any_failure_of_an_optional_node_leaves_it_out(
    tmp_path: Path, error: Exception
) -> None:
    workflow = HINTED.replace("OPTIONAL", "true")
    async with running(tmp_path, a_pool_with(error), workflows=(workflow,)) as kit:
        answer, receipt = await ask(kit, "hinted", {"inputs": {"prompt": "x"}})
    assert answer.status_code == 200, answer.text
    assert [(n.node, n.status) for n in receipt.nodes] == [("hint", "absent"), ("answer", "done")]
    assert receipt.notes[0].startswith("hint left out: ")


async def test_a_defect_in_a_node_that_is_needed_fails_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workflow = HINTED.replace("OPTIONAL", "false")
    pool = a_pool_with(RuntimeError("a defect"))
    async with running(tmp_path, pool, workflows=(workflow,)) as kit:
        answer, receipt = await ask(kit, "hinted", {"inputs": {"prompt": "x"}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "node_failed")
    assert (receipt.status, receipt.excuse) == ("failed", Excuse.NONE)
    assert [(n.node, n.status) for n in receipt.nodes] == [("hint", "failed")]
    assert "RuntimeError('a defect')" in receipt.problem
    assert any(record.exc_info for record in caplog.records), "the log has its traceback"


@pytest.mark.parametrize("param", ["top_k", None])
async def test_a_workflow_s_own_setting_that_its_engine_refuses_is_no_client_s_error(
    tmp_path: Path, param: str | None
) -> None:
    pool = a_pool_with(EngineError("top_k must be at least 1", 400, param))
    async with running(tmp_path, pool, workflows=(TUNED,)) as kit:
        answer, receipt = await ask(kit, "tuned", {"inputs": {"prompt": "x"}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "node_failed")
    assert "top_k must be at least 1" in answer.headers["X-CATO-Problem"]
    assert (receipt.status, receipt.met, receipt.excuse) == ("failed", False, Excuse.NONE)


@pytest.mark.parametrize(
    ("error", "more"),
    [
        (EngineError("seed is too large", 400, "seed"), {"seed": 7}),
        (EngineError("seed is too large", 400), {"seed": 7}),
        (EngineError("stop may not be that", 400, "stop"), {"stop": ["#"]}),
        (EngineError("prompt must not be empty", 400), {"prompt": ""}),
        (EngineError("prompt has odd tokens", 400, "prompt"), {}),
    ],
    ids=str,
)
async def test_what_a_client_sent_to_a_task_and_its_engine_refuses_is_the_client_s_error(
    tmp_path: Path, error: EngineError, more: dict[str, Any]
) -> None:
    body = {"model": "cato-tuned", "prompt": "x", **more}
    async with running(tmp_path, a_pool_with(error), workflows=(TUNED,)) as kit:
        async with kit.http() as http:
            headers = {"x-request-id": "r"}
            answer = await http.post("/v1/completions", json=body, headers=headers)
        receipt = kit.records.receipts["", "r"]
    assert answer.status_code == 400
    assert receipt.excuse is Excuse.CLIENT_ERROR


@pytest.mark.parametrize(
    ("inputs", "param", "problem"),
    [
        ({"tokens": 0, "groups": [["a"]]}, "tokens", "a whole number of at least 1, is 0"),
        ({"groups": ["abc"]}, "groups", "is not a list but str"),
    ],
)
async def test_inputs_that_a_node_cannot_use_are_the_client_s_error(
    tmp_path: Path, inputs: dict[str, object], param: str, problem: str
) -> None:
    workflow = PICKED.replace("OPTIONAL", "false")
    async with running(tmp_path, a_pool_with(None), workflows=(workflow,)) as kit:
        answer, receipt = await ask(kit, "picked", {"inputs": inputs})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert problem in error["message"]
    assert (receipt.status, receipt.excuse) == ("failed", Excuse.CLIENT_ERROR)


async def test_an_optional_node_that_cannot_use_its_inputs_is_left_out(tmp_path: Path) -> None:
    workflow = PICKED.replace("OPTIONAL", "true")
    async with running(tmp_path, a_pool_with(None), workflows=(workflow,)) as kit:
        answer, _ = await ask(kit, "picked", {"inputs": {"groups": ["abc"]}})
    assert (answer.status_code, answer.json()["output"]["text"]) == (200, "0")


async def test_a_limit_that_a_node_has_made_is_no_client_s_error(tmp_path: Path) -> None:
    async with running(tmp_path, a_pool_with(None), workflows=(OWN_FAULT,)) as kit:
        answer, receipt = await ask(kit, "own-fault", {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "node_failed")
    assert receipt.excuse is Excuse.NONE


BUDGETED = """
name: budgeted
description: Has a node that must be quick.
sla: {metric: e2e, target: 10s}
inputs: {prompt: {type: str}}
nodes:
  only:
    {type: llm, model: slow, prompt: "{{ prompt }}", max_tokens: 500, budget: 100ms,
     extra: {ignore_eos: true}}
output: only
"""


async def test_a_client_is_told_which_node_passed_its_budget(tmp_path: Path) -> None:
    async with running(tmp_path, a_slow_pool(), workflows=(BUDGETED,)) as kit:
        answer, receipt = await ask(kit, "budgeted", {"inputs": {"prompt": "x"}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    problem = "node 'only': not ready within its budget of 0.1 s"
    assert answer.headers["X-CATO-Problem"] == problem
    assert receipt.excuse is Excuse.NONE


async def test_a_token_limit_without_room_for_a_prompt_is_no_client_s_error(tmp_path: Path) -> None:
    workflow = TUNED.replace("max_tokens: 4", "max_tokens: 4096")
    async with running(tmp_path, a_pool_with(None), workflows=(workflow,)) as kit:
        answer, receipt = await ask(kit, "tuned", {"inputs": {"prompt": "x"}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "node_failed")
    assert "max_tokens 4096 leaves no room" in answer.headers["X-CATO-Problem"]
    assert receipt.excuse is Excuse.NONE
