"""JITServe's order, and SLO-SA's assignment to replicas by remaining memory."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from kits.builders import a_pool, a_profile, a_replica, an_invocation

from cato.core.decision import Hold, Route
from cato.core.ids import ReplicaId
from cato.core.policies import Work
from cato.core.snapshot import Running
from cato.policies.ordering.jitserve import JitServeOrdering
from cato.policies.ordering.tempo import GainDensity
from cato.policies.routing.remaining_memory import RemainingMemory

# 10 ms a step, 100 ms a prompt: 50 tokens take 0.6 s.
HARD = GainDensity(a_profile(), a=inf)
ORDER = JitServeOrdering(HARD)
ALONE = Work(1.0, 1.0, 0.01)


def place(order: JitServeOrdering = ORDER, now_s: float = 0.0, **what: object) -> tuple[int, float]:
    rank = order.rank(an_invocation(**what), ALONE, now_s)  # type: ignore[arg-type]
    return rank.value, rank.key


def test_what_cannot_wait_goes_before_what_can_and_late_work_goes_last() -> None:
    due, can_wait, late = (place(deadline_s=s) for s in (1.0, 9.0, 0.5))
    assert due < can_wait < late
    # Without a frame nothing waits for its time.
    assert place(replace(ORDER, frame_s=inf), deadline_s=9.0)[0] == due[0]


def test_a_call_that_can_wait_is_judged_again_when_it_cannot() -> None:
    rank = ORDER.rank(an_invocation(deadline_s=9.0), ALONE, 0.0)
    assert rank.until_s == pytest.approx(9.0 - 0.6 - ORDER.frame_s)
    # At that very instant, whatever the clock shows: no rank may wait for the same instant again.
    for at_s in (0.0, 0.3, 1e6 / 3, 1.7e9):
        waits = ORDER.rank(an_invocation(deadline_s=at_s + 9.0), ALONE, at_s)
        assert place(deadline_s=at_s + 9.0, now_s=waits.until_s)[0] < waits.value


def test_of_equal_density_the_shorter_prompt_goes_first_and_groups_come_before_prompts() -> None:
    # 300 and 304 tokens in time over the same 0.6 s: one group; 2,100 make a better one.
    assert place(prompt=200, deadline_s=1.0) < place(prompt=204, deadline_s=1.0)
    assert place(prompt=2000, deadline_s=1.0) < place(prompt=200, deadline_s=1.0)
    alone = replace(ORDER, group=1.0)
    assert place(alone, prompt=204, deadline_s=1.0) < place(alone, prompt=200, deadline_s=1.0)


def test_late_work_has_no_density() -> None:
    assert HARD.of_waiting(an_invocation(deadline_s=0.5), 0.0) == 0.0
    assert HARD.of_waiting(an_invocation(deadline_s=0.7), 0.0) > 0.0


def test_remaining_memory_takes_the_emptiest_cache_and_counts_the_answers_to_come() -> None:
    long = Running(an_invocation("x", prompt=100, tokens=5_000), 0.0, 1.0)
    holds_long = replace(a_replica("a", held=1), running=(long,), context_tokens=100)
    holds_context = replace(a_replica("b", held=1), context_tokens=5_000)
    chosen = RemainingMemory().route(an_invocation(), a_pool(holds_long, holds_context))
    assert chosen == Route(ReplicaId("b"), "most memory of 2: 85500 tokens")
    assert RemainingMemory().route(an_invocation(), a_pool()) == Hold("no replica has room")


def test_once_no_cache_has_room_all_begin_another_round_with_whole_ones() -> None:
    small = a_profile()
    large = replace(small, kv_capacity_tokens=2 * small.kv_capacity_tokens)
    full_small = replace(a_replica("a", profile=small), queued_tokens=100_000)
    full_large = replace(a_replica("b", profile=large), queued_tokens=200_000)
    chosen = RemainingMemory().route(an_invocation(), a_pool(full_small, full_large))
    assert chosen == Route(ReplicaId("b"), "most memory of 2: 180000 tokens, in round 2")
