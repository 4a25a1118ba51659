"""Of an editor's buffer a pool serves the latest run alone, by whichever ingress it came."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.events import InvocationEnded, InvocationOffered
from cato.core.ids import InvocationId, PoolName, ReplicaId, RunId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.buffers import MAX_BUFFERS, MAX_HEAD_START_S
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of


def a_pool(*, slots: int = 1, binding: str = "late") -> PoolOrchestrator:
    """First come, first served, by one replica."""
    profile = a_profile()
    names = PoolPolicies(scheduler="least-wait", ordering="fcfs", binding=binding)
    pool = PoolOrchestrator(PoolName("p"), policies_of(names, profile))
    pool.handle(a_report(slots=slots, profile=profile))
    return pool


def a_call(run: str, began_at_s: float, *, buffer: str = "b", node: str = "fill") -> Invocation:
    call = an_invocation(f"{run}.{node}", arrived_at_s=began_at_s, deadline_s=began_at_s + 10)
    return replace(call, run_id=RunId(run), buffer=buffer, began_at_s=began_at_s)


def offered(pool: PoolOrchestrator, call: Invocation, now_s: float) -> list[Command]:
    return list(pool.handle(InvocationOffered(now_s, call)))


def ended(pool: PoolOrchestrator, call: Invocation, now_s: float) -> list[Command]:
    return list(pool.handle(InvocationEnded(now_s, call.id, call.attempt, 1, "done")))


def test_a_newer_run_takes_the_replica_of_the_older_one() -> None:
    pool, older, newer = a_pool(), a_call("old", 1.0), a_call("new", 2.0)
    offered(pool, older, 1.0)
    back, lease = offered(pool, newer, 2.0)
    assert back == Preempt(
        older.id, 1, ReplicaId("r"), "run new of the same buffer replaced it", True
    )
    assert isinstance(lease, Dispatch)
    assert lease.invocation_id == newer.id
    # Its ingress asks where it may go on: nowhere.
    (refused,) = offered(pool, older.continued(2, 5), 2.1)
    assert isinstance(refused, Refuse)
    assert refused.superseded


@pytest.mark.parametrize("binding", ["late", "early"])
def test_a_newer_run_takes_the_place_in_the_queue(binding: str) -> None:
    pool, busy = a_pool(binding=binding), a_call("busy", 0.0, buffer="")
    older, stranger, newer = a_call("old", 1.0), a_call("x", 2.0, buffer="c"), a_call("new", 3.0)
    for call in (busy, older, stranger):
        offered(pool, call, call.began_at_s)
    (refused,) = offered(pool, newer, 3.0)
    assert isinstance(refused, Refuse)
    assert (refused.invocation_id, refused.superseded) == (older.id, True)
    (lease,) = ended(pool, busy, 4.0)
    assert isinstance(lease, Dispatch)
    assert lease.invocation_id == newer.id, "it stands where the older one stood"
    assert pool.picture(4.0).refused == 0, "nobody was turned away for want of room"


def test_who_types_on_keeps_the_place_only_for_so_long() -> None:
    pool, busy = a_pool(), a_call("busy", 0.0, buffer="")
    offered(pool, busy, 0.0)
    offered(pool, a_call("k0", 1.0), 1.0)
    offered(pool, a_call("k1", 1.0 + MAX_HEAD_START_S / 2), 6.0)
    offered(pool, last := a_call("k2", 3.0 + MAX_HEAD_START_S), 13.0)
    (lease,) = ended(pool, busy, 14.0)
    assert isinstance(lease, Dispatch)
    assert lease.invocation_id == last.id
    assert lease.queue_s == 14.0 - 3.0


def test_nothing_is_kept_of_runs_that_were_replaced() -> None:
    """Their ingresses need not say another word of them."""
    pool = a_pool(slots=1)
    for n in range(100):
        offered(pool, a_call(f"run{n}", float(n)), float(n))
    assert (pool.queued, len(pool.leased)) == (0, 1)
    assert not pool._taken_back


def test_the_same_offer_again_keeps_its_place() -> None:
    pool, busy = a_pool(), a_call("busy", 0.0, buffer="")
    for call in (busy, a_call("old", 1.0), newer := a_call("new", 3.0), newer):
        offered(pool, call, call.began_at_s)
    (lease,) = ended(pool, busy, 4.0)
    assert isinstance(lease, Dispatch)
    assert lease.queue_s == 3.0


def test_the_calls_of_one_run_leave_each_other_alone() -> None:
    pool = a_pool(slots=2)
    first, second = (a_call("run", 1.0, node=n) for n in ("a", "b"))
    commands = offered(pool, first, 1.0) + offered(pool, second, 1.1)
    assert [type(c) for c in commands] == [Dispatch, Dispatch]
    back = offered(pool, a_call("new", 2.0), 2.0)[:2]
    assert [c.invocation_id for c in back] == [first.id, second.id]


def test_other_buffers_and_calls_without_one_are_left_alone() -> None:
    pool = a_pool(slots=4)
    for i, buffer in enumerate(("a", "b", "", "")):
        (lease,) = offered(pool, a_call(f"run{i}", float(i), buffer=buffer), float(i))
        assert isinstance(lease, Dispatch)


def test_a_call_that_comes_late_of_an_older_run_gets_nothing() -> None:
    pool = a_pool(slots=2)
    offered(pool, a_call("new", 2.0), 2.1)
    (refused,) = offered(pool, a_call("old", 1.0), 2.2)
    assert isinstance(refused, Refuse)
    assert refused.superseded
    assert refused.invocation_id == InvocationId("old.fill")


def test_buffers_that_are_long_unused_are_forgotten() -> None:
    pool = a_pool(slots=10**6)
    oldest = a_call("first", 0.0, buffer="first")
    offered(pool, oldest, 0.0)
    for i in range(MAX_BUFFERS):
        offered(pool, a_call(f"r{i}", 1.0, buffer=f"b{i}"), 1.0)
    (lease,) = offered(pool, a_call("second", 2.0, buffer="first"), 2.0)
    assert isinstance(lease, Dispatch), "the older run was not ended: nothing of it is known"
