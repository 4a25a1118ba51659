"""Which queued calls are kept in time, against all subsets of them; and their order."""

from __future__ import annotations

from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.ids import InvocationId
from cato.core.policies import BY_LOAD, Queued
from cato.policies.ordering.keep_most import keep_most

REPLICAS = 2.0
TOLERANCE_S = 1e-9
QUEUES = st.lists(st.tuples(st.floats(-1.0, 20.0), st.floats(0.1, 9.0)), max_size=7).map(
    lambda calls: [(by_s, load_s, InvocationId(f"{n}")) for n, (by_s, load_s) in enumerate(calls)]
)


def all_start_in_time(calls: list[Queued], tolerance_s: float = 0.0) -> bool:
    """In this order, from second 0 on."""
    start_s = 0.0
    for by_s, load_s, _ in calls:
        if start_s > by_s + tolerance_s:
            return False
        start_s += load_s / REPLICAS
    return True


def by_due(calls: tuple[Queued, ...]) -> list[Queued]:
    return sorted(calls, key=lambda call: call[0] + call[1] / REPLICAS)


def most_in_time(queued: list[Queued]) -> int:
    """Of all subsets; by due time a subset is in time if it is in any order."""
    for size in range(len(queued), 0, -1):
        if any(all_start_in_time(by_due(some)) for some in combinations(queued, size)):
            return size
    return 0


@given(QUEUES)
def test_as_many_are_kept_as_can_be_in_time_and_all_of_them_are(queued: list[Queued]) -> None:
    known = {id: (by_s, load_s, id) for by_s, load_s, id in queued}
    plan = keep_most(queued, REPLICAS, 0.0)
    assert len(plan.start_by_s) >= most_in_time(queued)
    assert all_start_in_time([known[id] for id in plan.start_by_s], TOLERANCE_S)
    starts = list(plan.start_by_s.values())
    assert starts == sorted(starts), "later calls may start later"
    dropped = [load_s for _, load_s, id in queued if id not in plan.start_by_s]
    assert plan.least_dropped_s == min(dropped, default=inf)


def test_the_shortest_goes_first_unless_a_longer_one_would_be_late() -> None:
    long, short = InvocationId("long"), InvocationId("short")

    def order(long_by_s: float) -> list[InvocationId]:
        return list(keep_most([(long_by_s, 4.0, long), (9.0, 1.0, short)], 1.0, 0.0).start_by_s)

    assert order(1.0) == [short, long]
    assert order(0.9) == [long, short]


def test_with_a_margin_a_longer_one_goes_first_while_it_could_still_wait() -> None:
    long, short = InvocationId("long"), InvocationId("short")
    queued = [(2.0, 4.0, long), (9.0, 1.0, short)]
    assert list(keep_most(queued, 1.0, 0.0, margin=2.0).start_by_s) == [short, long]
    assert list(keep_most(queued, 1.0, 0.0, margin=2.1).start_by_s) == [long, short]


@given(QUEUES, st.floats(1.0, 9.0), st.floats(1.0, 9.0))
def test_a_margin_changes_the_order_only(
    queued: list[Queued], stretch: float, margin: float
) -> None:
    plain = keep_most(queued, REPLICAS, 0.0, stretch)
    plan = keep_most(queued, REPLICAS, 0.0, stretch, margin)
    assert set(plan.start_by_s) == set(plain.start_by_s)
    assert plan.least_dropped_s == plain.least_dropped_s
    slower = keep_most(queued, REPLICAS / stretch, 0.0)
    assert set(plain.start_by_s) == set(slower.start_by_s), "stretched work is a slower replica"


LONG_QUEUES = st.lists(
    st.tuples(st.floats(0.0, 900.0), st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])), max_size=200
)


@given(LONG_QUEUES, st.floats(0.0, 900.0), st.floats(0.5, 9.0))
def test_a_call_that_came_later_goes_after_the_last_one_that_is_not_larger(
    calls: list[tuple[float, float]], latest_s: float, load_s: float
) -> None:
    """Of those that end before it must start."""
    queued = [(by_s, s, InvocationId(f"{n}")) for n, (by_s, s) in enumerate(calls)]
    plan = keep_most(queued, 1.0, 0.0)
    place = plan.place_of(InvocationId("new"), latest_s, load_s)
    if load_s >= plan.least_dropped_s:
        assert place == inf
        return
    places, loads = list(plan.start_by_s.values()), [queued[int(id)][1] for id in plan.start_by_s]
    assert plan.loads_s == loads
    assert plan.ends_s == pytest.approx([sum(loads[: n + 1]) for n in range(len(loads))])
    ahead = [n for n, s in enumerate(loads) if s <= load_s and plan.ends_s[n] <= latest_s]
    own = latest_s + BY_LOAD * load_s
    if ahead:
        assert place == min(own, places[ahead[-1]])
    elif places and loads[0] > load_s:
        assert place < places[0]
    else:
        assert place <= own


def test_what_is_kept_has_its_own_place() -> None:
    queued = [(5.0, 1.0, InvocationId("a")), (8.0, 3.0, InvocationId("b"))]
    plan = keep_most(queued, 1.0, 0.0)
    assert plan.place_of(InvocationId("a"), 20.0, 9.0) == pytest.approx(5.0, abs=2 * BY_LOAD)


def test_nothing_is_planned_for_an_empty_queue() -> None:
    plan = keep_most([], 1.0, 0.0)
    assert not plan.start_by_s
    assert plan.least_dropped_s == inf
