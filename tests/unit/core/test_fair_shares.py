"""Tenants share a pool by tokens when it is full, and leave nothing idle."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_report, an_invocation

from cato.core.commands import Command, Dispatch, Refuse
from cato.core.events import InvocationEnded, InvocationOffered, ReplicaLost
from cato.core.fairness import CREDIT_TOKENS, OUTPUT_WEIGHT, TokenShares
from cato.core.ids import PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.policies import Policies
from cato.policies import schedulers


def serve(shares: TokenShares, tenant: str, tokens: int, weight: float = 1.0) -> None:
    shares.charge(tenant, weight, 0, tokens / OUTPUT_WEIGHT)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2000)), max_size=300))
def test_tenants_that_always_wait_stay_within_the_credit_of_each_other(
    wishes: list[tuple[str, int]],
) -> None:
    shares = TokenShares()
    for tenant in "abc":
        shares.joined(tenant)
    for wish, tokens in wishes:
        # The pool's order would take `wish`; it gets its way unless it is ahead of its share.
        behind = min("abc", key=shares.served)
        serve(shares, wish if shares.served(wish) <= shares.bound() else behind, tokens)
        served = [shares.served(t) for t in "abc"]
        assert max(served) - min(served) <= CREDIT_TOKENS / 2 + 2000


@given(st.integers(1, 10**9))
def test_who_waits_alone_is_never_held_back(tokens: int) -> None:
    shares = TokenShares()
    shares.joined("a")
    serve(shares, "a", tokens)
    assert shares.served("a") <= shares.bound()


@given(st.integers(1, 10**7), st.integers(1, 10**7))
def test_nobody_saves_up_more_than_the_credit(before: int, alone: int) -> None:
    shares = TokenShares()
    shares.joined("idle")
    serve(shares, "idle", before)
    shares.left("idle")
    shares.joined("busy")
    serve(shares, "busy", alone)
    shares.joined("idle")
    assert shares.served("busy") - shares.served("idle") <= CREDIT_TOKENS


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 200_000), st.floats(-1, 1))),
    st.booleans(),
)
def test_many_that_come_and_go_take_nobody_further_back_than_the_credit(
    calls: list[tuple[str, int, float]], is_queued: bool
) -> None:
    """Calls are charged as expected when they start, and corrected when they end."""
    shares = TokenShares()
    serve(shares, "heavy", 2_000_000)
    for tenant, tokens, error in calls:
        if is_queued:
            shares.joined(tenant)
            shares.left(tenant)
        else:
            shares.passed(tenant)
        served = [shares.served(t) for t in ("heavy", *"abcde")]
        assert max(served) - shares.served(tenant) <= CREDIT_TOKENS
        serve(shares, tenant, tokens)
        serve(shares, tenant, round(min(0.0, error) * tokens))
    shares.joined("new")
    assert max(map(shares.served, ("heavy", *"abcde"))) - shares.served("new") <= CREDIT_TOKENS


def test_who_expected_more_than_it_got_holds_up_no_newcomer() -> None:
    shares = TokenShares()
    for _ in range(100):
        shares.passed("a")
        serve(shares, "a", 20_000)
    for _ in range(100):
        serve(shares, "a", -19_900)  # the answers were short
    shares.joined("new")
    shares.joined("a")
    assert shares.served("new") <= shares.bound()


def test_a_weight_of_two_is_served_twice_as_much() -> None:
    shares = TokenShares()
    weights = {"a": 1.0, "b": 2.0}
    got = dict.fromkeys(weights, 0)
    for tenant in weights:
        shares.joined(tenant)
    for _ in range(10_000):
        tenant = min(weights, key=shares.served)
        serve(shares, tenant, 100, weights[tenant])
        got[tenant] += 100
    assert abs(got["b"] / got["a"] - 2) < 0.01


def a_pool(policies: Policies, places: int) -> PoolOrchestrator:
    pool = PoolOrchestrator(PoolName("p"), policies)
    pool.handle(a_report("r", slots=places, standby=0))
    return pool


def offered(
    pool: PoolOrchestrator, id: str, tenant: str, now_s: float = 0.0, *, tokens: int = 50
) -> tuple[Command, ...]:
    invocation = an_invocation(id, tokens=tokens, arrived_at_s=now_s, deadline_s=now_s + 100)
    return pool.handle(InvocationOffered(now_s, replace(invocation, tenant=tenant)))


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", "end"]), st.integers(1, 40_000))),
    st.integers(1, 3),
)
def test_no_place_is_idle_while_any_tenant_waits(steps: list[tuple[str, int]], places: int) -> None:
    pool = a_pool(schedulers.cato(), places)
    running: list[str] = []
    for n, (step, tokens) in enumerate(steps):
        if step == "end":
            if not running:
                continue
            id = running.pop(0)
            commands = pool.handle(InvocationEnded(float(n), id, 1, tokens, "done"))  # type: ignore[arg-type]
        else:
            commands = offered(pool, f"{n}", step, float(n), tokens=tokens)
        running += [c.invocation_id for c in commands if isinstance(c, Dispatch)]
        assert len(running) == places or pool.picture(float(n)).queued == 0


def test_who_had_more_lets_the_other_go_first_and_gets_what_is_left() -> None:
    # With preemption the second of the flood takes the place of the first, which will be late.
    pool = a_pool(replace(schedulers.foresight(), patience_s=inf, preemption=None), places=1)
    offered(pool, "flood-0", "flood", tokens=40_000)
    for n in range(1, 4):
        offered(pool, f"flood-{n}", "flood")
    offered(pool, "late", "other")
    order = []
    for now_s in range(5):
        (id,) = pool.leased
        order.append(id)
        pool.handle(InvocationEnded(float(now_s), id, 1, 40_000 if now_s == 0 else 50, "done"))
    assert order[:2] == ["flood-0", "late"]
    assert len(order) == 5


@pytest.mark.parametrize("small_tenants", [0, 1, 20])
def test_small_tenants_in_between_do_not_starve_one_that_had_much(small_tenants: int) -> None:
    pool = a_pool(replace(schedulers.foresight(), patience_s=inf), places=1)
    tenants = ["heavy", *(f"small-{n}" for n in range(small_tenants))]
    for now_s, tenant in enumerate(tenants):  # none of them waits
        tokens = 400_000 if tenant == "heavy" else 50
        offered(pool, tenant, tenant, float(now_s), tokens=tokens)
        (id,) = pool.leased
        pool.handle(InvocationEnded(now_s + 0.5, id, 1, tokens, "done"))
    for tenant in ("other", "heavy"):
        for n in range(40):
            offered(pool, f"{tenant}-again-{n}", tenant, 100.0, tokens=1_000)
    others = 0
    while "heavy" not in (id := next(iter(pool.leased))):
        others += 1
        pool.handle(InvocationEnded(101.0 + others, id, 1, 1_000, "done"))
    assert (others - 1) * 1_000 * OUTPUT_WEIGHT <= CREDIT_TOKENS


def test_nobody_pays_for_what_a_lost_replica_did_not_generate() -> None:
    pool = a_pool(schedulers.foresight(), places=1)
    offered(pool, "i", "unlucky", tokens=30_000)
    pool.handle(ReplicaLost(1.0, ReplicaId("r"), "host died"))
    offered(pool, "again", "unlucky", 2.0)
    offered(pool, "other", "other", 3.0)
    pool.handle(a_report("r", now_s=4.0))
    assert pool.leased == {"again"}


@pytest.mark.parametrize("tenants", [("flood",), ("flood", "other")])
def test_a_flood_fills_only_its_part_of_the_queue(tenants: tuple[str, ...]) -> None:
    pool = a_pool(replace(schedulers.foresight(), max_queued=10), places=1)
    refused = 0
    for n in range(30):
        refused += any(isinstance(c, Refuse) for c in offered(pool, f"flood-{n}", "flood"))
    assert refused == 19  # one runs, ten wait
    for n in range(5):
        answer = offered(pool, f"own-{n}", tenants[-1])
        assert any(isinstance(c, Refuse) for c in answer) == (tenants == ("flood",))
