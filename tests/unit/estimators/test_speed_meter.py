"""Speeds of finished calls, measured from what a pool hears and orders."""

from __future__ import annotations

import pytest

from cato.core.commands import Dispatch, Preempt
from cato.core.events import (
    InvocationEnded,
    InvocationWithdrawn,
    ReplicaLost,
    ReplicaReported,
    StreamLost,
    Ticked,
)
from cato.core.ids import DeploymentName, InvocationId, ReplicaId
from cato.core.pool.leases import LEASE_GRACE_S
from cato.core.profile import UNMEASURED
from cato.estimators.speed_meter import CALLS_KEPT, LEAST_CALLS, SpeedMeter

ONE, TWO = ReplicaId("r1"), ReplicaId("r2")


def start(
    meter: SpeedMeter, id: str, at_s: float, *, replica: ReplicaId = ONE, attempt: int = 1
) -> None:
    lease = Dispatch(
        InvocationId(id), attempt, replica, DeploymentName("d"), 0, 0.0, 0.0, 0.0, "it has room"
    )
    meter.handle(Ticked(at_s), (lease,))


def end(
    meter: SpeedMeter,
    id: str,
    at_s: float,
    *,
    tokens: int = 100,
    attempt: int = 1,
    outcome: str = "done",
) -> None:
    meter.handle(InvocationEnded(at_s, InvocationId(id), attempt, tokens, outcome), ())


def alone(meter: SpeedMeter, times: int, from_s: float = 0.0, took_s: float = 2.0) -> None:
    """Calls one after another, of 100 tokens."""
    for n in range(times):
        start(meter, f"a{n}", from_s + took_s * n)
        end(meter, f"a{n}", from_s + took_s * (n + 1))


def test_a_call_has_the_speed_of_its_whole_time_with_its_prompt() -> None:
    meter = SpeedMeter()
    alone(meter, LEAST_CALLS - 1)
    assert meter.news() is None, "so few calls say little"
    alone(meter, 1, 100.0)
    assert meter.news() == {1: pytest.approx(50.0)}
    assert meter.news() is None, "nothing came since"


def test_the_load_of_a_call_is_the_mean_of_its_time() -> None:
    meter = SpeedMeter()
    for n in range(LEAST_CALLS):
        at_s = 100.0 * n
        start(meter, "long", at_s)
        start(meter, "b", at_s)
        start(meter, "c", at_s)
        end(meter, "b", at_s + 9.0, tokens=90)
        end(meter, "c", at_s + 9.0, tokens=90)
        end(meter, "long", at_s + 10.0, tokens=80)  # beside two for nine of its ten seconds
    assert meter.news() == {3: pytest.approx((2 * 10.0 + 8.0) / 3)}


def test_replicas_are_told_apart() -> None:
    meter = SpeedMeter()
    for n in range(LEAST_CALLS):
        start(meter, "a", 10.0 * n, replica=ONE)
        start(meter, "b", 10.0 * n, replica=TWO)
        end(meter, "a", 10.0 * n + 2.0)
        end(meter, "b", 10.0 * n + 2.0)
    assert meter.news() == {1: pytest.approx(50.0)}


def test_a_lease_that_is_told_again_goes_on() -> None:
    meter = SpeedMeter()
    for n in range(LEAST_CALLS):
        start(meter, "a", 10.0 * n)
        start(meter, "a", 10.0 * n + 1.0)
        end(meter, "a", 10.0 * n + 2.0)
    assert meter.news() == {1: pytest.approx(50.0)}


def test_what_does_not_end_there_has_no_speed_and_is_not_counted_beside_others() -> None:
    id = InvocationId("x")
    lost = ReplicaLost(1.0, ONE, "gone")
    unknown = ReplicaReported(
        LEASE_GRACE_S + 1.0, ONE, DeploymentName("d"), UNMEASURED, 1, 0, True, ()
    )
    for event in (
        lost,
        unknown,
        InvocationWithdrawn(1.0, id, 1, "left"),
        StreamLost(1.0, ONE, id, 1, "broke"),
        InvocationEnded(1.0, id, 1, 5, "stopped"),
    ):
        meter = SpeedMeter()
        start(meter, "x", 0.0)
        meter.handle(event, ())
        alone(meter, LEAST_CALLS, 100.0)
        assert meter.news() == {1: pytest.approx(50.0)}, event


def test_the_rest_of_a_preempted_call_has_no_speed() -> None:
    meter = SpeedMeter()
    for n in range(LEAST_CALLS):
        start(meter, "x", 10.0 * n)
        meter.handle(Ticked(10.0 * n + 1.0), (Preempt(InvocationId("x"), 1, ONE, "it yields"),))
        start(meter, "x", 10.0 * n + 2.0, attempt=2)
        end(meter, "x", 10.0 * n + 3.0, attempt=2)
    assert meter.news() is None
    alone(meter, LEAST_CALLS, 100.0)
    assert meter.news() == {1: pytest.approx(50.0)}


def test_a_mean_follows_an_engine_that_became_slower() -> None:
    meter = SpeedMeter()
    alone(meter, 3 * CALLS_KEPT)
    alone(meter, 3 * CALLS_KEPT, 1000.0, took_s=4.0)
    assert meter.news() == {1: pytest.approx(25.0, rel=0.1)}
