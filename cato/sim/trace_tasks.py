"""Tasks of the Azure coding trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.slo import SloMetric
from cato.sim.tasks import SimNode, SimTask
from cato.sim.traces import TraceRow


def trace_tasks(
    rows: Sequence[TraceRow],
    known: Mapping[str, LengthBelief],
    pool: PoolName,
    seed: int,
    speed: float = 1.0,
) -> list[SimTask]:
    """Replay with the arrivals of the trace, `speed` times as fast.

    Classes by output length, as an editor's request would announce it: at most 20 tokens TTFT
    1 s; 21-100 tokens E2E 5 s; more, E2E 20 s. `known`: lengths of each class in earlier rows.
    """
    rng = np.random.default_rng([seed, 8])
    start_s = rows[0].arrived_at_s
    tasks = []
    for i, row in enumerate(rows):
        name, metric, target_s = trace_class(row.output_tokens)
        length = known[name]
        node = SimNode(
            pool, row.prompt_tokens, max(1, row.output_tokens), round(length.mean), length
        )
        tasks.append(
            SimTask(
                f"t{i:05d}",
                TaskName(name),
                (row.arrived_at_s - start_s) / speed,
                metric,
                target_s,
                (node,),
                (float(rng.random()),),
            )
        )
    return tasks


# Most output tokens of a class; its name, metric and target.
_CLASSES: tuple[tuple[float, tuple[str, SloMetric, float]], ...] = (
    (20, ("short", SloMetric.TTFT, 1.0)),
    (100, ("medium", SloMetric.E2E, 5.0)),
    (inf, ("long", SloMetric.E2E, 20.0)),
)


def trace_class(output_tokens: int) -> tuple[str, SloMetric, float]:
    """Name, metric and target of a request of the trace."""
    return next(found for most, found in _CLASSES if output_tokens <= most)


def trace_beliefs(rows: Sequence[TraceRow]) -> dict[str, LengthBelief]:
    """Length beliefs of each class, from earlier rows; those of all rows for a class that has none
    there."""
    by_class: dict[str, list[float]] = {name: [] for _, (name, _, _) in _CLASSES}
    for row in rows:
        name = trace_class(row.output_tokens)[0]
        by_class[name].append(float(max(1, row.output_tokens)))
    every = [x for values in by_class.values() for x in values]
    return {name: LengthBelief.of(values or every) for name, values in by_class.items()}
