"""Calls that no SLO hangs on leave the last free place of a pool with few places to others."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from kits.builders import a_pool, a_profile, a_replica, a_report, an_invocation

from cato.core.commands import Dispatch
from cato.core.decision import Hold, Route
from cato.core.events import InvocationEnded, InvocationOffered
from cato.core.ids import PoolName
from cato.core.length import LengthBelief
from cato.core.orchestrator import PoolOrchestrator
from cato.core.snapshot import Invocation, PoolSnapshot
from cato.policies.admission.foresight import AGED_S
from cato.policies.routing.foresight import LEAVES_ROOM, ForesightRouting
from cato.policies.schedulers import foresight

PROFILE = a_profile(prefill_s=0.1, token_s=0.1)
NOW_S = 100.0


def a_busy_pool(
    *, replicas: int = 6, with_room: int = 1, in_time: float = 0.5, slots: int = 1
) -> PoolSnapshot:
    """One of the replicas with room is offered."""
    everyone = [
        a_replica(str(i), held=slots if i >= with_room else 0, slots=slots, profile=PROFILE)
        for i in range(replicas)
    ]
    pool = a_pool(everyone[0], now_s=NOW_S)
    return replace(pool, accepting=everyone, with_room=with_room, in_time=in_time)


def a_late_call(deadline_s: float = NOW_S - 1.0) -> Invocation:
    return an_invocation(arrived_at_s=NOW_S - 5.0, deadline_s=deadline_s)


def waits(invocation: Invocation, pool: PoolSnapshot) -> bool:
    decision = ForesightRouting().route(invocation, pool)
    assert isinstance(decision, Route) or decision == Hold(LEAVES_ROOM)
    return isinstance(decision, Hold)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (a_busy_pool(), True),
        (a_busy_pool(with_room=2), False),
        (a_busy_pool(replicas=30, with_room=3), True),
        (a_busy_pool(replicas=1), False),
        (a_busy_pool(replicas=2, with_room=2), False),
        (a_busy_pool(slots=16), False),
        (a_busy_pool(in_time=0.0), False),
    ],
    ids=["last", "another", "a tenth", "only", "idle", "many places", "all late"],
)
def test_a_late_call_leaves_the_last_place_of_few(pool: PoolSnapshot, expected: bool) -> None:
    assert waits(a_late_call(), pool) is expected


def test_a_call_that_can_be_in_time_takes_the_last_place() -> None:
    assert not waits(an_invocation(deadline_s=NOW_S + 10.0), a_busy_pool())


def test_a_call_that_may_be_short_enough_takes_the_last_place() -> None:
    call = an_invocation(tokens=20, deadline_s=NOW_S + 1.0)  # 20 tokens take 2 s
    assert waits(call, a_busy_pool())
    assert not waits(replace(call, length=LengthBelief((2.0, 4.0, 6.0, 60.0))), a_busy_pool())


def test_a_call_without_an_slo_leaves_the_last_place_until_it_has_aged() -> None:
    call = an_invocation(arrived_at_s=NOW_S - AGED_S + 1, deadline_s=inf)
    assert waits(call, a_busy_pool())
    assert not waits(replace(call, arrived_at_s=NOW_S - AGED_S), a_busy_pool())


def test_a_call_that_is_late_for_long_takes_any_place() -> None:
    assert not waits(a_late_call(NOW_S - AGED_S - 1), a_busy_pool())


def test_a_stream_that_goes_on_takes_any_place() -> None:
    assert waits(replace(a_late_call(), generated=5), a_busy_pool())
    assert not waits(replace(a_late_call(), generated=5, begun_in_time=True), a_busy_pool())


def test_where_nothing_is_in_time_no_place_is_kept() -> None:
    """Else a pool whose SLOs nothing can meet would serve with half of its replicas."""
    pool = PoolOrchestrator(PoolName("p"), foresight())
    for id in ("a", "b"):
        pool.handle(a_report(id, profile=PROFILE))
    begun = []
    for n in range(2):
        call = an_invocation(f"{n}", tokens=20, arrived_at_s=0.0, deadline_s=0.1)
        begun += [type(c) for c in pool.handle(InvocationOffered(0.0, call))]
    assert begun == [Dispatch, Dispatch]


def test_a_place_is_kept_once_work_in_time_was_seen_and_given_when_another_frees() -> None:
    pool = PoolOrchestrator(PoolName("p"), foresight())
    for id in ("a", "b"):
        pool.handle(a_report(id, profile=PROFILE))
    in_time = an_invocation("in-time", tokens=20, deadline_s=1e3)
    late = an_invocation("late", tokens=20, deadline_s=0.1)
    assert pool.handle(InvocationOffered(0.0, in_time))
    assert not pool.handle(InvocationOffered(0.1, late))
    assert pool.why_waiting(late.id) == LEAVES_ROOM
    ended = InvocationEnded(2.0, in_time.id, 1, 20, "done")
    (command,) = pool.handle(ended)
    assert isinstance(command, Dispatch)
    assert command.invocation_id == late.id


@pytest.mark.parametrize("slow_token_s", [0.1, 0.5], ids=["alike", "slow"])
def test_a_call_without_an_slo_goes_where_admission_lets_it_in(slow_token_s: float) -> None:
    """With two places a replica that runs a call keeps the other one for calls with an SLO."""
    pool = PoolOrchestrator(PoolName("p"), foresight())
    profile = a_profile(prefill_s=0.1, token_s=slow_token_s)
    pool.handle(a_report("busy", slots=2, profile=profile))
    assert pool.handle(InvocationOffered(0.0, an_invocation("first", tokens=20, deadline_s=inf)))
    pool.handle(a_report("idle", slots=2, profile=PROFILE))
    commands = pool.handle(InvocationOffered(0.1, an_invocation("second", deadline_s=inf)))
    assert [c.replica_id for c in commands if isinstance(c, Dispatch)] == ["idle"]
