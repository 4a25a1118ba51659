"""Simulated runs of workflow files as tasks: costs of their nodes, and the draws made beforehand.

A run itself draws nothing, so that policies are compared with the same lengths and checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from cato.core.budgets import NodeEstimate
from cato.core.ids import NodeId, PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.receipt import NodeReceipt, SlaReceipt
from cato.core.runs import FinishRun
from cato.core.slo import Slo
from cato.core.workflow import (
    AnalyzeSettings,
    LlmSettings,
    Node,
    RetrieveSettings,
    TransformSettings,
    ValidateSettings,
    Workflow,
)
from cato.estimators.stages import PastRuns
from cato.sim.tasks import Outcome, SimNode, SimTask
from cato.sim.workloads import SPREAD, belief, lengths

TEXT = "pass\n"
"""Output text of every LLM node: nothing in the simulation depends on it."""


@dataclass(frozen=True, slots=True)
class LlmWork:
    """An LLM node: mean tokens of an execution, and the deviation of their logarithms."""

    pool: PoolName
    prompt_tokens: float
    output_tokens: float
    spread: float = SPREAD


@dataclass(frozen=True, slots=True)
class LocalWork:
    """Any other node: its duration and its result.

    `passes`: probability that a check is ok; `chunks`: of an analysis; `value`: of a
    transformation (None: its text).
    """

    takes_s: float = 0.0
    passes: float = 1.0
    chunks: int = 1
    value: object = None


Work = LlmWork | LocalWork


@dataclass(frozen=True, slots=True)
class WorkflowClass:
    """A class with `share` parts of all tasks: runs of `workflow`, with the cost of each node.

    `workflow.name` is the class's. `tpot_target_s` is a second objective, on the pace of the
    stream. `estimates` (baselines of the nodes) and `past` (stages of earlier runs) are given to
    each run.
    """

    share: float
    workflow: Workflow
    slo: Slo
    inputs: Mapping[str, object]
    work: Mapping[NodeId, Work]
    estimates: Mapping[NodeId, NodeEstimate]
    tpot_target_s: float = inf
    past: PastRuns = field(default=PastRuns(), compare=False)

    @property
    def name(self) -> TaskName:
        return self.workflow.name

    def next_share(self, executions: Sequence[NodeReceipt]) -> float | None:
        """The share of the remaining time that the next stage took in the most similar past run."""
        found = self.past.share(self.name, executions)
        return None if found is None else found.share


@dataclass(frozen=True, slots=True)
class Drawn:
    """Draws for one execution of a node, should it happen."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    draw: float = 0.0
    is_ok: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowTask(SimTask):
    """A run of `kind`. `drawn` covers every execution that a node may have: those of its first
    round, item by item, then those of the next.
    """

    kind: WorkflowClass
    drawn: Mapping[NodeId, Sequence[Drawn]]

    def execution(self, node: Node, round: int, item: int | None) -> Drawn:
        return self.drawn[node.id][(round - 1) * node.max_items + (item or 0)]


@dataclass(slots=True)
class WorkflowOutcome(Outcome):
    """Outcome of a run; `served` are its completed calls."""

    served: list[SimNode] = field(default_factory=list)
    streamed_tokens: int = 1
    finish: FinishRun | None = None

    @property
    def receipt(self) -> SlaReceipt | None:
        """The receipt of a run that has ended, well or not."""
        return None if self.finish is None else self.finish.receipt

    @property
    def calls(self) -> Sequence[SimNode]:
        return self.served

    @property
    def answer_tokens(self) -> int:
        return self.streamed_tokens


def drawn_task(id: str, kind: WorkflowClass, at_s: float, rng: np.random.Generator) -> WorkflowTask:
    """A run of `kind` that arrives at `at_s`, with all its draws."""
    workflow = kind.workflow
    return WorkflowTask(
        id,
        kind.name,
        at_s,
        kind.slo.metric,
        kind.slo.target_s,
        (),
        (),
        kind.tpot_target_s,
        kind=kind,
        drawn={
            n.id: _executions(kind.work[n.id], most_rounds(workflow, n) * n.max_items, rng)
            for n in workflow.nodes
        },
    )


def _executions(work: Work, n: int, rng: np.random.Generator) -> tuple[Drawn, ...]:
    if isinstance(work, LocalWork):
        return tuple(Drawn(is_ok=bool(x < work.passes)) for x in rng.random(n))
    prompts = lengths(rng, work.prompt_tokens, n, work.spread).tolist()
    outputs = lengths(rng, work.output_tokens, n, work.spread).tolist()
    draws = rng.random(n).tolist()
    return tuple(Drawn(p, o, d) for p, o, d in zip(prompts, outputs, draws, strict=True))


def most_rounds(workflow: Workflow, node: Node) -> int:
    """Maximum rounds of `node`: those of its own loop, or one plus the rounds that redo it."""
    if node.repeat is not None:
        return node.repeat.max_rounds
    loops = (n.repeat for n in workflow.nodes if n.repeat is not None)
    return 1 + sum(r.max_rounds for r in loops if node.id in r.redo)


def known_length(work: LlmWork, max_tokens: int) -> LengthBelief:
    """Length belief of an answer that ends at `max_tokens` at the latest."""
    known = belief(work.output_tokens, work.spread)
    if known.points[-1] <= max_tokens:
        return known
    return LengthBelief(tuple(min(p, float(max_tokens)) for p in known.points))


def local_result(node: Node, work: LocalWork, is_ok: bool) -> Mapping[str, object]:
    """The result of a live node of that kind, as far as a workflow can refer to it."""
    match node.settings:
        case ValidateSettings():
            error = {"line": 1, "column": 1, "message": "invalid syntax"}
            return {"ok": is_ok, "errors": [] if is_ok else [error], "code": TEXT, "checked": True}
        case AnalyzeSettings():
            return {
                "ok": True,
                "language": "python",
                "definitions": [],
                "imports": [],
                "scope": [],
                "chunks": [TEXT] * work.chunks,
                "identifiers": [],
            }
        case RetrieveSettings(top_k=top_k):
            snippet = {"path": "example.py", "start_line": 1, "text": TEXT, "score": 1.0}
            return {"snippets": [snippet] * top_k}
        case TransformSettings():
            return {"text": TEXT, "value": TEXT if work.value is None else work.value}
        case _:
            raise AssertionError(f"{node.id} calls a model")


def llm_settings(node: Node) -> LlmSettings:
    """Settings of a file's LLM node, which never passes a request through unchanged."""
    assert isinstance(node.settings, LlmSettings), f"{node.id} is not an LLM node"
    return node.settings
