"""The tasks of a scenario: drawn from its classes, or replayed from a trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cato.core.ids import PoolName
from cato.core.length import LengthBelief
from cato.sim.drawn_calls import drawn_nodes, expected_s
from cato.sim.scenario import DrawnTraffic, Scenario, TaskClass, TraceClass, TraceTraffic
from cato.sim.tasks import SimNode, SimTask
from cato.sim.traces import TraceRow
from cato.sim.workflow_tasks import WorkflowClass, drawn_task
from cato.sim.workloads import ARRIVALS

_SEED_STREAM = 9  # distinct from the streams of `cato.sim.workloads`


def tasks_of(scenario: Scenario, seed: int) -> list[SimTask]:
    """The tasks of one seed; they do not depend on the numbers of replicas or the scheduler."""
    rng = np.random.default_rng([seed, _SEED_STREAM])
    traffic = scenario.traffic
    if isinstance(traffic, TraceTraffic):
        return _replayed(traffic, rng)
    profiles = {p.name: p.profile for p in scenario.pools}
    calls = (c for c in traffic.classes if isinstance(c, TaskClass))
    after_s = {
        c.name: expected_s(c.calls, lambda call: profiles[PoolName(call.pool)], c.sla.metric)[1]
        for c in calls
    }
    shares = np.array([c.share for c in traffic.classes])
    times = _times(traffic, seed)
    chosen = rng.choice(len(traffic.classes), len(times), p=shares / shares.sum())
    tasks: list[SimTask] = []
    for i, (at_s, k) in enumerate(zip(times, chosen, strict=True)):
        id, kind = f"t{i:06d}", traffic.classes[k]
        if isinstance(kind, WorkflowClass):
            tasks.append(drawn_task(id, kind, at_s, rng))
        else:
            tasks.append(_drawn(id, kind, at_s, after_s[kind.name], rng))
    return tasks


def _times(traffic: DrawnTraffic, seed: int) -> list[float]:
    """Arrivals up to the end; redrawn with twice as many when they do not reach it."""
    n = int(traffic.rate_per_s * traffic.duration_s * 1.2) + 30
    while True:
        rng = np.random.default_rng([seed, _SEED_STREAM, 1])
        times = ARRIVALS[traffic.arrivals](rng, traffic.rate_per_s, n)
        if times[-1] >= traffic.duration_s:
            return [t for t in times if t < traffic.duration_s]
        n *= 2


def _drawn(
    id: str, kind: TaskClass, at_s: float, after_s: Sequence[float], rng: np.random.Generator
) -> SimTask:
    happens = (rng.random() < call.chance for call in kind.calls)
    nodes, sla = drawn_nodes(kind.calls, happens, after_s, rng), kind.sla
    draws = tuple(float(d) for d in rng.random(len(nodes)))
    return SimTask(id, kind.name, at_s, sla.metric, sla.target_s, nodes, draws, sla.tpot_target_s)


def _replayed(traffic: TraceTraffic, rng: np.random.Generator) -> list[SimTask]:
    half = len(traffic.rows) // 2
    learned, rows = traffic.rows[:half], traffic.rows[half:]
    known = {
        c.name: LengthBelief.of(
            [float(r.output_tokens) for r in learned if _class_of(traffic, r) is c]
            or [float(r.output_tokens) for r in learned]
        )
        for c in traffic.classes
    }
    tasks = []
    for i, row in enumerate(rows):
        at_s = (row.arrived_at_s - rows[0].arrived_at_s) / traffic.speed
        if at_s >= traffic.duration_s:
            break
        kind = _class_of(traffic, row)
        length = known[kind.name]
        node = SimNode(
            traffic.pool,
            max(1, row.prompt_tokens),
            row.output_tokens,
            max(1, round(length.mean)),
            length,
        )
        sla = kind.sla
        tasks.append(
            SimTask(
                f"t{i:06d}",
                kind.name,
                at_s,
                sla.metric,
                sla.target_s,
                (node,),
                (float(rng.random()),),
                sla.tpot_target_s,
            )
        )
    return tasks


def _class_of(traffic: TraceTraffic, row: TraceRow) -> TraceClass:
    return next(c for c in traffic.classes if row.output_tokens <= c.up_to_tokens)
