"""The engine in virtual time under the rule that plans vLLM's steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_profile

from cato.core.ids import InvocationId
from cato.core.pool.prefill import NOTHING_DUE, CallTarget, DueDateRule
from cato.core.prefix_cache import PrefixCache
from cato.engines.simulated.asked import Prompt
from cato.engines.simulated.batch import Batch, Run
from cato.sim.replica import FactKind, Sequence, SimReplica

BLOCK, STEP_TOKENS, MOST_S, PLACES = 16, 2048, 0.06, 3
# A stream's step takes 10 ms, a prompt token 0.2 ms: 300 tokens are 60 ms.
PROFILE = replace(
    a_profile(prefill_s=0.0, token_s=0.01, prefill_token_s=2e-4), kv_capacity_tokens=20_000
)
# Arrival, prompt tokens, answer tokens, target.
Asked = tuple[float, int, int, CallTarget]


def simulated(calls: list[Asked]) -> dict[str, float]:
    """When each first token came in the simulator."""
    cache = PrefixCache(PROFILE.kv_capacity_tokens, BLOCK)
    engine = SimReplica(PROFILE, PLACES, STEP_TOKENS, cache=cache, rule=DueDateRule(MOST_S))
    first_s: dict[str, float] = {}

    def go_on(until_s: float) -> None:
        while engine.wake_s <= until_s and engine.wake_s < math.inf:
            now_s = engine.wake_s
            facts, _ = engine.wake(now_s)
            first_s.update({s.id: now_s for kind, s in facts if kind is FactKind.FIRST_TOKEN})
            engine.go_on(now_s)

    for i, (at_s, prompt, output, target) in enumerate(calls):
        go_on(at_s)
        blocks = tuple(range(1000 * i, 1000 * i + prompt // BLOCK))
        id = InvocationId(str(i))
        engine.submit(at_s, Sequence(id, prompt, output, blocks=blocks, target=target))
        if engine.wake_s == at_s:
            engine.go_on(at_s)
    go_on(math.inf)
    assert cache.held_blocks == 0
    return first_s


def stepped(calls: list[Asked]) -> dict[str, float]:
    """The same in the simulated engine's batch, one step after the other."""
    batch = Batch(PROFILE, PLACES, STEP_TOKENS, BLOCK, rule=DueDateRule(MOST_S))
    left = list(enumerate(calls))
    now_s, first_s = 0.0, {}
    while left or not batch.is_idle:
        if batch.is_idle:
            now_s = max(now_s, left[0][1][0])
        while left and left[0][1][0] <= now_s:
            i, (at_s, tokens, output, target) = left.pop(0)
            prompt = Prompt(f"{i:>8}" * tokens, tokens, 8.0)
            pieces = ["ab"] * output
            hashes = prompt.hashes("ab" * output, "", BLOCK)
            batch.add(Run(prompt, pieces, hashes, str(i), target, at_s), 0)
        emitting, step_s = batch.plan_step(now_s)
        assert step_s is not None
        now_s += step_s
        batch.end_step(emitting)
        for run in emitting:
            first_s.setdefault(run.id, now_s)
    return first_s


def test_short_prompts_pass_a_long_one() -> None:
    stream = (0.0, 10, 400, NOTHING_DUE)
    long, short = (1.0, 9000, 3, CallTarget(20.0)), (1.5, 100, 3, CallTarget(0.5))
    first_s = simulated([stream, long, short])
    assert first_s["2"] - 1.5 < 0.2
    assert first_s["2"] < first_s["1"] < 1.0 + 9000 * 2e-4 * 1.5


targets = st.builds(CallTarget, st.sampled_from([math.inf, 0.05, 0.5, 20.0]))
# On no step's boundary, where the two count an arrival to different steps.
asked = st.tuples(
    st.integers(1, 300).map(lambda n: n * 0.0307),
    st.integers(20, 5000),
    st.integers(1, 60),
    targets,
)


together = st.lists(asked, min_size=1, max_size=7, unique_by=lambda call: call[0])


@given(together.map(lambda calls: sorted(calls, key=lambda call: call[0])))
def test_first_tokens_come_as_in_the_simulated_engine(calls: list[Asked]) -> None:
    # The simulator learns once from equal steps of streams, the engine from each of them.
    assert simulated(calls) == pytest.approx(stepped(calls), rel=0.15, abs=0.1)


def test_the_rule_needs_a_cache_and_a_budget() -> None:
    with pytest.raises(ValueError, match="prefix cache"):
        SimReplica(PROFILE, PLACES, STEP_TOKENS, rule=DueDateRule(MOST_S))
