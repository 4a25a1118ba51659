"""Tempo's workload: its three kinds of tasks, and the engine they run on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from types import MappingProxyType

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

TEMPO_STAGE_CALLS = (3, 6)
TEMPO_SHARES = {"latency": 0.6, "throughput": 0.2, "collective": 0.2}
TEMPO_STAGE_TARGET_S = 20.0
# Part of the deviation of a length's logarithm that the prompt predicts (assumed: a third of the
# variance). Without any, shortest job first would have nothing to sort by; exact lengths would be
# another workload.
TEMPO_KNOWN = 0.6


@dataclass(frozen=True, slots=True)
class CallLengths:
    """Mean tokens of a call's prompt and output, and the deviations of their logarithms."""

    prompt: float
    output: float
    prompt_spread: float = SPREAD
    output_spread: float = SPREAD


def _by_deviation(
    prompt: tuple[float, float], output: tuple[float, float], calls: int = 1
) -> CallLengths:
    """From mean and deviation of the tokens of `calls` independent calls together."""
    (prompts, prompts_by), (outputs, outputs_by) = prompt, output
    return CallLengths(
        prompts / calls,
        outputs / calls,
        math.sqrt(math.log1p(calls * (prompts_by / prompts) ** 2)),
        math.sqrt(math.log1p(calls * (outputs_by / outputs) ** 2)),
    )


# Mean tokens of a call: assumed, of a chat's size.
TEMPO_CALL = (500, 250)
ASSUMED, CHATBOT = "assumed", "chatbot"
_CALLS = sum(TEMPO_STAGE_CALLS)
TEMPO_LENGTHS: Mapping[str, tuple[CallLengths, CallLengths]] = MappingProxyType(
    {
        ASSUMED: (CallLengths(*TEMPO_CALL),) * 2,
        CHATBOT: (
            _by_deviation((93, 244), (318, 313)),
            _by_deviation((1300, 912), (4458, 1176), _CALLS),
        ),
    }
)
"""A single call, and one of a collective task. `CHATBOT`: the paper's Table 2, whose collective
rows are whole tasks: their tokens are spread evenly over the calls."""


def tempo_rate_per_s(
    load: float, shares: Mapping[str, float] = TEMPO_SHARES, length: str = ASSUMED
) -> float:
    """Tasks per second; load 1: their tokens are what the engine can do at its full batch."""
    single_s, collective_s = (_call_s(call) for call in TEMPO_LENGTHS[length])
    collective = shares["collective"]
    work_s = single_s * (1 + collective * (_CALLS - 1))
    work_s += collective * _CALLS * (collective_s - single_s)
    return load / work_s


def _call_s(call: CallLengths) -> float:
    engine = TEMPO_ENGINE
    step_s = engine.decode_step_s(engine.max_running)
    return (
        engine.prefill_per_batch_token_s * call.prompt + step_s / engine.max_running * call.output
    )


def tempo_tasks(
    load: float,
    n: int,
    seed: int,
    pool: PoolName,
    without_slo: float = 0.0,
    shares: Mapping[str, float] = TEMPO_SHARES,
    arrivals: Arrivals = poisson,
    length: str = ASSUMED,
) -> list[SimTask]:
    """Mix 3 : 1 : 1 of latency-sensitive (TTFT 2 s, 100 ms a token), throughput (20 s to the last
    token) and collective tasks (20 s × stages; stages of 3 and 6 calls).

    `load`: see `tempo_rate_per_s`; `length` names one of `TEMPO_LENGTHS`. A share of `without_slo`
    of the tasks, of all kinds, has no SLO and is named "unbound". Expected downstream time is that
    of whole stages, each as long as its longest call, in a full batch: stages run in full batches
    when deadlines are at stake.
    """
    rng = np.random.default_rng([seed, 6, round(load * 1000)])
    times = arrivals(rng, tempo_rate_per_s(load, shares, length), n)
    names = list(shares)
    chosen = rng.choice(names, n, p=[shares[k] for k in names])
    unbound = rng.random(n) < without_slo
    single, collective = TEMPO_LENGTHS[length]
    stage_s = [_stage_s(calls, collective) for calls in TEMPO_STAGE_CALLS]
    tasks = []
    for i in range(n):
        name = str(chosen[i])
        stages = TEMPO_STAGE_CALLS if name == "collective" else (1,)
        call = collective if name == "collective" else single
        starts = [sum(stages[:k]) for k in range(len(stages) + 1)]
        nodes = []
        for k, (begin, end) in enumerate(pairwise(starts)):
            needs = tuple(range(starts[k - 1], begin)) if k else ()
            for _ in range(begin, end):
                tokens, known = _partly_known(rng, call.output, call.output_spread)
                nodes.append(
                    SimNode(
                        pool,
                        int(lengths(rng, call.prompt, 1, call.prompt_spread)[0]),
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


def _stage_s(calls: int, call: CallLengths) -> float:
    output = round(longest_of(calls, call.output, call.output_spread))
    return TEMPO_ENGINE.service_s(round(call.prompt), output, TEMPO_ENGINE.max_running)


def _partly_known(rng: np.random.Generator, mean: float, spread: float) -> tuple[int, LengthBelief]:
    """A length of `spread` around `mean`, and the belief when part of the spread is predicted."""
    told = TEMPO_KNOWN * spread
    rest = math.sqrt(spread**2 - told**2)
    centre = mean * math.exp(rng.normal(-(told**2) / 2, told))
    known = LengthBelief(tuple(max(1.0, p * centre / mean) for p in belief(mean, rest).points))
    return int(lengths(rng, centre, 1, rest)[0]), known
