"""Workloads of the experiments: task classes, arrivals, and the engines they run on.

Output lengths are lognormal around the published means: the papers give means only. Policies know
each class from a separate sample, drawn with a seed that no experiment uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np

from cato.core.budgets import longest_after
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
# Tempo's: 11 ms + 0.12 ms·b, chunks of 512 tokens; a full chunk takes about as long as the step.
TEMPO_ENGINE: Profile = replace(
    UNMEASURED,
    model="tempo",
    prefill_per_batch_token_s=30e-6,
    prefill_base_s=11e-3,
    decode_per_context_token_s=0.0,
    decode_per_request_s=0.12e-3,
    decode_base_s=11e-3,
    kv_capacity_tokens=400_000,
    max_running=64,
)
TEMPO_CHUNK_TOKENS = 512

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


# CATO


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One LLM call of a class: the pool, mean tokens, the calls it needs, and its probability.

    When a call is skipped, its dependents inherit its needs.
    """

    pool: str
    prompt_tokens: int
    output_tokens: int
    needs: tuple[int, ...] = ()
    before_s: float = 0.0
    chance: float = 1.0


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
CATO_SPREAD = 0.3
CATO_TARGET_FACTOR = 1.5


def mean_s(calls: Sequence[CallSpec], profile: Profile, metric: SloMetric = SloMetric.E2E) -> float:
    """Mean time of a class on idle replicas up to the event of `metric`, the first or the last
    token of its last call: its critical path, weighted by the calls' probabilities.
    """
    weights = {str(i): w for i, w in enumerate(_weights_s(calls, profile, metric))}
    after = _after_s(calls, profile, metric)
    return max(weights[k] + after[int(k)] for k in weights)


def _weights_s(calls: Sequence[CallSpec], profile: Profile, metric: SloMetric) -> list[float]:
    """Expected time of each call, of the last one up to the event."""
    services_s = [profile.service_s(c.prompt_tokens, c.output_tokens) for c in calls]
    if metric is SloMetric.TTFT:
        services_s[-1] = profile.first_token_s(calls[-1].prompt_tokens)
    return [(c.before_s + s) * c.chance for c, s in zip(calls, services_s, strict=True)]


def _after_s(calls: Sequence[CallSpec], profile: Profile, metric: SloMetric) -> list[float]:
    """Expected time after each call up to the event."""
    order = [str(i) for i in range(len(calls))]
    needs = {str(i): [str(n) for n in c.needs] for i, c in enumerate(calls)}
    weights = {str(i): w for i, w in enumerate(_weights_s(calls, profile, metric))}
    after = longest_after(order, needs, weights)
    return [after[k] for k in order]


def load_per_task_s(
    shares: Mapping[str, float], classes: Mapping[str, Sequence[CallSpec]], profile: Profile
) -> dict[str, float]:
    """Expected busy seconds of one task on each pool, one call at a time."""
    load: dict[str, float] = {}
    for name, share in shares.items():
        for call in classes[name]:
            busy_s = profile.service_s(call.prompt_tokens, call.output_tokens) * call.chance
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
    after = {k: _after_s(classes[k], profile, metrics[k]) for k in names}
    target_s = {k: target_factor * stretch * mean_s(classes[k], profile, metrics[k]) for k in names}
    tasks = []
    for i in range(n):
        name = str(chosen[i])
        calls = classes[name]
        happens = [rng.random() < c.chance for c in calls]
        nodes: list[SimNode] = []
        place: dict[int, tuple[int, ...]] = {}
        for j, call in enumerate(calls):
            prompt = int(lengths(rng, call.prompt_tokens, 1, CATO_SPREAD)[0])
            output = int(lengths(rng, call.output_tokens, 1, CATO_SPREAD)[0])
            needs = tuple(sorted({p for need in call.needs for p in place[need]}))
            if not happens[j]:
                place[j] = needs
                continue
            place[j] = (len(nodes),)
            known = belief(call.output_tokens, CATO_SPREAD)
            nodes.append(
                SimNode(
                    PoolName(call.pool),
                    prompt,
                    output,
                    round(known.mean),
                    known,
                    needs,
                    call.before_s,
                    after[name][j] * stretch,
                )
            )
        draws = tuple(float(d) for d in rng.random(len(nodes)))
        tasks.append(
            SimTask(
                f"t{i:05d}",
                TaskName(name),
                times[i],
                metrics[name],
                target_s[name],
                tuple(nodes),
                draws,
            )
        )
    return tasks


# Tempo

# Mean tokens of a call: assumed, of a chat's size.
TEMPO_CALL = (500, 250)
TEMPO_STAGE_CALLS = (3, 6)
TEMPO_SHARES = {"latency": 0.6, "throughput": 0.2, "collective": 0.2}
TEMPO_STAGE_TARGET_S = 20.0
# Part of the deviation of a length's logarithm that the prompt predicts (assumed: a third of the
# variance). Without any, shortest job first would have nothing to sort by; exact lengths would be
# another workload.
TEMPO_KNOWN = 0.3


