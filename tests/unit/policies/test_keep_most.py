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


@pytest.mark.parametrize(
    ("load_s", "place"),
    [
        pytest.param(0.5, 5.0, id="before the first larger one"),
        pytest.param(2.0, 8.0, id="before the last"),
        pytest.param(4.0, 20.0, id="behind all: by its own latest start"),
        pytest.param(9.0, inf, id="as large as one that is not kept"),
    ],
)
def test_a_call_that_came_later_has_a_place_too(load_s: float, place: float) -> None:
    calls = [(5.0, 1.0), (8.0, 3.0), (3.0, 9.0)]
    queued = [(by_s, s, InvocationId(f"{n}")) for n, (by_s, s) in enumerate(calls)]
    plan = keep_most(queued, 1.0, 0.0)
    assert list(plan.start_by_s) == ["0", "1"]
    assert plan.place_of(InvocationId("0"), 20.0, 9.0) == pytest.approx(5.0, abs=2 * BY_LOAD)
    assert plan.place_of(InvocationId("new"), 20.0, load_s) == pytest.approx(place, abs=5 * BY_LOAD)


def test_nothing_is_planned_for_an_empty_queue() -> None:
    plan = keep_most([], 1.0, 0.0)
    assert not plan.start_by_s
    assert plan.least_dropped_s == inf
