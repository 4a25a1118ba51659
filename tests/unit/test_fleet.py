"""Replica counts stay within bounds, and what is loaded where is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.fleet import Bounds, ScaleTo, reconcile, why_infeasible
from cato.core.ids import DeploymentName, HostId, ModelName, PoolName, ReplicaId
from cato.core.residency import Residency, Resident

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
