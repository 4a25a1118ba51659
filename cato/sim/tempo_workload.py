"""Tempo's workload: its three kinds of tasks, and the engine they run on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np

from cato.core.ids import PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.profile import UNMEASURED, Profile
from cato.core.slo import SloMetric
from cato.sim.tasks import SimNode, SimTask
from cato.sim.workloads import SPREAD, Arrivals, belief, lengths, longest_of, poisson

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