def tempo_rate_per_s(load: float, shares: Mapping[str, float] = TEMPO_SHARES) -> float:
    """Tasks per second; load 1: their tokens are what the engine can do at its full batch."""
    engine, (prompt, output) = TEMPO_ENGINE, TEMPO_CALL
    step_s = engine.decode_step_s(engine.max_running)
    call_s = engine.prefill_per_batch_token_s * prompt + step_s / engine.max_running * output
    calls = 1 + shares["collective"] * (sum(TEMPO_STAGE_CALLS) - 1)
    return load / (call_s * calls)


@lru_cache(maxsize=256)
def longest_of(calls: int, mean: float, spread: float = SPREAD) -> float:
    """Mean of the longest of `calls` lengths: a stage ends with its last call."""
    rng = np.random.default_rng([_BELIEF_SEED, calls, round(mean * 10)])
    draws = lengths(rng, mean, _BELIEF_SAMPLE * calls, spread).reshape(-1, calls)
    return float(draws.max(axis=1).mean())


def tempo_tasks(
    load: float,
    n: int,
    seed: int,
    pool: PoolName,
    without_slo: float = 0.0,
    shares: Mapping[str, float] = TEMPO_SHARES,
    arrivals: Arrivals = poisson,
) -> list[SimTask]:
    """Mix 3 : 1 : 1 of latency-sensitive (TTFT 2 s, 100 ms a token), throughput (20 s to the last
    token) and collective tasks (20 s × stages; stages of 3 and 6 calls).

    `load`: see `tempo_rate_per_s`. A share of `without_slo` of the tasks, of all kinds, has no SLO
    and is named "unbound". Expected downstream time is that of whole stages, each as long as its
    longest call, in a full batch: stages run in full batches when deadlines are at stake.
    """
    rng = np.random.default_rng([seed, 6, round(load * 1000)])
    times = arrivals(rng, tempo_rate_per_s(load, shares), n)
    names = list(shares)
    chosen = rng.choice(names, n, p=[shares[k] for k in names])
    unbound = rng.random(n) < without_slo
    prompt, output = TEMPO_CALL
    full = TEMPO_ENGINE.max_running
    stage_s = [
        TEMPO_ENGINE.service_s(prompt, round(longest_of(calls, output)), full)
        for calls in TEMPO_STAGE_CALLS
    ]
    tasks = []
    for i in range(n):
        name = str(chosen[i])
        stages = TEMPO_STAGE_CALLS if name == "collective" else (1,)
        starts = [sum(stages[:k]) for k in range(len(stages) + 1)]
        nodes = []
        for k, (begin, end) in enumerate(pairwise(starts)):
            needs = tuple(range(starts[k - 1], begin)) if k else ()
            for _ in range(begin, end):
                tokens, known = _partly_known(rng, output)
                nodes.append(
                    SimNode(
                        pool,
                        int(lengths(rng, prompt, 1)[0]),
                        tokens,
                        round(known.mean),
                        known,
                        needs,
                        0.0,
                        sum(stage_s[k + 1 : len(stages)]),
                    )
                )
        is_stream = name == "latency" and not unbound[i]
        target_s = 2.0 if is_stream else TEMPO_STAGE_TARGET_S * len(stages)
        tasks.append(
            SimTask(
                f"t{i:05d}",
                TaskName("unbound" if unbound[i] else name),
                times[i],
                SloMetric.TTFT if is_stream else SloMetric.E2E,
                inf if unbound[i] else target_s,
                tuple(nodes),
                tuple(float(d) for d in rng.random(len(nodes))),
                0.1 if is_stream else inf,
            )
        )
    return tasks


def _partly_known(rng: np.random.Generator, mean: float) -> tuple[int, LengthBelief]:
    """A length of `SPREAD` around `mean`, and the belief when part of the spread is predicted."""
    rest = math.sqrt(SPREAD**2 - TEMPO_KNOWN**2)
    centre = mean * math.exp(rng.normal(-(TEMPO_KNOWN**2) / 2, TEMPO_KNOWN))
    known = LengthBelief(tuple(max(1.0, p * centre / mean) for p in belief(mean, rest).points))
    return int(lengths(rng, centre, 1, rest)[0]), known


def with_known_lengths(tasks: Sequence[SimTask]) -> list[SimTask]:
    """The same tasks with all lengths known to policies: what better foresight could win."""
    return [replace(t, nodes=tuple(_known(n) for n in t.nodes)) for t in tasks]


def _known(node: SimNode) -> SimNode:
    exact = LengthBelief((float(node.output_tokens),))
    return replace(node, length=exact, expected_tokens=node.output_tokens)
