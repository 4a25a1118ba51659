"""Replica counts stay within bounds, and what is loaded where is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_profile

from cato.core.fleet import (
    PENDING_LIMIT_S,
    Bounds,
    HostResources,
    Room,
    ScaleTo,
    ServedDeployment,
    allot,
    call_price,
    ceiling,
    more_that_fit,
    reconcile,
    resource_needs,
    why_infeasible,
)
from cato.core.ids import DeploymentName, HostId, ModelName, PoolName, ReplicaId
from cato.core.residency import Residency, Resident
from cato.core.topology import DeploymentSpec, EngineSpec

D, E = DeploymentName("d"), DeploymentName("e")


def test_counts_that_a_redeploy_reset_are_asserted_again() -> None:
    bounds = {E: Bounds(0, 4, 3), D: Bounds(1, 2, 2)}
    assert reconcile(bounds, {D: 2, E: 1}) == (ScaleTo(E, 3, "1 replicas; 3 wanted within 0..4"),)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(-3, 9), st.integers(0, 9))
def test_what_is_asked_for_stays_within_the_bounds_and_settles(
    low: int, extra: int, wanted: int, target: int
) -> None:
    bounds = {D: Bounds(low, low + extra, wanted)}
    commands = reconcile(bounds, {D: target})
    goal = commands[0].replicas if commands else target
    assert low <= goal <= low + extra
    assert reconcile(bounds, {D: goal}) == ()


def test_a_deployment_that_serve_does_not_know_is_left_alone() -> None:
    assert reconcile({D: Bounds(1, 2, 2)}, {E: 7}) == ()


HOSTS = ({"CPU": 8.0}, {"CPU": 2.0, "GPU": 1.0, "memory": 1e9})


@pytest.mark.parametrize("needs", [{"CPU": 8.0}, {"GPU": 1.0, "CPU": 2.0}, {"NPU": 0.0}, {}])
def test_a_replica_that_fits_on_one_host_is_feasible(needs: dict[str, float]) -> None:
    assert why_infeasible(needs, HOSTS) is None


@pytest.mark.parametrize(
    ("needs", "hosts", "why"),
    [
        (
            {"CPU": 2.0, "GPU": 4.0},
            HOSTS,
            "a replica needs 2 CPU, 4 GPU on one host; the most any host has is 8 CPU, 1 GPU",
        ),
        (
            {"CPU": 4.0, "GPU": 1.0},
            HOSTS,
            "a replica needs 4 CPU, 1 GPU on one host; no host has all of it at once",
        ),
        ({"CPU": 1.0}, (), "a replica needs 1 CPU on one host; the most any host has is 0 CPU"),
    ],
)
def test_the_reason_says_what_is_missing(
    needs: dict[str, float], hosts: tuple[dict[str, float], ...], why: str
) -> None:
    assert why_infeasible(needs, hosts) == why


def a_spec(
    *, low: int = 0, high: int = 4, slots: int = 8, cost: float = 1.0, **shape: Any
) -> DeploymentSpec:
    engine = EngineSpec("simulated", max_num_seqs=slots)
    options: dict[str, Any] = {"accelerator": "cpu", **shape}
    return DeploymentSpec(
        D, engine=engine, min_replicas=low, max_replicas=high, cost=cost, **options
    )


def test_a_replica_needs_its_cards_on_a_host_of_their_type() -> None:
    gpu = a_spec(accelerator="gpu", cards=2, cpus=4.0, accelerator_type="H200")
    assert resource_needs(gpu) == {"CPU": 4.0, "GPU": 2.0, "accelerator_type:H200": 0.001}
    npu = a_spec(accelerator="npu", cards=1, resources={"fast_disk": 1.0})
    assert resource_needs(npu) == {"CPU": 1.0, "NPU": 1.0, "fast_disk": 1.0}


def hosts(*free: dict[str, float]) -> list[HostResources]:
    return [HostResources(f, f) for f in free]


@pytest.mark.parametrize(
    ("free", "fit"),
    [
        (hosts({"CPU": 9.0, "GPU": 4.0}), 2),  # two cards each, on one host
        (hosts({"CPU": 9.0, "GPU": 1.0}, {"CPU": 9.0, "GPU": 1.0}), 0),
        (hosts({"CPU": 1.0, "GPU": 4.0}, {"CPU": 9.0, "GPU": 3.0}), 2),
        (hosts({"CPU": 0.3, "GPU": 8.0}), 0),
        (hosts({"CPU": 99.0, "GPU": 99.0}), 5),  # no more than asked for
        ([], 0),
    ],
)
def test_replicas_fit_where_one_host_has_all_they_need(free: list[HostResources], fit: int) -> None:
    assert more_that_fit({"CPU": 1.0, "GPU": 2.0}, free, 5) == fit


def test_rounding_hides_no_room() -> None:
    assert more_that_fit({"CPU": 0.1}, hosts({"CPU": 0.1 + 0.1 + 0.1 - 0.2}), 5) == 1


def ids(n: int) -> frozenset[ReplicaId]:
    return frozenset(ReplicaId(str(i)) for i in range(n))


def test_growth_ends_where_the_room_ends_and_at_the_bounds() -> None:
    served = ServedDeployment(2, running=ids(1), starting=ids(1))
    assert ceiling(a_spec(high=9), served, 3, 0.0) == 5
    assert ceiling(a_spec(high=4), served, 3, 0.0) == 4
    assert ceiling(a_spec(low=3, high=9), ServedDeployment(0), 0, 0.0) == 3


def test_what_was_ordered_stands_until_it_finds_no_room_for_long() -> None:
    served = ServedDeployment(3, running=ids(1), pending=ids(2))
    assert ceiling(a_spec(), served, 0, PENDING_LIMIT_S - 1) == 3
    assert ceiling(a_spec(), served, 0, PENDING_LIMIT_S) == 1
    # A replica that died has no successor in Serve's list yet.
    assert ceiling(a_spec(), ServedDeployment(3, running=ids(2)), 0, 0.0) == 3


def test_a_call_costs_its_share_of_a_full_replica() -> None:
    profile = a_profile(prefill_s=0.0, token_s=0.1, slots=4)
    one = call_price(a_spec(slots=1), profile)
    assert one == pytest.approx(6.3)  # 63 steps after the first token
    assert call_price(a_spec(slots=64), profile) == pytest.approx(one / 4)
    assert call_price(a_spec(slots=1, cost=2.0), profile) == pytest.approx(2 * one)


CHEAP, DEAR = Room(D, 1, 3, price=1.0), Room(E, 0, 3, price=2.0)


@pytest.mark.parametrize(
    ("replicas", "wanted", "goal"),
    [
        (4, (1, 1), (3, 1)),  # where a call is cheapest
        (6, (1, 1), (3, 3)),
        (9, (1, 1), (3, 3)),  # there is no more room
        (2, (2, 2), (2, 0)),  # from where it is dearest
        (0, (2, 2), (1, 0)),
        (3, (1, 2), (1, 2)),  # nothing moves without need
    ],
)
def test_replicas_come_cheap_and_go_dear(
    replicas: int, wanted: tuple[int, int], goal: tuple[int, int]
) -> None:
    found = allot(replicas, {D: wanted[0], E: wanted[1]}, [DEAR, CHEAP])
    assert (found[D], found[E]) == goal


some_rooms = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from([1.0, 2.0])), min_size=1
)


@given(some_rooms, st.integers(-2, 30), st.data())
def test_replicas_stay_in_their_rooms_and_move_one_way_only(
    shapes: list[tuple[int, int, float]], replicas: int, data: st.DataObject
) -> None:
    rooms = [
        Room(DeploymentName(str(i)), low, low + more, price)
        for i, (low, more, price) in enumerate(shapes)
    ]
    wanted = {r.deployment: data.draw(st.integers(r.low, r.high)) for r in rooms}
    goal = allot(replicas, wanted, rooms)
    assert all(r.low <= goal[r.deployment] <= r.high for r in rooms)
    least, most = sum(r.low for r in rooms), sum(r.high for r in rooms)
    assert sum(goal.values()) == max(least, min(most, replicas))
    assert len({goal[n] > wanted[n] for n in goal if goal[n] != wanted[n]}) <= 1
    assert allot(replicas, goal, rooms) == goal


def a_resident(id: str, *, deployment: DeploymentName = D, state: str = "ready") -> Resident:
    return Resident(
        ReplicaId(id), PoolName("p"), deployment, ModelName("m"), HostId("h"), "gpu", 1, state, 3.0
    )


def a_book(*residents: Resident) -> Residency:
    book = Residency()
    for resident in residents:
        book.report(0.0, resident)
    return book


def test_the_newest_report_of_a_replica_counts() -> None:
    book = Residency()
    book.report(2.0, a_resident("r", state="ready"))
    book.report(1.0, a_resident("r", state="starting"))
    assert [r.state for r in book.all()] == ["ready"]
    book.report(2.0, a_resident("r", state="failed"))
    assert [r.state for r in book.all()] == ["failed"]


def test_residents_are_listed_by_id_and_forgotten_when_removed_or_silent() -> None:
    book = a_book(a_resident("b"), a_resident("a"), a_resident("c"))
    assert [r.replica_id for r in book.all()] == ["a", "b", "c"]
    book.remove(ReplicaId("b"))
    book.remove(ReplicaId("unknown"))
    book.report(6.0, a_resident("a"))
    book.forget_silent(10.0, 10.0)
    assert [r.replica_id for r in book.all()] == ["a", "c"]
    book.forget_silent(10.1, 10.0)
    assert [r.replica_id for r in book.all()] == ["a"]


def test_a_copy_may_go_when_enough_others_can_serve() -> None:
    book = a_book(a_resident("a"), a_resident("b"), a_resident("c", deployment=E))
    assert book.why_not_unload(ReplicaId("a"), 1) is None
    assert book.why_not_unload(ReplicaId("c"), 0) is None
    assert book.why_not_unload(ReplicaId("a"), 2) == (
        "1 ready copies would be left in 'd'; 2 must stay"
    )
    assert book.why_not_unload(ReplicaId("x"), 0) == "replica 'x' holds no model"


def test_a_copy_that_is_still_loading_does_not_replace_one_that_serves() -> None:
    book = a_book(a_resident("a"), a_resident("b", state="starting"))
    assert book.why_not_unload(ReplicaId("a"), 1) is not None
    assert book.why_not_unload(ReplicaId("b"), 1) is None
