"""The simulated engine under the rule that plans vLLM's steps."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_profile
from kits.engine_conformance import a_request, collect, text_of

from cato.core.pool.prefill import NOTHING_DUE, CallTarget, DueDateRule
from cato.core.prefix_cache import BLOCK_TOKENS
from cato.core.topology import DUE_DATE, EngineSpec
from cato.engines.simulated import SimulatedEngine, simulated_text
from cato.engines.simulated.asked import Prompt
from cato.engines.simulated.batch import Batch, Run

# A stream's step takes 10 ms, a prompt token 0.2 ms: 300 tokens are 60 ms.
PROFILE = replace(
    a_profile(prefill_s=0.0, token_s=0.01, prefill_token_s=2e-4),
    kv_capacity_tokens=20_000,
    context_tokens=20_000,
)
MOST_S = 0.06


def a_run(id: str, tokens: int, target: CallTarget = NOTHING_DUE, output: int = 3) -> Run:
    text = f"{id:>8}" * tokens
    prompt = Prompt(text, tokens, 8.0)
    pieces = ["ab"] * output
    return Run(prompt, pieces, prompt.hashes("ab" * output, "", BLOCK_TOKENS), id, target)


class Steps:
    """A batch on a clock of its own; `first_s` says when whose first token came."""

    def __init__(self, *runs: Run, places: int = 8, host_tokens: int = 0) -> None:
        self.profile = replace(PROFILE, host_load_token_s=1e-4)
        self.batch = Batch(
            self.profile, places, 2048, BLOCK_TOKENS, 0, host_tokens, DueDateRule(MOST_S)
        )
        self.now_s, self.first_s, self.longest_s = 0.0, dict[str, float](), 0.0
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> None:
        run.asked_at_s = self.now_s
        self.batch.add(run, 0)

    def step(self) -> None:
        emitting, step_s = self.batch.plan_step(self.now_s)
        if step_s is None:
            self.now_s = self.batch.next_load_s
            return
        assert step_s > 0.0, "a step in which nothing goes on"
        self.now_s += step_s
        self.batch.end_step(emitting)
        for run in emitting:
            self.first_s.setdefault(run.id, self.now_s)

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if self.batch.is_idle:
                return
            self.step()
        raise AssertionError("it does not end")


def test_short_prompts_pass_a_long_one_and_streams_go_on() -> None:
    stream = a_run("stream", 10, output=400)
    steps = Steps(stream)
    for _ in range(20):
        steps.step()
    steps.add(a_run("long", 9000, CallTarget(20.0)))
    waits = []
    for i in range(60):
        if i == 5:
            steps.add(a_run("short", 100, CallTarget(0.5)))
            asked_s = steps.now_s
        before_s = steps.now_s
        steps.step()
        waits.append(steps.now_s - before_s)
    assert steps.first_s["short"] - asked_s < 0.2
    assert steps.first_s.get("long", inf) > steps.first_s["short"]
    # Once it has learnt what steps take here.
    assert max(waits[20:]) == pytest.approx(0.01 + MOST_S, rel=0.1)
    steps.run()
    assert steps.first_s["long"] < 9000 * 2e-4 * 1.5


targets = st.builds(CallTarget, st.sampled_from([inf, 0.01, 0.5, 20.0]))
wanted = st.tuples(st.integers(1, 6000), st.integers(1, 40), targets, st.integers(0, 60))


@given(st.lists(wanted, min_size=1, max_size=10), st.sampled_from([0, 40_000]))
def test_every_call_gets_its_tokens_and_every_block_comes_back(
    calls: list[tuple[int, int, CallTarget, int]], host_tokens: int
) -> None:
    steps = Steps(places=3, host_tokens=host_tokens)
    runs = [
        # Two of three begin alike, so that they share blocks.
        (a_run(f"r{i % 3}", tokens, target, output), at)
        for i, (tokens, output, target, at) in enumerate(calls)
    ]
    for i, (run, _) in enumerate(runs):
        run.id = f"{i}"
    for now in range(61):
        for run, at in runs:
            if at == now:
                steps.add(run)
        if not steps.batch.is_idle:
            steps.step()
    steps.run()
    assert all(run.emitted_tokens == len(run.pieces) for run, _ in runs)
    assert steps.batch.kv_cache_usage == 0.0


async def test_answers_are_those_of_its_own_order() -> None:
    engine = SimulatedEngine(
        replace(PROFILE, prefill_per_batch_token_s=1e-7, decode_base_s=1e-5, load_s=0.0),
        EngineSpec("simulated", seed=3, scheduler=DUE_DATE),
    )
    await engine.start()
    prompts = [f"x{i} = " * (1 + 200 * (i % 3)) for i in range(9)]
    asked = [
        replace(
            a_request(prompt=prompt, max_tokens=30, ignore_eos=True),
            target=CallTarget(0.1 * (i % 4)),
        )
        for i, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*(collect(engine, request) for request in asked))
    for prompt, chunks in zip(prompts, answers, strict=True):
        assert text_of(chunks) == simulated_text(3, prompt, 30)
    await engine.stop()
