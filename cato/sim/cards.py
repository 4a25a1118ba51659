"""Shared pool experiment: `run` serves given arrivals on a fleet with four accelerators."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cato.core.eviction import Card, CardId, CardPolicies, HostMemory, ModelFacts
from cato.core.ids import DeploymentName, HostId, InvocationId, PoolName
from cato.core.policies import Policies
from cato.core.pool.placement import Placement
from cato.core.pool.placement_events import CardAdded, ClockTold, HostMemorySized, Load, Served
from cato.core.shared import Looked, ModelAdded, SharedEvent, SharedOrchestrator
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.routing.least_wait import LeastWait
from cato.sim.card_workload import PROFILES, SLO_S, CardArrival, CardTask, models
from cato.sim.fleet import Fleet
from cato.sim.shared_pool import SharedSetup
from cato.sim.tasks import Outcome, task_metrics

# 5 January 1970.
MONDAY_S = 4 * 86_400.0
LOOK_S = 60.0
CARDS = 4
POOL = PoolName("cards")
# vLLM's token budget of a step on small GPUs: prompts are chunked beside decoding.
CHUNK_TOKENS = 2048
# Calls of one model are served by arrival, on its replica with the least work.
BY_ARRIVAL = Policies(LeastWait(), FirstComeFirstServed())

OF_CARDS = ("utilization", "hit_rate", "evictions", "loads", "prefetches", "load_s")
NAMES = (*task_metrics(()), *OF_CARDS)
"""What `FleetRun.metrics` measures."""

# Half the memory of a host with 256 GB: all but one of the 16 models (130 GB) fit.
HOST_WEIGHTS_BYTES = 128_000_000_000


@dataclass(frozen=True, slots=True)
class CardShape:
    """`count` accelerators of one kind, with their times relative to those of the profiles.

    `slowdown` of calls, `load_slowdown` of loads. A model with more than `memory_bytes` of weights
    does not fit (0: all fit).
    """

    name: DeploymentName
    count: int
    slowdown: float = 1.0
    load_slowdown: float = 1.0
    memory_bytes: int = 0


ALIKE = (CardShape(DeploymentName("cards"), CARDS),)


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of an arrival; all times are on the same virtual clock."""

    arrival: CardArrival
    is_hit: bool
    served_at_s: float
    first_token_at_s: float
    finished_at_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_token_at_s - self.arrival.wanted.arrived_at_s

    @property
    def e2e_s(self) -> float:
        return self.finished_at_s - self.arrival.wanted.arrived_at_s

    def outcome(self) -> Outcome:
        """As a task, with both of its targets."""
        queue_s = self.served_at_s - self.arrival.wanted.arrived_at_s
        task = self.arrival.task()
        return _CardOutcome(task, self.first_token_at_s, self.finished_at_s, queue_s)


