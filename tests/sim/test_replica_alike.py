"""The engine in virtual time and the simulated engine that serves HTTP keep the same times.

Prompts with common beginnings, blocks in host memory, prompts in pieces, priorities, clients that
leave: what `cato simulate` predicts and what `cato bench live` measures is the same engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

import pytest
from kits.builders import a_profile, prompt_blocks

from cato.core.ids import InvocationId
from cato.core.prefix_cache import PrefixCache
from cato.core.profile import Profile
from cato.engines.simulated.asked import Prompt
from cato.engines.simulated.batch import Batch, Run
from cato.sim.replica import FactKind, Sequence, SimReplica

BLOCK, PLACES, CAPACITY = 16, 3, 640
PROFILE = replace(
    a_profile(prefill_s=0.01, token_s=0.01, prefill_token_s=0.0011, batch_token_s=0.0007),
    kv_capacity_tokens=CAPACITY,
    host_load_token_s=1.3e-4,
)
# Reads and computation hide behind each other, and long contexts cost more.
ROOFLINE = replace(
    PROFILE,
    prefill_per_attended_token_s=1.1e-6,
    weights_read_s=0.006,
    kv_read_token_s=1.7e-5,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """`leaves_s`: how long after its arrival the client leaves (inf: it stays)."""

    at_s: float
    prompt: int
    output: int
    family: int
    shared_blocks: int
    priority: int
    leaves_s: float

    def blocks(self, number: int) -> tuple[int, ...]:
        return prompt_blocks(number, self.prompt // BLOCK, self.family, self.shared_blocks)


@dataclass(frozen=True, slots=True)
class Engine:
    profile: Profile
    chunk_tokens: int
    prompt_cap_tokens: int
    host_tokens: int


# By request: when its first token came, when its last one did, and its cached tokens.
Times = dict[str, tuple[float, float, int]]


def orders(calls: list[Asked]) -> list[tuple[float, int, bool]]:
    """Time, number of the request, and whether it arrives or leaves."""
    found = [(call.at_s, n, True) for n, call in enumerate(calls)]
    leaving = [(n, call) for n, call in enumerate(calls) if call.leaves_s < math.inf]
    found += [(call.at_s + call.leaves_s, n, False) for n, call in leaving]
    return sorted(found)


def in_virtual_time(engine: Engine, calls: list[Asked]) -> Times:
    replica = SimReplica(
        engine.profile,
        PLACES,
        engine.chunk_tokens,
        cache=PrefixCache(engine.profile.kv_capacity_tokens, BLOCK, engine.host_tokens),
        prompt_cap_tokens=engine.prompt_cap_tokens,
    )
    left, first_s, times = orders(calls), dict[str, float](), Times()
    while left or replica.wake_s < math.inf:
        if left and left[0][0] <= replica.wake_s:
            now_s, n, arrives = left.pop(0)
            call, id, is_idle = calls[n], InvocationId(str(n)), replica.is_idle
            if arrives:
                blocks = call.blocks(n)
                replica.submit(
                    now_s, Sequence(id, call.prompt, call.output, call.priority, blocks=blocks)
                )
            else:
                replica.cancel(now_s, id)
            if is_idle:
                replica.go_on(now_s)
            continue
        now_s = replica.wake_s
        for kind, sequence in replica.wake(now_s)[0]:
            if kind is FactKind.FIRST_TOKEN:
                first_s[sequence.id] = now_s
            else:
                times[sequence.id] = first_s[sequence.id], now_s, sequence.cached_tokens
        replica.go_on(now_s)
    return times


def step_by_step(engine: Engine, calls: list[Asked]) -> Times:
    batch = Batch(
        engine.profile,
        PLACES,
        engine.chunk_tokens,
        BLOCK,
        engine.prompt_cap_tokens,
        engine.host_tokens,
    )
    left, runs = orders(calls), dict[int, Run]()
    now_s, first_s, times = 0.0, dict[str, float](), Times()
    while left or not batch.is_idle:
        if batch.is_idle:
            now_s = max(now_s, left[0][0])
        while left and left[0][0] <= now_s:
            _, n, arrives = left.pop(0)
            if arrives:
                tokens = calls[n].prompt
                prompt = Prompt("x" * tokens, tokens, 1.0)
                pieces = ["x"] * calls[n].output
                runs[n] = Run(prompt, pieces, calls[n].blocks(n), str(n))
                batch.add(runs[n], calls[n].priority)
            else:
                batch.remove(runs[n])
        if batch.is_idle:
            continue
        emitting, step_s = batch.plan_step(now_s)
        if step_s is None:  # all wait for blocks from host memory
            now_s = min(batch.next_load_s, left[0][0] if left else math.inf)
            continue
        now_s += step_s
        batch.end_step(emitting)
        for run in emitting:
            first_s.setdefault(run.id, now_s)
            if run.is_finished:
                times[run.id] = first_s[run.id], now_s, run.cached_tokens
    # A client that left during the last step does not get its token.
    leaves_s = {str(n): call.at_s + call.leaves_s for n, call in enumerate(calls)}
    return {id: told for id, told in times.items() if told[1] <= leaves_s[id]}


def drawn(random: Random) -> tuple[Engine, list[Asked]]:
    """Arrivals are on no step's boundary, where the two count one to different steps."""
    engine = Engine(
        random.choice([PROFILE, ROOFLINE]),
        random.choice([40, 128, 2048]),
        random.choice([0, 24]),
        random.choice([0, 256, 4096]),
    )
    times = sorted(random.sample(range(1, 100), random.randint(1, 9)))
    calls = [
        Asked(
            time * 0.030717,
            random.randint(1, 300),
            random.randint(1, 60),
            random.randint(0, 2),
            random.randint(0, 12),
            random.randint(0, 1),
            random.choice([math.inf, math.inf, math.inf, 0.31337, 1.01377]),
        )
        for time in times
    ]
    return engine, calls


def differing(cases: int, capacity: int, seed: int) -> int:
    """In how many random cases any time differs, or the number of cached tokens."""
    random, found = Random(seed), 0
    for _ in range(cases):
        engine, calls = drawn(random)
        engine = replace(engine, profile=replace(engine.profile, kv_capacity_tokens=capacity))
        ours, theirs = in_virtual_time(engine, calls), step_by_step(engine, calls)
        found += ours.keys() != theirs.keys() or any(
            ours[id] != pytest.approx(told, abs=1e-6) for id, told in theirs.items()
        )
    return found


def test_tokens_come_when_they_come_from_the_simulated_engine() -> None:
    assert differing(100, capacity=100_000, seed=1) == 0


def test_what_a_full_cache_evicts_is_nearly_always_the_same() -> None:
    """In virtual time answers take their blocks when somebody needs room, not token by token, so
    another block may be evicted. Forty blocks for three requests are the worst case."""
    assert differing(200, capacity=CAPACITY, seed=2) <= 4
