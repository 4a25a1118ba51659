"""Speeds of running calls, measured from what replicas report."""

from __future__ import annotations

import pytest

from cato.core.events import ReplicaLost, ReplicaProgressed
from cato.core.ids import InvocationId, ReplicaId
from cato.estimators.speed_meter import INTERVALS_KEPT, LEAST_INTERVALS, SpeedMeter

ONE, TWO = ReplicaId("r1"), ReplicaId("r2")


def report(now_s: float, replica: ReplicaId = ONE, **tokens: int) -> ReplicaProgressed:
    told = tuple((InvocationId(id), n) for id, n in tokens.items())
    return ReplicaProgressed(now_s, replica, told)


def test_a_load_has_a_speed_once_enough_intervals_were_seen() -> None:
    meter = SpeedMeter()
    for n in range(LEAST_INTERVALS + 1):
        assert meter.news() is None
        meter.handle(report(float(n), a=20 * n, b=40 * n))
    assert meter.news() == {2: pytest.approx(30.0)}
    assert meter.news() is None, "nothing came since"


def test_a_call_that_joins_or_leaves_counts_in_the_load_and_has_no_speed_itself() -> None:
    meter = SpeedMeter()
    for n in range(LEAST_INTERVALS):
        meter.handle(report(10.0 * n, a=100, b=1, c=1))
        meter.handle(report(10.0 * n + 2.0, a=150))
        meter.handle(ReplicaLost(10.0 * n + 3.0, ONE, "gone"))
    assert meter.news() == {2: pytest.approx(25.0)}


def test_replicas_and_attempts_are_told_apart() -> None:
    meter = SpeedMeter()
    for n in range(3 * LEAST_INTERVALS):
        meter.handle(report(float(n), ONE, a=10 * n))
        meter.handle(report(float(n), TWO, b=10 * (n % 3)))  # preempted, and begun again
    assert meter.news() == {1: pytest.approx(10.0)}


def test_a_mean_follows_an_engine_that_became_slower() -> None:
    meter, tokens = SpeedMeter(), 0
    for n in range(6 * INTERVALS_KEPT):
        tokens += 100 if n < 3 * INTERVALS_KEPT else 50
        meter.handle(report(float(n), a=tokens))
    assert meter.news() == {1: pytest.approx(50.0, rel=0.1)}
