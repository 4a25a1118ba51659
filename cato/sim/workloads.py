"""What the workloads of experiments share: lengths, arrivals, reference engines; and SABER's tasks.

Output lengths are lognormal around the published means: the papers give means only. Policies know
each class from a separate sample, drawn with a seed that no experiment uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.profile import UNMEASURED, Profile
from cato.core.slo import SloMetric
from cato.sim.tasks import SimNode, SimTask

# Reference engine constants (ALGORITHMS.md). 7B on a 32 GB card:
SEVEN_B: Profile = replace(
    UNMEASURED, model="7b", prefill_per_batch_token_s=0.12e-3, prefill_base_s=25e-3
)
# SABER's model: a step of 7 ms + 0.35 ms·b, a prefill of 8 ms + 30 µs a token. KV cache is
# unlimited, as in the paper.
SABER_ENGINE: Profile = replace(
    UNMEASURED,
    model="saber",
    prefill_per_batch_token_s=30e-6,
    prefill_base_s=8e-3,
    decode_per_context_token_s=0.0,
    decode_per_request_s=0.35e-3,
    decode_base_s=7e-3,
    kv_capacity_tokens=1_000_000,
    max_running=100,
)

# SABER, Table I: mean tokens of prompt and output, SLA (end to end).
SABER_CLASSES: Mapping[str, tuple[int, int, float]] = {
    "qna": (186, 43, 1.0),
    "generation": (463, 387, 8.0),
    "summary": (31, 30, 1.0),
    "translation": (670, 617, 12.0),
}
SABER_SHARES: Mapping[str, Mapping[str, float]] = {
    "W1": {"qna": 0.1, "generation": 0.4, "summary": 0.1, "translation": 0.4},
    "W2": {"qna": 0.4, "generation": 0.1, "summary": 0.4, "translation": 0.1},
    "W3": {"qna": 0.25, "generation": 0.25, "summary": 0.25, "translation": 0.25},
}
SABER_RATES_PER_S = (*(float(r) for r in range(1, 11)), 15.0, 20.0)

# Deviation of the logarithm of a length (assumed; the Azure trace has 1.0 over all its requests).
SPREAD = 0.5
_BELIEF_SEED = 77_001
_BELIEF_SAMPLE = 4000


def lengths(
    rng: np.random.Generator, mean: float, n: int, spread: float = SPREAD
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """`n` lognormal lengths of at least one token whose mean is `mean`."""
    draws = rng.lognormal(math.log(mean) - spread**2 / 2, spread, n)
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]] = np.maximum(1, np.rint(draws)).astype(
        np.int64
    )
    return tokens


@lru_cache(maxsize=256)
def belief(mean: float, spread: float = SPREAD) -> LengthBelief:
    """Length belief of a class: quantiles of a separate sample."""
    rng = np.random.default_rng([_BELIEF_SEED, round(mean * 10)])
    return LengthBelief.of(lengths(rng, mean, _BELIEF_SAMPLE, spread).tolist())


# Arrivals: absolute seconds, ascending


def poisson(rng: np.random.Generator, rate_per_s: float, n: int) -> list[float]:
    return [float(t) for t in np.cumsum(rng.exponential(1 / rate_per_s, n))]


def gamma(rng: np.random.Generator, rate_per_s: float, n: int, cv: float = 2.0) -> list[float]:
    """Gaps with a coefficient of variation `cv`: above 1 they come in clumps."""
    shape = 1 / cv**2
    return [float(t) for t in np.cumsum(rng.gamma(shape, 1 / (rate_per_s * shape), n))]


def bursts(
    rng: np.random.Generator,
    rate_per_s: float,
    n: int,
    factor: float = 3.0,
    period_s: float = 60.0,
    share: float = 0.2,
) -> list[float]:
    """`share` of each period at `factor` times the rate of the rest; the mean rate is kept."""
    calm_per_s = rate_per_s / (1 - share + share * factor)
    times: list[float] = []
    t = 0.0
    while len(times) < n:  # thinning of the fastest rate
        t += float(rng.exponential(1 / (calm_per_s * factor)))
        is_burst = (t % period_s) < share * period_s
        if is_burst or rng.random() < 1 / factor:
            times.append(t)
    return times


Arrivals = Callable[[np.random.Generator, float, int], list[float]]
ARRIVALS: Mapping[str, Arrivals] = {"poisson": poisson, "gamma": gamma, "burst": bursts}


# SABER


def saber_tasks(
    workload: str,
    rate_per_s: float,
    n: int,
    seed: int,
    pool: PoolName,
    arrivals: Arrivals = poisson,
    spread: float = SPREAD,
) -> list[SimTask]:
    """`n` single calls of workload W1, W2 or W3."""
    rng = np.random.default_rng([seed, 3, int(workload[1:]), round(rate_per_s * 1000)])
    times = arrivals(rng, rate_per_s, n)
    names = list(SABER_CLASSES)
    picked = rng.choice(names, n, p=[SABER_SHARES[workload][c] for c in names])
    return single_calls(rng, times, SABER_CLASSES, picked.tolist(), pool, spread)


def single_calls(
    rng: np.random.Generator,
    times: Sequence[float],
    classes: Mapping[str, tuple[int, int, float]],
    picked: Sequence[str],
    pool: PoolName,
    spread: float = SPREAD,
) -> list[SimTask]:
    """One task of one call at each of `times`, of the class `picked` for it.

    `classes`: mean tokens of prompt and output, SLA (end to end).
    """
    draws = rng.random(len(times))
    tasks = []
    for i, name in enumerate(picked):
        prompt, output, target_s = classes[name]
        known = belief(output, spread)
        node = SimNode(
            pool,
            int(lengths(rng, prompt, 1)[0]),
            int(lengths(rng, output, 1, spread)[0]),
            round(known.mean),
            known,
        )
        tasks.append(
            SimTask(
                f"t{i:05d}",
                TaskName(name),
                times[i],
                SloMetric.E2E,
                target_s,
                (node,),
                (float(draws[i]),),
            )
        )
    return tasks


@lru_cache(maxsize=256)
def longest_of(calls: int, mean: float, spread: float = SPREAD) -> float:
    """Mean of the longest of `calls` lengths: a stage ends with its last call."""
    rng = np.random.default_rng([_BELIEF_SEED, calls, round(mean * 10)])
    draws = lengths(rng, mean, _BELIEF_SAMPLE * calls, spread).reshape(-1, calls)
    return float(draws.max(axis=1).mean())


def with_known_lengths(tasks: Sequence[SimTask]) -> list[SimTask]:
    """The same tasks with all lengths known to policies: what better foresight could win."""
    return [replace(t, nodes=tuple(_known(n) for n in t.nodes)) for t in tasks]


def _known(node: SimNode) -> SimNode:
    exact = LengthBelief((float(node.output_tokens),))
    return replace(node, length=exact, expected_tokens=node.output_tokens)
