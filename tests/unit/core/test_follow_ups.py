"""A call announces the calls after it, in its own pool and in others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_node, a_workflow

from cato.core.demand import CallKind, PoolDemand
from cato.core.follow_ups import CallBook, FollowUps, Provision, calls_before, pool_loads
from cato.core.ids import NodeId, PoolName, TaskName
from cato.core.scaling import Arrivals
from cato.core.workflow import NodeKind

A, B = PoolName("a"), PoolName("b")


# Pools together


def a_demand(
    arrived: dict[str, Arrivals] | None = None, unfinished: dict[str, int] | None = None
) -> PoolDemand:
    def kind(node: str) -> CallKind:
        return CallKind(TaskName("t"), NodeId(node))

    return PoolDemand(
        1.0,
        {kind(n): a for n, a in (arrived or {}).items()},
        {kind(n): c for n, c in (unfinished or {}).items()},
        *(0, 0, 0.0, 1, (), ()),
    )


AFTER = {
    CallKind(TaskName("t"), NodeId("first")): FollowUps({B: 4.0}, begins=True),
    CallKind(TaskName("t"), NodeId("second")): FollowUps(),
}
PROVISIONS = dict.fromkeys((A, B), Provision(1, 6, 0, 20.0))


def test_a_call_in_one_pool_announces_work_in_another() -> None:
    demands = {A: a_demand({"first": Arrivals(2, 6.0)}, {"first": 3}), B: a_demand()}
    loads = pool_loads(demands, PROVISIONS, AFTER)
    assert loads[A].begun == loads[A].arrived == Arrivals(2, 6.0)
    assert loads[A].coming_s == 0.0
    assert (loads[B].begun, loads[B].arrived) == (Arrivals(2, 8.0), Arrivals())
    assert loads[B].coming_s == 12.0


def test_a_second_call_begins_no_run_and_an_unknown_one_does() -> None:
    demands = {B: a_demand({"second": Arrivals(1, 3.0)}), A: a_demand({"new": Arrivals(1, 2.0)})}
    loads = pool_loads(demands, PROVISIONS, AFTER)
    assert (loads[B].begun, loads[B].arrived) == (Arrivals(), Arrivals(1, 3.0))
    assert loads[A].begun == Arrivals(1, 2.0)


# Which calls announce others


def test_the_order_of_the_calls_passes_over_other_nodes() -> None:
    workflow = a_workflow(
        a_node("draft"),
        a_node("check", "draft", kind=NodeKind.TRANSFORM),
        a_node("test", "draft"),
        a_node("refine", "check", "draft", "test"),
    )
    assert calls_before(workflow) == {"draft": (), "test": ("draft",), "refine": ("draft", "test")}


def a_book(*calls: tuple[str, PoolName, float, float], now_s: float = 0.0) -> CallBook:
    """Of (node, pool, count, work of each)."""
    book = CallBook()
    for node, pool, count, work_s in calls:
        book.learn(now_s, {pool: a_demand({node: Arrivals(count, count * work_s)})})
    return book


def after(book: CallBook, needs: dict[str, tuple[str, ...]], node: str) -> FollowUps:
    calls = {NodeId(n): tuple(NodeId(x) for x in before) for n, before in needs.items()}
    return book.follow_ups({TaskName("t"): calls})[CallKind(TaskName("t"), NodeId(node))]


CHAIN = {"draft": (), "review": ("draft",), "refine": ("review",)}


def test_a_call_announces_those_after_it_as_often_as_they_come() -> None:
    book = a_book(("draft", A, 100, 1.0), ("review", B, 100, 2.0), ("refine", A, 25, 4.0))
    assert after(book, CHAIN, "draft") == FollowUps({B: 2.0, A: 1.0}, begins=True)
    assert after(book, CHAIN, "review") == FollowUps({A: 1.0})
    assert after(book, CHAIN, "refine") == FollowUps()


def test_calls_that_others_wait_for_share_what_they_announce() -> None:
    needs = {"left": (), "right": (), "join": ("left", "right")}
    book = a_book(("left", A, 40, 1.0), ("right", A, 40, 1.0), ("join", B, 40, 6.0))
    assert after(book, needs, "left") == FollowUps({B: 3.0}, begins=True, share=0.5)


@given(
    counts=st.lists(st.integers(10, 200), min_size=3, max_size=3),
    works=st.lists(st.floats(0.1, 9.0), min_size=3, max_size=3),
)
def test_what_is_announced_is_what_comes(counts: list[int], works: list[float]) -> None:
    needs = {"a": (), "b": (), "c": ("a", "b")}
    book = a_book(*((n, A, c, w) for n, c, w in zip(needs, counts, works, strict=True)))
    announced = sum(
        count * after(book, needs, node).work_s.get(A, 0.0)
        for node, count in zip(needs, counts, strict=True)
    )
    assert announced == pytest.approx(counts[2] * works[2])


def test_a_few_calls_announce_nothing_and_old_ones_are_forgotten() -> None:
    few = a_book(("draft", A, 4, 1.0), ("review", B, 4, 2.0))
    assert after(few, CHAIN, "draft") == FollowUps(begins=True)
    old = a_book(("draft", A, 100, 1.0), ("review", B, 100, 2.0))
    old.learn(36_000.0, {})
    assert after(old, CHAIN, "draft") == FollowUps(begins=True)


def test_what_calls_come_to_is_learnt_anew() -> None:
    book = a_book(("draft", A, 100, 1.0), ("review", B, 100, 2.0))
    for hour in range(1, 6):
        book.learn(3600.0 * hour, {A: a_demand({"draft": Arrivals(100, 100.0)})})
    assert after(book, CHAIN, "draft").work_s[B] < 0.1
