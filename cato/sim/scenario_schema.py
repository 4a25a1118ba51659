"""Schema of scenario files.

Each check is attached to its field, so that all problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from cato.config.fields import Duration, NonEmpty, StrictModel, matching
from cato.config.problems import did_you_mean
from cato.core.errors import InputError
from cato.core.ids import NodeId, PoolName, TaskName
from cato.core.slo import Slo, SloMetric
from cato.core.workflow import LlmSettings, Node, NodeKind, Workflow
from cato.sim.scenario import EVERY_TASK, SCHEDULERS, ScenarioCall, Sla, TaskClass
from cato.sim.seeds import parse_seeds
from cato.sim.workflow_tasks import LlmWork, LocalWork, Work, WorkflowClass
from cato.sim.workloads import SPREAD
from cato.workflows.graph import cycles, topological_order
from cato.workflows.load import check_inputs

DEFAULT_SCHEDULER = "foresight"
DEFAULT_SEEDS = tuple(range(10))
DEFAULT_DURATION_S = 600.0
DEFAULT_MAX_REPLICAS = 64
MOST_REPLICAS = 1024
MAX_DURATION_S = 24 * 3600.0
# Fewer say nothing about attainment; more take minutes and gigabytes.
LEAST_TASKS, MOST_TASKS = 20, 200_000

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


def _seeds(value: object) -> tuple[int, ...]:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("must be a number of seeds, or a range such as 100-129")
    return parse_seeds(str(value))


def _scheduler(name: str) -> str:
    if name not in SCHEDULERS:
        known = ", ".join(map(repr, SCHEDULERS))
        raise ValueError(f"must be one of {known}{did_you_mean(name, SCHEDULERS)}")
    return name


Span = Annotated[Duration, AfterValidator(_short)]
Tokens = Annotated[float, Field(ge=1, le=1_000_000)]
Found = list[tuple[tuple[str | int, ...], object, str]]
"""Problems as (where, value, rule)."""


def _raise(found: Found) -> None:
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


class PoolPart(StrictModel):
    """Equal replicas of one model. `profile`: a name of `profiles/`, a path, or a constant."""

    profile: NonEmpty
    replicas: int = Field(default=1, ge=1, le=MOST_REPLICAS)
    max_replicas: int = Field(default=DEFAULT_MAX_REPLICAS, ge=1, le=MOST_REPLICAS)
    max_running: int | None = Field(default=None, ge=1, le=4096)
    chunk_tokens: int | None = Field(default=None, ge=1)
    cold_start: Duration = 0.0

    @field_validator("max_replicas")
    @classmethod
    def _holds_the_replicas(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("replicas", value):
            raise ValueError(f"must be at least replicas ({info.data['replicas']})")
        return value


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
        _raise(found)
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
        _raise(found)
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
                ScenarioCall(
                    PoolName(c.pool),
                    c.prompt_tokens,
                    c.output_tokens,
                    c.spread,
                    tuple(sorted(place[n] for n in c.needs)),
                    c.before,
                    c.chance,
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


class TraceClassPart(StrictModel):
    """Requests with at most `up_to_tokens` of output that no earlier class takes."""

    up_to_tokens: int | None = Field(default=None, ge=1)
    sla: SlaPart


def default_classes() -> dict[str, TraceClassPart]:
    """The classes of the replay of Azure's coding trace (algorithms of CATO, target 8)."""

    def part(up_to: int | None, metric: Literal["ttft", "e2e"], target: str) -> TraceClassPart:
        sla = SlaPart.model_validate({"metric": metric, "target": target})
        return TraceClassPart(up_to_tokens=up_to, sla=sla)

    return {
        "short": part(20, "ttft", "1s"),
        "medium": part(100, "e2e", "5s"),
        "long": part(None, "e2e", "20s"),
    }