class _CardOutcome(Outcome):
    """Met when both the first token and the whole answer were in time."""

    __slots__ = ()

    @property
    def is_met(self) -> bool:
        return self.ttft_s <= SLO_S[self.task.name] and self.e2e_s <= self.task.target_s


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A whole run: the calls served, the loads, and the events that replay it.

    `utilization`: fraction of accelerator time, up to the last answer, spent serving.
    """

    served: tuple[Answered, ...]
    loads: tuple[Load, ...]
    load_s: float
    utilization: float
    events: tuple[SharedEvent, ...]

    def metrics(self) -> dict[str, float]:
        """`task_metrics`, plus the accelerators' seconds, counts and fractions.

        Attainment and goodput require both SLOs; gain and `cv_completion_over_sla` use E2E.
        `loads` and `load_s` include prefetches, aborted ones too. The first load of a model onto an
        empty accelerator evicts nothing.
        """
        of_cards = (
            self.utilization,
            float(np.mean([s.is_hit for s in self.served])),
            float(sum(len(x.evicted) for x in self.loads)),
            float(len(self.loads)),
            float(sum(x.is_prefetch for x in self.loads)),
            self.load_s,
        )
        of_tasks = task_metrics([s.outcome() for s in self.served])
        return of_tasks | dict(zip(OF_CARDS, of_cards, strict=True))


def opened_pool(
    policies: CardPolicies,
    host_weights_bytes: int = 0,
    shapes: Sequence[CardShape] = ALIKE,
    scale_s: float = 1.0,
    unit_s: float = 1.0,
) -> tuple[SharedOrchestrator, tuple[SharedEvent, ...]]:
    """A shared pool of one host with empty accelerators, and the events it was told so far.
    Loads and SLOs are scaled by `scale_s`; for `unit_s` see `Placement`."""
    orchestrator = SharedOrchestrator(lambda tell: Placement(policies, tell, unit_s))
    host = HostId("host-1")
    kinds = [shape.name for shape in shapes for _ in range(shape.count)]
    cards = [Card(CardId(f"card-{i}"), host, kind) for i, kind in enumerate(kinds, start=1)]
    events: list[SharedEvent] = [
        HostMemorySized(0.0, HostMemory(host, host_weights_bytes)),
        *(CardAdded(0.0, card) for card in cards),
    ]
    for m in models():
        fitting = [x for x in shapes if not x.memory_bytes or m.weights_bytes <= x.memory_bytes]
        served = tuple(_served(m, shape, scale_s) for shape in fitting)
        events.append(ModelAdded(0.0, PoolName(m.name), served, BY_ARRIVAL))
    for event in events:
        assert not any(isinstance(s, Load) for s in orchestrator.handle(event))
    return orchestrator, tuple(events)


def _served(model: ModelFacts, shape: CardShape, scale_s: float) -> Served:
    profile = PROFILES[model.name.rsplit("-", 1)[1]].slowed(shape.slowdown)
    load_scale = scale_s * shape.load_slowdown
    facts = replace(
        model,
        load_s=model.load_s * load_scale,
        reload_s=model.reload_s * load_scale,
        slo_s=model.slo_s * scale_s,
        call_s=profile.typical_call_s,
    )
    return Served(facts, profile, shape.name)


def run(
    arrivals: Sequence[CardArrival],
    policies: CardPolicies,
    host_weights_bytes: int = 0,
    shapes: Sequence[CardShape] = ALIKE,
    midnight_s: float | None = None,
) -> FleetRun:
    """Serve `arrivals` on one host with accelerators of `shapes`, all empty at first.

    With `midnight_s` the fleet is told that a Monday begins at that time, and looks every minute.

    The run continues until the last invocation has finished, so that no policy gains by starving
    some.
    """
    orchestrator, opened = opened_pool(policies, host_weights_bytes, shapes)
    left = len(arrivals)

    def ended(_: Outcome) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            fleet.kernel.stop()

    fleet = Fleet([SharedSetup(POOL, orchestrator, opened, CHUNK_TOKENS)], on_end=ended)
    pool = fleet.shared[POOL]
    if midnight_s is not None:
        end_s = max(a.wanted.arrived_at_s for a in arrivals)
        for at_s in np.arange(midnight_s, end_s, LOOK_S).tolist():
            clock = ClockTold(at_s, at_s - midnight_s + MONDAY_S)
            fleet.kernel.at(at_s, pool.handle, clock)
            fleet.kernel.at(at_s, pool.handle, Looked(at_s))
    outcomes = fleet.run([a.task() for a in arrivals])
    assert left == 0, "an invocation was lost"
    busy_s = sum(line.cost_s(fleet.kernel.now_s)[0] for line in pool.lines.values())
    end_s = max((o.ended_at_s for o in outcomes), default=0.0)
    return FleetRun(
        tuple(_answered(o, pool.hits) for o in outcomes),
        tuple(pool.loads),
        pool.load_s,
        busy_s / (sum(s.count for s in shapes) * end_s) if end_s > 0 else 0.0,
        tuple(pool.events),
    )


def _answered(outcome: Outcome, hits: Collection[InvocationId]) -> Answered:
    task = outcome.task
    assert isinstance(task, CardTask), f"{task.id} is not of this workload"
    served_at_s = task.arrived_at_s + outcome.queue_s
    is_hit = task.offered.id in hits
    return Answered(task.arrival, is_hit, served_at_s, outcome.first_token_at_s, outcome.ended_at_s)
