"""The retry budget: what a lost replica ran goes on, and retries never multiply load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cato.core.retries import RetryBudget


def test_all_that_one_replica_ran_may_go_on_elsewhere_at_once() -> None:
    budget = RetryBudget(always=0)
    for _ in range(100):
        budget.begin()
    assert [budget.take(0.0) for _ in range(100)] == [True] * 100
    assert not budget.take(0.0)


def test_an_idle_system_may_always_retry_a_little() -> None:
    budget = RetryBudget(always=2)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    assert budget.take(10.0), "the first two are forgotten"


def test_calls_that_ended_count_for_the_window() -> None:
    budget = RetryBudget(always=0, window_s=10.0)
    budget.begin()
    budget.end(1.0)
    assert not RetryBudget(always=0).take(10.9)
    assert budget.take(10.9)
    budget.begin()
    budget.end(12.0)
    assert not budget.take(22.1), "the call is forgotten"


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "take"]), st.floats(0, 3))))
def test_in_any_window_there_are_no_more_retries_than_calls(
    events: list[tuple[str, float]],
) -> None:
    budget, now_s, running = RetryBudget(always=3, window_s=10.0), 0.0, 0
    calls: list[float] = []  # moments at which each ended call ended
    retries: list[float] = []
    for kind, gap_s in events:
        now_s += gap_s
        if kind == "begin":
            budget.begin()
            running += 1
        elif kind == "end" and running:
            budget.end(now_s)
            running -= 1
            calls.append(now_s)
        elif kind == "take" and budget.take(now_s):
            retries.append(now_s)
            recent = sum(at_s > now_s - 10.0 for at_s in retries)
            assert recent <= 3 + 1 + running + sum(at_s > now_s - 10.0 for at_s in calls)
