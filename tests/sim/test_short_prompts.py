"""Short completions: an engine that is given one prompt at a time starves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet_kit import POOL, a_task

from cato.core.slo import SloMetric
from cato.lab.studies import completions as lab
from cato.policies import schedulers
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.tasks import SimTask, task_metrics
from cato.sim.workloads import SEVEN_B

# An A100-like engine: steps of 10 ms + 0.1 ms a request, prompts at 33,000 tokens a second.
ENGINE = replace(
    SEVEN_B,
    prefill_per_batch_token_s=3e-5,
    prefill_base_s=10e-3,
    decode_per_context_token_s=0.2e-6,
    decode_per_request_s=0.1e-3,
    decode_base_s=10e-3,
    max_running=128,
)
# It gives 64 calls of 64 tokens in and 20 out at a time 20 steps of 16.5 ms and 0.12 s of prompts.
MOST_PER_S = 64 / (20 * 0.0165 + 64 * 64 * 3e-5)


def completions(n: int, rate_per_s: float, prompt: int = 64) -> list[SimTask]:
    """They want their first token within 300 ms."""
    return [
        a_task(
            f"t{i}", i / rate_per_s, prompt=prompt, output=20, target_s=0.3, metric=SloMetric.TTFT
        )
        for i in range(n)
    ]


@pytest.mark.parametrize(("chunk_tokens", "load"), [(None, 0.5), (512, 0.9)])
def test_short_prompts_start_in_time_beside_others(chunk_tokens: int | None, load: float) -> None:
    setup = PoolSetup(POOL, (ENGINE,), schedulers.foresight(), chunk_tokens=chunk_tokens)
    outcomes = Fleet([setup]).run(completions(2000, load * MOST_PER_S))
    assert task_metrics(outcomes)["slo_attainment"] >= 0.99


def test_short_prompts_on_mixed_speeds_start_in_time() -> None:
    """One fast card, two 2.5 times slower and one six times slower, at half of what they give."""
    speeds = (ENGINE, ENGINE.slowed(2.5), ENGINE.slowed(2.5), ENGINE.slowed(6))
    setup = PoolSetup(POOL, speeds, schedulers.foresight(), chunk_tokens=512, news_s=0.008)
    rate_per_s = 0.5 * (1 + 2 / 2.5 + 1 / 6) * MOST_PER_S
    outcomes = Fleet([setup]).run(completions(2000, rate_per_s, prompt=200))
    assert task_metrics(outcomes)["slo_attainment"] >= 0.99


def test_in_overload_short_prompts_fare_no_worse_than_shortest_first() -> None:
    """Three times what the engine gives: of new prompts the shortest go first, not the oldest."""

    def attainment(scheduler: str) -> float:
        policies = schedulers.OF_PROFILE[scheduler](lab.ENGINE, 1)
        setup = PoolSetup(lab.POOL, (lab.ENGINE,), policies, chunk_tokens=lab.CHUNK_TOKENS)
        outcomes = Fleet([setup]).run(lab.tasks((200, 20), 3.0, 1, 0.3, 1))
        return task_metrics(outcomes)["slo_attainment"]

    assert attainment("foresight") >= attainment("sjf-bounded") - 0.01
