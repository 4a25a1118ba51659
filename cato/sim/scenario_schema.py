"""Schema of scenario files.

Each check is attached to its field, so that all problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from cato.config.fields import Duration, NonEmpty, StrictModel
from cato.core.words import did_you_mean
from cato.sim.scenario_runs import EVERY_TASK, SCHEDULERS
from cato.sim.seeds import parse_seeds
from cato.sim.task_schema import Found, Name, SlaPart, Span, TaskPart, raise_found

DEFAULT_SCHEDULER = "foresight"
DEFAULT_SEEDS = tuple(range(10))
DEFAULT_DURATION_S = 600.0
DEFAULT_MAX_REPLICAS = 64
MOST_REPLICAS = 1024
# Fewer say nothing about attainment; more take minutes and gigabytes.
LEAST_TASKS, MOST_TASKS = 20, 200_000


def _seeds(value: object) -> tuple[int, ...]:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("must be a number of seeds, or a range such as 100-129")
    return parse_seeds(str(value))


def _scheduler(name: str) -> str:
    if name not in SCHEDULERS:
        known = ", ".join(map(repr, SCHEDULERS))
        raise ValueError(f"must be one of {known}{did_you_mean(name, SCHEDULERS)}")
    return name


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
        raise_found(found)
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
