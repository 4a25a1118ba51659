"""SLO-SA's requests: classes, queues that wait at one engine, and calls that arrive over time.

Mappers know the lengths exactly, as the mean of the request's class, or as a draw from the class's
Gaussian.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt
from random import Random

from cato.core.ids import InvocationId, PoolName, TaskName
from cato.core.slo import Slo, SloMetric
from cato.policies.mapping.problem import MappingRequest
from cato.sim.tasks import SimNode, SimTask
from cato.sim.workloads import belief

EXACT, CLASS_MEAN, GAUSSIAN = "exact", "class-mean", "gaussian"
LENGTHS = (EXACT, CLASS_MEAN, GAUSSIAN)


@dataclass(frozen=True, slots=True)
class RequestClass:
    """A kind of request: mean lengths and targets. Lengths are log-normal around the means."""

    name: str
    prompt_tokens: float
    output_tokens: float
    slos: tuple[Slo, ...]


# Coefficient of variation of both lengths within a class; real classes have 0.5 to 1.
SPREAD = 0.7

WORKLOADS: Mapping[str, tuple[RequestClass, ...]] = {
    # Half chat, half code, as in the paper: pace targets for chat, E2E for code.
    "chat-code": (
        RequestClass("chat", 160, 340, (Slo(SloMetric.TTFT, 10.0), Slo(SloMetric.TPOT, 0.05))),
        RequestClass("code", 60, 300, (Slo(SloMetric.E2E, 30.0),)),
    ),
    # The four tasks of SABER (its Table I) in equal shares: class means differ tenfold.
    "coding": (
        RequestClass("qna", 186, 43, (Slo(SloMetric.E2E, 1.0),)),
        RequestClass("generation", 463, 387, (Slo(SloMetric.E2E, 8.0),)),
        RequestClass("summary", 31, 30, (Slo(SloMetric.E2E, 1.0),)),
        RequestClass("translation", 670, 617, (Slo(SloMetric.E2E, 12.0),)),
    ),
}


@dataclass(frozen=True, slots=True)
class Queue:
    """The same waiting requests with their true lengths and with those given to a mapper."""

    true: tuple[MappingRequest, ...]
    told: Mapping[str, tuple[MappingRequest, ...]]


def a_queue(workload: str, n: int, random: Random) -> Queue:
    """`n` requests that all arrived just now, of uniformly drawn classes."""
    true: list[MappingRequest] = []
    by_mean: list[MappingRequest] = []
    by_draw: list[MappingRequest] = []
    for i in range(n):
        kind = random.choice(WORKLOADS[workload])
        request = MappingRequest(
            InvocationId(f"{i:03d}-{kind.name}"),
            _length(kind.prompt_tokens, random),
            _length(kind.output_tokens, random),
            kind.slos,
        )
        drawn = max(1.0, random.gauss(kind.output_tokens, SPREAD * kind.output_tokens))
        true.append(request)
        by_mean.append(replace(request, expected_tokens=kind.output_tokens))
        by_draw.append(replace(request, expected_tokens=drawn))
    return Queue(
        tuple(true), {EXACT: tuple(true), CLASS_MEAN: tuple(by_mean), GAUSSIAN: tuple(by_draw)}
    )


def arriving(workload: str, times: Sequence[float], seed: int, pool: PoolName) -> list[SimTask]:
    """Calls of a workload that arrive at `times`; policies know the class's lengths."""
    random = Random(f"{workload} {seed}")
    tasks: list[SimTask] = []
    for i, arrived_at_s in enumerate(times):
        kind = random.choice(WORKLOADS[workload])
        paces_s = [s.target_s for s in kind.slos if s.metric is SloMetric.TPOT]
        (slo,) = (s for s in kind.slos if s.metric is not SloMetric.TPOT)
        known = belief(kind.output_tokens, SPREAD)
        node = SimNode(
            pool,
            _length(kind.prompt_tokens, random),
            _length(kind.output_tokens, random),
            round(known.mean),
            known,
        )
        tasks.append(
            SimTask(
                f"t{i:05d}",
                TaskName(kind.name),
                arrived_at_s,
                slo.metric,
                slo.target_s,
                (node,),
                (random.random(),),
                min(paces_s, default=inf),
            )
        )
    return tasks


def _length(mean: float, random: Random) -> int:
    sigma = sqrt(log(1 + SPREAD**2))
    return max(1, round(mean * exp(random.gauss(-(sigma**2) / 2, sigma))))
