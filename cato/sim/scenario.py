"""Scenarios: a user's own fleet and traffic. Files are read in `cato.sim.scenario_file`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from cato.core.ids import PoolName, TaskName
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.sim.drawn_calls import CallSpec
from cato.sim.traces import TraceRow
from cato.sim.workflow_tasks import WorkflowClass


@dataclass(frozen=True, slots=True)
class ScenarioPool:
    """A pool of equal replicas. `cold_start_s`: from the start of the run until they accept work;
    `max_replicas`: the largest number that a plan may use. `max_running` None: the profile's.
    """

    name: PoolName
    profile: Profile
    replicas: int
    max_replicas: int
    max_running: int | None = None
    chunk_tokens: int | None = None
    cold_start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sla:
    """`target_s` for TTFT or E2E, and a pace required of the last call's stream (inf: none)."""

    metric: SloMetric
    target_s: float
    tpot_target_s: float = inf


@dataclass(frozen=True, slots=True)
class TaskClass:
    """A class with `share` parts of all tasks; calls in topological order, the last is streamed."""

    name: TaskName
    share: float
    sla: Sla
    calls: tuple[CallSpec, ...]


@dataclass(frozen=True, slots=True)
class DrawnTraffic:
    """Tasks drawn from classes; `arrivals` is a name in `cato.sim.workloads.ARRIVALS`."""

    rate_per_s: float
    arrivals: str
    duration_s: float
    classes: tuple[TaskClass | WorkflowClass, ...]


@dataclass(frozen=True, slots=True)
class TraceClass:
    """Trace requests with at most `up_to_tokens` of output that no smaller class takes."""

    name: TaskName
    up_to_tokens: float
    sla: Sla


@dataclass(frozen=True, slots=True)
class TraceTraffic:
    """A recorded trace on one pool, replayed `speed` times as fast.

    The first half gives the length beliefs of each class and the second half is replayed, so that
    no policy knows an answer before it is given. `duration_s` ends the replay earlier.
    """

    rows: tuple[TraceRow, ...]
    pool: PoolName
    speed: float
    duration_s: float
    classes: tuple[TraceClass, ...]  # ascending; the last one takes all


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet, its traffic and its scheduler."""

    name: str
    scheduler: str
    seeds: tuple[int, ...]
    pools: tuple[ScenarioPool, ...]
    traffic: DrawnTraffic | TraceTraffic

    def with_replicas(self, counts: Mapping[PoolName, int]) -> Scenario:
        return replace(self, pools=tuple(replace(p, replicas=counts[p.name]) for p in self.pools))
