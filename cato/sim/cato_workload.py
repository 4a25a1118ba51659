"""CATO's coding tasks: its classes of calls, their mean times, and tasks drawn from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cato.core.ids import TaskName
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.sim.drawn_calls import CallSpec, drawn_nodes, expected_s
from cato.sim.tasks import SimTask
from cato.sim.workloads import SEVEN_B, Arrivals, poisson

SMALL, LARGE = "small", "large"
# CATO's four coding tasks after its decomposition: retrieve, analyse, LLM, validate, second LLM.
# Lengths and durations of other nodes are assumed: round numbers of coding assistants.
CATO_CLASSES: Mapping[str, tuple[CallSpec, ...]] = {
    "completion": (CallSpec(SMALL, 400, 40, before_s=0.02),),
    "generation": (CallSpec(SMALL, 300, 150, before_s=0.05), CallSpec(LARGE, 500, 150, (0,), 0.01)),
    "translation": (
        CallSpec(LARGE, 400, 200, before_s=0.02),
        CallSpec(SMALL, 600, 120, (0,), 0.01),
    ),
    "summarization": (CallSpec(LARGE, 500, 60, before_s=0.03),),
}
# The paper's own calls: generation and translation first ask model A, then model B; completion and
# summarization ask A alone. Its text says that a completion has less than ten tokens, a summary 20
# to 30, a translation mostly 100 to 400. Everything else is assumed.
MODEL_A, MODEL_B = "model-a", "model-b"
CATO_PRINTED_CLASSES: Mapping[str, tuple[CallSpec, ...]] = {
    "completion": (CallSpec(MODEL_A, 400, 8, before_s=0.02),),
    "generation": (
        CallSpec(MODEL_A, 300, 100, before_s=0.05),
        CallSpec(MODEL_B, 500, 100, (0,), 0.01),
    ),
    "translation": (
        CallSpec(MODEL_A, 800, 200, before_s=0.02),
        CallSpec(MODEL_B, 1000, 200, (0,), 0.01),
    ),
    "summarization": (CallSpec(MODEL_A, 800, 25, before_s=0.03),),
}
# Dynamic ones: a loop of refinement, and a fan-out.
CATO_DYNAMIC: Mapping[str, tuple[CallSpec, ...]] = {
    "refinement": (
        CallSpec(SMALL, 300, 150, before_s=0.05),
        CallSpec(LARGE, 500, 120, (0,), 0.01, chance=0.6),
        CallSpec(SMALL, 500, 120, (1,), 0.01, chance=0.4),
        CallSpec(LARGE, 500, 120, (2,), 0.01, chance=0.3),
    ),
    "review": (
        CallSpec(SMALL, 400, 80, before_s=0.05),
        CallSpec(LARGE, 400, 100, (0,)),
        CallSpec(LARGE, 400, 100, (0,), chance=0.7),
        CallSpec(SMALL, 400, 100, (0,), chance=0.5),
        CallSpec(SMALL, 600, 120, (1, 2, 3), 0.01),
    ),
}
CATO_TARGET_FACTOR = 1.5


def mean_s(calls: Sequence[CallSpec], profile: Profile, metric: SloMetric = SloMetric.E2E) -> float:
    """Mean time of a class on idle replicas up to the event of `metric`: its critical path,
    weighted by the calls' probabilities.
    """
    own, after = expected_s(calls, lambda _: profile, metric)
    return max(o + a for o, a in zip(own, after, strict=True))


def load_per_task_s(
    shares: Mapping[str, float], classes: Mapping[str, Sequence[CallSpec]], profile: Profile
) -> dict[str, float]:
    """Expected busy seconds of one task on each pool, one call at a time."""
    load: dict[str, float] = {}
    for name, share in shares.items():
        for call in classes[name]:
            busy_s = call.service_s(profile) * call.chance
            load[call.pool] = load.get(call.pool, 0.0) + share * busy_s
    return load


def cato_tasks(
    shares: Mapping[str, float],
    rate_per_s: float,
    n: int,
    seed: int,
    *,
    profile: Profile = SEVEN_B,
    classes: Mapping[str, Sequence[CallSpec]] = CATO_CLASSES,
    arrivals: Arrivals = poisson,
    target_factor: float = CATO_TARGET_FACTOR,
    stretch: float = 1.0,
    judged: Mapping[str, SloMetric] | None = None,
) -> list[SimTask]:
    """`n` tasks of `classes`; targets are `target_factor` × the mean of the class.

    `stretch`: slowdown of a call in a normal batch, relative to alone. `judged`: the metric
    of each class (None: E2E of all).
    """
    rng = np.random.default_rng([seed, 1, round(rate_per_s * 1000)])
    times = arrivals(rng, rate_per_s, n)
    names = list(shares)
    chosen = rng.choice(names, n, p=[shares[k] for k in names])
    metrics = dict.fromkeys(names, SloMetric.E2E) if judged is None else judged
    after = {
        k: [s * stretch for s in expected_s(classes[k], lambda _: profile, metrics[k])[1]]
        for k in names
    }
    target_s = {k: target_factor * stretch * mean_s(classes[k], profile, metrics[k]) for k in names}
    tasks = []
    for i in range(n):
        name = str(chosen[i])
        happens = [rng.random() < c.chance for c in classes[name]]
        nodes = drawn_nodes(classes[name], happens, after[name], rng)
        tasks.append(
            SimTask(
                f"t{i:05d}",
                TaskName(name),
                times[i],
                metrics[name],
                target_s[name],
                nodes,
                tuple(float(d) for d in rng.random(len(nodes))),
            )
        )
    return tasks
