"""SLO-SA's Fig. 11 (A): several instances, each with its own mapper.

As in its other figures, queues, classes and latencies are those of the experiment `slo-sa`. The
paper draws ten requests and gives each instance a copy ("copies"): then only the randomness of the
annealing differs between instances, so its gain does not depend on their number. The other
assignments spread ten different requests per instance over the instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import fsum
from pathlib import Path
from random import Random
from types import MappingProxyType

from cato.core.decision import Route
from cato.core.ids import DeploymentName, NodeId, PoolName, ReplicaId, RunId, TaskName
from cato.core.profile import UNMEASURED
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaSnapshot
from cato.lab.experiments.slo_sa_figures import (
    ARMS,
    DRAWS,
    FCFS,
    WORKLOAD,
    figure_study,
    metrics_of,
)
from cato.lab.experiments.slo_sa_queues import a_queue
from cato.lab.study import Trial
from cato.policies.mapping.latency import SLO_SA_TABLE_2
from cato.policies.mapping.objective import Worth, worth
from cato.policies.mapping.problem import MappingRequest
from cato.policies.mapping.registry import MAPPERS
from cato.policies.routing.remaining_memory import RemainingMemory
from cato.sim import plots
from cato.sim.experiment import Options
from cato.sim.report import Report

INSTANCES = (1, 2, 3, 4)
EACH = 10  # requests per instance
COPIES = "copies"


def _by_memory(requests: Sequence[MappingRequest], instances: int) -> list[int]:
    """Algorithm 2: each request in turn to the instance with the most memory left."""
    taken = [0] * instances
    chosen = []
    for r in requests:
        replicas = tuple(
            ReplicaSnapshot(
                ReplicaId(f"{i}"), DeploymentName("d"), UNMEASURED, 0, 64, 0, queued_tokens=tokens
            )
            for i, tokens in enumerate(taken)
        )
        tokens = r.prompt_tokens + round(r.expected_tokens)
        route = RemainingMemory().route(_invocation(r), PoolSnapshot(PoolName("p"), 0.0, replicas))
        assert isinstance(route, Route), "all instances are open"
        chosen.append(int(route.replica_id))
        taken[chosen[-1]] += tokens
    return chosen


def _invocation(r: MappingRequest) -> Invocation:
    name = str(r.id)
    tokens = round(r.expected_tokens)
    return Invocation(
        r.id, RunId(name), TaskName("t"), NodeId("n"), r.prompt_tokens, tokens, 0.0, 0.0
    )


def _in_turn(requests: Sequence[MappingRequest], instances: int) -> list[int]:
    return [i % instances for i in range(len(requests))]


ASSIGNMENTS: Mapping[str, Callable[[Sequence[MappingRequest], int], list[int]]] = MappingProxyType(
    {"remaining memory": _by_memory, "in turn": _in_turn}
)


def _queues(instances: int, assignment: str, at: str) -> list[Sequence[MappingRequest]]:
    """What waits at each instance; `at` is the seed of the draw."""
    if assignment == COPIES:
        return [a_queue(WORKLOAD, EACH, Random(f"{EACH} {at}")).true] * instances
    n = EACH * instances
    requests = a_queue(WORKLOAD, n, Random(f"{n} {at}")).true
    places = ASSIGNMENTS[assignment](requests, instances)
    return [
        [r for r, place in zip(requests, places, strict=True) if place == i]
        for i in range(instances)
    ]


def _assigned(
    instances: int, max_batch: int, assignment: str, arm: str, seed: int
) -> dict[str, float]:
    """G of all instances together; lengths are known exactly."""
    ours: list[Worth] = []
    fcfs: list[Worth] = []
    for draw in range(DRAWS):
        queues = _queues(instances, assignment, f"{seed} {draw}")
        for mapper, found in ((MAPPERS[arm], ours), (MAPPERS[FCFS], fcfs)):
            each = [
                worth(
                    mapper.map(q, SLO_SA_TABLE_2, max_batch, _seed(seed, draw, i)).batches,
                    q,
                    SLO_SA_TABLE_2,
                )
                for i, q in enumerate(queues)
            ]
            found.append(Worth(sum(w.met for w in each), fsum(w.latency_s for w in each)))
    return metrics_of(ours, fcfs, EACH * instances)


def _seed(seed: int, draw: int, instance: int) -> int:
    return (seed * DRAWS + draw) * max(INSTANCES) + instance


def _instances(options: Options) -> list[Trial]:
    return [
        Trial(
            {"instances": count, "max_batch": cap, "assignment": assignment},
            partial(_assigned, count, cap, assignment),
        )
        for cap, count, assignment in product((1, 4), INSTANCES, (*ASSIGNMENTS, COPIES))
    ]


def _plot_instances(report: Report, folder: Path) -> list[Path]:
    fig, axes = plots.figure(2)
    for ax, cap in zip(axes, (1, 4), strict=True):
        means = [
            replace(m, policy=f"{m.policy}, {m.setting['assignment']}")
            for m in report.means
            if m.metric == "of_fcfs" and m.setting["max_batch"] == cap and m.policy != FCFS
        ]
        plots.lines(ax, means, "instances", "G over that of fcfs")
        ax.set_title(f"{EACH} requests an instance, batches of at most {cap}")
    plots.legend(fig)
    return [plots.save(fig, folder, report.experiment)]


STUDY = figure_study(
    11,
    "one to four instances: by remaining memory (Algorithm 2), in turn, or a copy of ten for each",
    ARMS,
    _instances,
    _plot_instances,
)