class TrafficPart(StrictModel):
    """Tasks drawn at a rate, or a trace replayed on one pool."""

    rate_per_s: float | None = Field(default=None, gt=0, le=100_000)
    arrivals: Literal["poisson", "gamma", "burst"] = "poisson"
    tasks: dict[Name, TaskPart] = Field(default_factory=dict)
    trace: NonEmpty | None = None
    pool: str | None = None
    speed: float = Field(default=1.0, gt=0, le=1000)
    classes: dict[Name, TraceClassPart] = Field(default_factory=default_classes, min_length=1)

    @field_validator("tasks", "classes")
    @classmethod
    def _no_reserved_name(cls, value: dict[str, object]) -> dict[str, object]:
        if EVERY_TASK in value:
            raise ValueError(f"{EVERY_TASK!r} stands for all tasks in reports; choose another name")
        return value

    @field_validator("classes")
    @classmethod
    def _classes_ascend(cls, value: dict[str, TraceClassPart]) -> dict[str, TraceClassPart]:
        bounds = [c.up_to_tokens or inf for c in value.values()]
        if bounds != sorted(set(bounds)) or bounds[-1] != inf:
            raise ValueError("up_to_tokens must ascend; the last class has none and takes the rest")
        return value


class ScenarioFile(StrictModel):
    """A scenario file; `pools` come before `traffic`, which names them."""

    name: Name
    scheduler: Annotated[str, AfterValidator(_scheduler)] = DEFAULT_SCHEDULER
    seeds: Annotated[tuple[int, ...], BeforeValidator(_seeds)] = DEFAULT_SEEDS
    duration: Span = DEFAULT_DURATION_S
    pools: dict[Name, PoolPart] = Field(min_length=1, max_length=16)
    traffic: TrafficPart

    @field_validator("traffic")
    @classmethod
    def _traffic_fits(cls, traffic: TrafficPart, info: ValidationInfo) -> TrafficPart:
        found: Found = []
        pools = info.data.get("pools")
        if traffic.trace is not None:
            for key in ("rate_per_s", "tasks", "arrivals"):
                if key in traffic.model_fields_set:
                    found.append(((key,), "", "a trace brings its own: leave it out"))
            if traffic.pool is None:
                found.append((("pool",), "", "a trace needs the pool that serves it"))
            elif pools is not None and traffic.pool not in pools:
                found.append((("pool",), traffic.pool, _unknown_pool(traffic.pool, pools)))
        else:
            for key in ("pool", "speed", "classes"):
                if key in traffic.model_fields_set:
                    found.append(((key,), "", "goes with `trace`"))
            found += _drawn_problems(traffic, pools, info.data.get("duration"))
        _raise(found)
        return traffic


def _drawn_problems(
    traffic: TrafficPart, pools: Mapping[str, object] | None, duration_s: float | None
) -> Found:
    found: Found = []
    if not traffic.tasks:
        found.append((("tasks",), "", "at least one class of tasks, or `trace`, is required"))
    if traffic.rate_per_s is None:
        found.append((("rate_per_s",), "", "this key is required without a trace"))
    elif duration_s is not None:
        tasks = traffic.rate_per_s * duration_s
        if not LEAST_TASKS <= tasks <= MOST_TASKS:
            rule = (
                f"about {tasks:,.0f} tasks in {duration_s:g} s; change it or `duration` so that "
                f"there are {LEAST_TASKS} to {MOST_TASKS:,}"
            )
            found.append((("rate_per_s",), traffic.rate_per_s, rule))
    for name, task in traffic.tasks.items():
        for call_name, call in task.calls.items():
            if pools is not None and call.pool not in pools:
                at = ("tasks", name, "calls", call_name, "pool")
                found.append((at, call.pool, _unknown_pool(call.pool, pools)))
        for node, part in task.nodes.items():
            if pools is not None and part.pool and part.pool not in pools:
                at = ("tasks", name, "nodes", node, "pool")
                found.append((at, part.pool, _unknown_pool(part.pool, pools)))
    return found


def _unknown_pool(name: str, pools: Mapping[str, object]) -> str:
    return f"unknown pool{did_you_mean(name, pools) or '; known: ' + ', '.join(pools)}"
