"""Schema of the classes of tasks in a scenario file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from cato.config.fields import Duration, NonEmpty, StrictModel, matching
from cato.core.errors import InputError
from cato.core.ids import NodeId, PoolName, TaskName
from cato.core.slo import Slo, SloMetric
from cato.core.words import did_you_mean
from cato.core.workflow import LlmSettings, Node, NodeKind, Workflow
from cato.sim.drawn_calls import CallSpec
from cato.sim.scenario import Sla, TaskClass
from cato.sim.workflow_tasks import LlmWork, LocalWork, Work, WorkflowClass
from cato.sim.workloads import SPREAD
from cato.workflows.graph import cycles, topological_order
from cato.workflows.load import check_inputs

MAX_DURATION_S = 24 * 3600.0

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
Name = Annotated[
    str,
    matching(
        _NAME,
        "a name has at most 63 letters, digits, '.', '_' and '-', "
        "and starts with a letter or digit",
    ),
]


def _short(seconds: float) -> float:
    if not 0 < seconds <= MAX_DURATION_S:
        raise ValueError("must be a duration of more than 0 and at most 24h")
    return seconds


Span = Annotated[Duration, AfterValidator(_short)]
Tokens = Annotated[float, Field(ge=1, le=1_000_000)]
Found = list[tuple[tuple[str | int, ...], object, str]]
"""Problems as (where, value, rule)."""


def raise_found(found: Found) -> None:
    """All of `found` as one pydantic error; no-op when there are none."""
    if found:
        raise ValidationError.from_exception_data(
            "scenario",
            [
                InitErrorDetails(
                    type=PydanticCustomError("cato_rule", "{rule}", {"rule": rule}),
                    loc=loc,
                    input=value,
                )
                for loc, value, rule in found
            ],
        )


class SlaPart(StrictModel):
    """What a task may count on; `tpot`: the pace of its stream, beside `metric`."""

    metric: Literal["ttft", "e2e"]
    target: Span
    tpot: Span | None = None

    def to_sla(self) -> Sla:
        return Sla(SloMetric(self.metric), self.target, inf if self.tpot is None else self.tpot)


class CallPart(StrictModel):
    """One LLM call. `spread`: deviation of the logarithm of both lengths (0: always the mean)."""

    pool: str
    prompt_tokens: Tokens
    output_tokens: Tokens
    spread: float = Field(default=SPREAD, ge=0, le=3)
    needs: list[str] = Field(default_factory=list)
    before: Duration = 0.0
    chance: float = Field(default=1.0, gt=0, le=1)


class NodePart(StrictModel):
    """What a node of a workflow costs; which keys go with which kind of node is in `NODE_KEYS`."""

    pool: str = ""
    prompt_tokens: Tokens = 1
    output_tokens: Tokens = 1
    spread: float = Field(default=SPREAD, ge=0, le=3)
    takes: Duration = 0.0
    passes: float = Field(default=1.0, ge=0, le=1)
    chunks: int = Field(default=1, ge=0, le=1000)
    value: Any = None

    def to_work(self, kind: NodeKind) -> Work:
        if kind is NodeKind.LLM:
            pool = PoolName(self.pool)
            return LlmWork(pool, self.prompt_tokens, self.output_tokens, self.spread)
        return LocalWork(self.takes, self.passes, self.chunks, self.value)


_LLM_NEEDS = ("pool", "prompt_tokens", "output_tokens")
NODE_KEYS: Mapping[NodeKind, tuple[str, ...]] = {
    NodeKind.LLM: (*_LLM_NEEDS, "spread"),
    NodeKind.VALIDATE: ("takes", "passes"),
    NodeKind.ANALYZE: ("takes", "chunks"),
    NodeKind.RETRIEVE: ("takes",),
    NodeKind.TRANSFORM: ("takes", "value"),
}


class TaskPart(StrictModel):
    """A class of tasks: the share of all, what it may count on, and its calls; or a `workflow`
    file, whose SLA it has unless it names another, what its nodes cost and what it is given.
    """

    share: float = Field(default=1.0, gt=0)
    sla: SlaPart | None = None
    calls: dict[Name, CallPart] = Field(default_factory=dict, max_length=64)
    workflow: NonEmpty | None = None
    nodes: dict[str, NodePart] = Field(default_factory=dict)
    inputs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_calls_or_a_workflow(self) -> Self:
        found: Found = []
        if self.workflow is not None:
            if "calls" in self.model_fields_set:
                rule = "a workflow brings its own calls: leave it out, or leave out `workflow`"
                found.append((("calls",), "", rule))
        else:
            for key in ("nodes", "inputs"):
                if key in self.model_fields_set:
                    found.append(((key,), "", "goes with `workflow`"))
            if self.sla is None:
                found.append((("sla",), "", "this key is required without a workflow"))
            if not self.calls:
                found.append((("calls",), "", "at least one call, or `workflow`, is required"))
        raise_found(found)
        return self

    @field_validator("calls")
    @classmethod
    def _calls_are_a_dag(cls, calls: dict[str, CallPart]) -> dict[str, CallPart]:
        found: Found = []
        for name, call in calls.items():
            for i, need in enumerate(call.needs):
                if need not in calls:
                    rule = f"unknown call {need!r}{did_you_mean(need, calls)}"
                    found.append(((name, "needs", i), need, rule))
        for circle in cycles({n: c.needs for n, c in calls.items()}):
            rule = f"calls that wait for each other: {' -> '.join(circle)}"
            found.append(((circle[0], "needs"), calls[circle[0]].needs, rule))
        if calls and all(c.chance < 1 for c in calls.values()):
            found.append(((), calls, "at least one call must have a chance of 1"))
        raise_found(found)
        return calls

    def to_class(self, name: str) -> TaskClass:
        order = topological_order({n: c.needs for n, c in self.calls.items()})
        place = {call: i for i, call in enumerate(order)}
        calls = (self.calls[n] for n in order)
        assert self.sla is not None, "checked above"
        return TaskClass(
            TaskName(name),
            self.share,
            self.sla.to_sla(),
            tuple(
                CallSpec(
                    c.pool,
                    c.prompt_tokens,
                    c.output_tokens,
                    tuple(sorted(place[n] for n in c.needs)),
                    c.before,
                    c.chance,
                    c.spread,
                )
                for c in calls
            ),
        )

    def to_workflow_class(self, name: str, workflow: Workflow) -> WorkflowClass:
        """Without estimates; `with_estimates` adds them."""
        slo, tpot_target_s = workflow.slo, inf
        if self.sla is not None:
            sla = self.sla.to_sla()
            slo, tpot_target_s = Slo(sla.metric, sla.target_s), sla.tpot_target_s
        parts = {n.id: self.nodes.get(n.id, NodePart()) for n in workflow.nodes}
        return WorkflowClass(
            self.share,
            replace(workflow, name=TaskName(name)),
            slo,
            check_inputs(workflow, _with_samples(workflow, self.inputs)),
            {n.id: parts[n.id].to_work(n.kind) for n in workflow.nodes},
            {},
            tpot_target_s,
        )


_SAMPLES: Mapping[str, object] = {"str": "x", "int": 1, "float": 1.0, "bool": True, "list": []}


def _with_samples(workflow: Workflow, inputs: Mapping[str, object]) -> dict[str, object]:
    """`inputs`, plus sample values of the right type for required inputs that are missing."""
    samples = {i.name: _SAMPLES[i.type] for i in workflow.inputs if i.required}
    return {**samples, **inputs}


def workflow_problems(task: TaskPart, workflow: Workflow) -> Found:
    """Problems of `task` with its workflow."""
    found: Found = []
    nodes = {n.id: n for n in workflow.nodes}
    for name, part in task.nodes.items():
        node = nodes.get(NodeId(name))
        if node is None:
            hint = did_you_mean(name, nodes) or f"; it has {', '.join(nodes)}"
            found.append((("nodes", name), "", f"the workflow has no such node{hint}"))
        else:
            found += _part_problems(node, part)
    for node in workflow.nodes:
        if node.kind is NodeKind.LLM and node.id not in task.nodes:
            rule = f"say what this LLM node costs: {node.id}: {{{_keys(_LLM_NEEDS)}}}"
            found.append((("nodes", node.id), "", rule))
    if task.sla is not None and task.sla.target > workflow.hard_deadline_s:
        rule = f"runs of the workflow end after {workflow.hard_deadline_s:g} s (its sla.deadline)"
        found.append((("sla", "target"), f"{task.sla.target:g} s", rule))
    try:
        check_inputs(workflow, _with_samples(workflow, task.inputs))
    except InputError as exc:
        found.append((("inputs",), "", str(exc)))
    return found


def _part_problems(node: Node, part: NodePart) -> Found:
    found: Found = []
    allowed = NODE_KEYS[node.kind]
    for key in sorted(part.model_fields_set.difference(allowed)):
        rule = f"does not go with a node of type {node.kind}, which has {', '.join(allowed)}"
        found.append((("nodes", node.id, key), "", rule))
    if not isinstance(node.settings, LlmSettings):
        return found
    for key in _LLM_NEEDS:
        if key not in part.model_fields_set:
            found.append((("nodes", node.id, key), "", "this key is required for an LLM node"))
    most = node.settings.max_tokens
    if part.output_tokens > most:
        rule = f"the workflow allows at most {most} (max_tokens of the node)"
        found.append((("nodes", node.id, "output_tokens"), f"{part.output_tokens:g}", rule))
    return found


def _keys(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}: ..." for name in names)
