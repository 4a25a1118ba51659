"""Brown-out: what runs go without while their pools are full, and that receipts say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ingress_kit import a_fast_pool, a_model_call, a_pool, until_busy, until_idle, workflows_of

from cato.config.problems import validate
from cato.config.schema import IngressArgs
from cato.core.brownout import BrownoutStep, browned
from cato.core.errors import ConfigError
from cato.core.ids import TaskName
from cato.core.workflow import LlmSettings, Workflow
from cato.lab.chaos.local_pools import LocalPools, LocalRecords
from cato.serve.nodes.runner import NodeRunner
from cato.serve.service import TaskService

STEPS = (
    BrownoutStep(0.5, skip_optional=True),
    BrownoutStep(1.0, max_rounds=1),
    BrownoutStep(2.0, use_fallback=True),
)

WORKFLOW = """
name: rich
description: Everything that can be left out.
sla: {metric: e2e, target: 30s}
inputs: {prompt: {type: str}}
nodes:
  context:
    {type: llm, model: large, prompt: "{{ prompt }}", max_tokens: 3, optional: true, budget: 10s}
  draft:
    type: llm
    model: large
    fallback: fast
    needs: [context]
    prompt: "{{ prompt }}"
    max_tokens: 4
    repeat: {until: "draft.tokens > 99", max: 3}
output: draft
"""


@pytest.fixture
def rich(tmp_path: Path) -> Workflow:
    return workflows_of(tmp_path, WORKFLOW)[TaskName("rich")]


def rounds(workflow: Workflow) -> int:
    (repeat,) = [n.repeat for n in workflow.nodes if n.repeat is not None]
    return repeat.max_rounds


def models(workflow: Workflow) -> list[str]:
    return [n.settings.model for n in workflow.nodes if isinstance(n.settings, LlmSettings)]


def test_below_the_first_step_nothing_changes(rich: Workflow) -> None:
    assert browned(rich, STEPS, lambda _: 0.4) == (rich, ())
    assert browned(rich, (), lambda _: 99.0) == (rich, ())


@pytest.mark.parametrize(
    ("full", "budget_s", "left", "asked"),
    [
        (0.5, 0.0, 3, ["large", "large"]),
        (1.0, 0.0, 1, ["large", "large"]),
        (2.0, 0.0, 1, ["large", "fast"]),
    ],
)
def test_steps_add_up(
    rich: Workflow, full: float, budget_s: float, left: int, asked: list[str]
) -> None:
    less, notes = browned(rich, STEPS, {"large": full, "fast": 0.0}.__getitem__)
    assert less.nodes[0].budget_s == budget_s
    assert (rounds(less), models(less)) == (left, asked)
    assert all(note.startswith("brown-out: ") for note in notes)


def test_a_fallback_that_is_as_full_is_of_no_use(rich: Workflow) -> None:
    less, notes = browned(rich, STEPS, lambda _: 5.0)
    assert models(less) == ["large", "large"]
    assert not any("instead" in note for note in notes)


async def test_a_run_that_starts_under_load_goes_without_and_says_so(tmp_path: Path) -> None:
    large = a_pool("sim-large", "large", step_s=0.01, slots=1)
    fast = a_fast_pool()
    async with LocalPools(large, fast) as pools:
        records = LocalRecords(pools)
        workflows = workflows_of(tmp_path, WORKFLOW)
        service = TaskService(workflows, pools, NodeRunner({}), records, 1, brownout=STEPS)
        body: dict[str, object] = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}
        load = [
            service.run_model(a_model_call("large", "completions", body), request_id=f"l{i}")
            for i in range(4)
        ]
        await until_busy(large)
        finish = await service.run_task("rich", {"prompt": "x"}, request_id="r").wait()
        for task in load:
            task.cancel("enough")
        await until_idle(large, within_s=5)
        usual = await service.run_task("rich", {"prompt": "x"}, request_id="s").wait()
    receipt = finish.receipt
    assert receipt.status == "done"
    assert [(n.node, n.status) for n in receipt.nodes] == [("context", "absent"), ("draft", "done")]
    assert receipt.nodes[1].llm is not None
    assert receipt.nodes[1].llm.model == "sim-fast"
    assert sum("brown-out" in note for note in receipt.notes) == 3
    assert [n.node for n in usual.receipt.nodes] == ["context", *["draft"] * 3]
    assert not any("brown-out" in note for note in usual.receipt.notes)


def test_the_deployment_file_names_the_steps() -> None:
    args = {"brownout": [{"queued": 0.5, "skip_optional": True}, {"queued": 2, "max_rounds": 1}]}
    spec = validate(IngressArgs, args, "f").to_ingress()
    assert spec.brownout == (
        BrownoutStep(0.5, skip_optional=True),
        replace(BrownoutStep(2.0), max_rounds=1),
    )
    with pytest.raises(ConfigError, match="queued"):
        validate(IngressArgs, {"brownout": [{"max_rounds": 1}]}, "f")
