"""Each scaling policy is the rule it says it is, and the meter counts each call once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_profile, a_replica, a_report, an_invocation
from ray.serve.autoscaling_policy import _apply_delay_logic, _apply_scaling_factors
from ray.serve.config import AutoscalingConfig

from cato.core.demand import FORGET_AFTER_S, CallKind, PoolDemand, PoolMeter
from cato.core.errors import UnknownNameError
from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
)
from cato.core.ids import DeploymentName, InvocationId, NodeId, PoolName, ReplicaId, TaskName
from cato.core.orchestrator import PoolPicture
from cato.core.scaling import Arrivals, Finished, PoolLoad, ReplicaLoad, ScalingPolicy
from cato.core.snapshot import ReplicaSnapshot
from cato.core.topology import PoolScaling
from cato.policies.scaling.cato import CatoScaling
from cato.policies.scaling.forecast import Forecast, poisson_quantile
from cato.policies.scaling.idle import IdleToZero
from cato.policies.scaling.queue_length import QueueLength
from cato.policies.scaling.registry import SCALING, scaling_policy

A = PoolName("a")
NONE = Arrivals()


def a_load(
    now_s: float = 0.0,
    *,
    ready: int = 1,
    idle: int = 0,
    idle_s: float = 0.0,
    starting: int = 0,
    queued: int = 0,
    queued_s: float = 0.0,
    coming_s: float = 0.0,
    begun: Arrivals = NONE,
    arrived: Arrivals = NONE,
    finished: tuple[Finished, ...] = (),
    places: int = 1,
    min_replicas: int = 1,
    max_replicas: int = 6,
) -> PoolLoad:
    """`ready` replicas of which `idle` have been so for `idle_s`; the others run one call each."""
    replicas = tuple(
        ReplicaLoad(ReplicaId(str(i)), int(i >= idle), idle_s if i < idle else 0.0)
        for i in range(ready)
    )
    return PoolLoad(
        now_s, min_replicas, max_replicas, replicas, starting, 20.0, places, queued, ready - idle,
        queued_s, coming_s, arrived, begun, finished,
    )  # fmt: skip


def answers(policy: ScalingPolicy[Any], loads: Iterable[PoolLoad]) -> list[int]:
    state, replicas = policy.initial(), []
    for load in loads:
        scale, state = policy.decide(load, state)
        replicas.append(scale.replicas)
    return replicas


# All policies

some_loads = st.lists(
    st.builds(
        a_load,
        ready=st.integers(0, 6),
        starting=st.integers(0, 3),
        queued=st.integers(0, 50),
        queued_s=st.floats(0, 500),
        coming_s=st.floats(0, 100),
        begun=st.builds(Arrivals, st.floats(0, 50), st.floats(0, 300)),
        finished=st.lists(st.builds(Finished, *[st.floats(0, 60)] * 4), max_size=8).map(tuple),
        min_replicas=st.integers(0, 2),
    ),
    max_size=12,
)


@pytest.mark.parametrize("name", list(SCALING))
@given(loads=some_loads)
def test_answers_are_within_the_bounds_and_the_same_when_asked_again(
    name: str, loads: list[PoolLoad]
) -> None:
    policy = scaling_policy(PoolScaling(name, idle_timeout_s=3.0))
    assert policy is not None
    state = policy.initial()
    for i, load in enumerate(loads):
        told = replace(load, now_s=float(i))
        assert policy.decide(told, state) == policy.decide(told, state)
        scale, state = policy.decide(told, state)
        assert load.min_replicas <= scale.replicas <= 6
        assert scale.reason


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownNameError, match="queue-length"):
        scaling_policy(PoolScaling("queue-lenght"))


def test_without_a_policy_nothing_is_scaled() -> None:
    assert scaling_policy(PoolScaling("none")) is None


# Queue length: Ray Serve's own functions are the reference


@given(
    ongoing=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    up_s=st.sampled_from([0.0, 3.0, 30.0]),
    down_s=st.sampled_from([0.0, 5.0]),
    target=st.sampled_from([1.0, 2.0, 3.5]),
    factor=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_queue_length_decides_as_ray_serve_does(
    ongoing: list[int], up_s: float, down_s: float, target: float, factor: float
) -> None:
    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=6,
        target_ongoing_requests=target,
        upscaling_factor=factor,
        downscaling_factor=factor,
        upscale_delay_s=up_s,
        downscale_delay_s=down_s,
    )
    ours = QueueLength(target, factor, factor, up_s, down_s, 1e-9, 0.0)
    state, memory = ours.initial(), dict[str, Any]()
    replicas = 1
    for i, calls in enumerate(ongoing):
        raw = calls / (target * replicas) * replicas
        desired = _apply_scaling_factors(raw, replicas, config)
        theirs, memory = _apply_delay_logic(max(0, desired), replicas, config, memory, float(i))
        theirs = max(1, min(6, theirs))
        told = a_load(float(i), ready=replicas, idle=replicas, queued=calls)
        scale, state = ours.decide(told, state)
        assert scale.replicas == theirs
        replicas = theirs


def test_the_defaults_of_queue_length_are_those_of_ray_serve() -> None:
    ray, ours = AutoscalingConfig(), QueueLength()
    for name in QueueLength.__slots__:
        theirs = getattr(ray, name)
        assert getattr(ours, name) == (1.0 if theirs is None else theirs), name


def test_queue_length_looks_at_the_mean_of_its_period_only_when_metrics_come() -> None:
    policy = QueueLength(1.0, upscale_delay_s=0.0, look_back_period_s=4.0, metrics_interval_s=2.0)
    loads = [a_load(float(t), queued=q, idle=1) for t, q in enumerate([1, 1, 4, 6, 6])]
    # Means when told: 1 at 0 s, (1+1+4)/3 at 2 s, (1+4+6+6)/4 at 4 s.
    assert answers(policy, loads) == [1, 1, 2, 2, 5]


# CATO, Algorithm 2


def a_call(latency_s: float, *, slack_s: float = -1.0, downstream_s: float = 0.0) -> Finished:
    """Two seconds of execution."""
    return Finished(latency_s, 2.0, slack_s, downstream_s)


LATE = a_call(10.0)


def test_cato_adds_the_violations_that_no_idle_replica_can_take() -> None:
    loads = [a_load(finished=(LATE,) * 3), a_load(finished=(LATE,)), a_load()]
    assert answers(CatoScaling(max_exceeded_times=3), loads) == [1, 5, 1]


@pytest.mark.parametrize(
    "call",
    [
        a_call(2.3),  # hardly slower than alone
        a_call(10.0, slack_s=5.0, downstream_s=4.0),  # slow, but there is time
    ],
)
def test_cato_counts_only_what_is_slow_and_short_of_slack(call: Finished) -> None:
    loads = [a_load(finished=(call,) * 20)] * 5
    assert answers(CatoScaling(), loads) == [1] * 5


def test_cato_counts_a_slow_call_whose_followers_do_not_fit_any_more() -> None:
    call = a_call(10.0, slack_s=3.0, downstream_s=4.0)
    assert answers(CatoScaling(), [a_load(finished=(call,) * 4)]) == [5]


def test_cato_does_not_order_again_while_replicas_start() -> None:
    load = a_load(starting=4, finished=(LATE,) * 4)
    assert answers(CatoScaling(), [load]) == [5]
    assert answers(CatoScaling(is_literal=True), [replace(load, finished=())]) == [5]


def test_cato_as_printed_sees_no_violation_in_waits_shorter_than_a_start() -> None:
    loads = [a_load(finished=(a_call(20.0),) * 20)] * 5
    assert answers(CatoScaling(is_literal=True), loads) == [1] * 5
    assert answers(CatoScaling(), loads)[0] == 6


def test_cato_lets_go_of_what_was_idle_for_its_timeout() -> None:
    policy = CatoScaling(idle_timeout_s=30.0)
    assert answers(policy, [a_load(ready=4, idle=2, idle_s=29.0)]) == [4]
    assert answers(policy, [a_load(ready=4, idle=2, idle_s=30.0)]) == [2]


# Forecast


@given(mean=st.floats(0.0, 300.0), p=st.floats(0.01, 0.999))
def test_the_poisson_quantile_is_the_smallest_count_that_covers(mean: float, p: float) -> None:
    n = poisson_quantile(mean, p)

    def covered(k: int) -> float:
        terms = (k_ * math.log(mean) - mean - math.lgamma(k_ + 1) for k_ in range(k + 1))
        return math.fsum(math.exp(t) for t in terms) if mean > 0 else 1.0

    slack = 1e-9 if mean <= 200 else 0.03  # the normal law beyond: one count more or less
    assert covered(n) >= p - slack
    assert n == 0 or covered(n - 1) < p + slack


def steady(per_s: float, work_s: float, seconds: int, **kw: Any) -> list[PoolLoad]:
    """A look each second, with `per_s` arrivals of `work_s` each before it."""
    come = Arrivals(per_s, per_s * work_s)
    return [a_load(float(t), begun=come, arrived=come, **kw) for t in range(1, seconds)]


def test_forecast_holds_more_than_the_load_and_less_than_twice_of_it() -> None:
    policy = Forecast()
    replicas = answers(policy, steady(5.0, 2.0, 300, ready=13, max_replicas=99))
    assert 10 < replicas[-1] < 20


def test_forecast_orders_before_anybody_waits() -> None:
    loads = steady(1.5, 2.0, 6)
    assert all(load.queued == 0 for load in loads)
    assert answers(Forecast(), loads)[-1] > 3


def test_forecast_sees_the_calls_that_runs_elsewhere_will_make() -> None:
    loads = [replace(x, arrived=Arrivals()) for x in steady(1.5, 2.0, 6)]
    assert answers(Forecast(), loads)[-1] > 3
    assert answers(Forecast(looks_ahead=False), loads)[-1] == 1


def test_forecast_adds_what_clears_the_backlog_unless_it_is_ordered() -> None:
    policy = Forecast(clear_s=20.0, hold_s=0.0)
    assert answers(policy, [a_load(1.0, queued=30, queued_s=80.0)]) == [3]  # (80 - 20)/20
    assert answers(policy, [a_load(1.0, queued=30, queued_s=80.0, starting=3)]) == [1]


def test_forecast_keeps_replicas_for_the_hold_time_and_then_lets_go() -> None:
    policy = Forecast(window_s=10.0, hold_s=30.0)
    busy = steady(2.0, 2.0, 60)
    quiet = [a_load(60.0 + t) for t in range(60)]
    replicas = answers(policy, [*busy, *quiet])
    # 10 s until the window is empty, 30 s more until the last wish is forgotten.
    peak = replicas[58]
    assert peak > 4
    assert replicas[58 + 20] > 1
    assert replicas[58 + 43] == 1


def test_forecast_needs_fewer_replicas_when_each_runs_many_calls() -> None:
    # The same work in replica-seconds: pooled places fluctuate less.
    one = answers(Forecast(), steady(1.0, 2.0, 200))[-1]
    many = answers(Forecast(), steady(16.0, 2.0 / 16, 200, places=16))[-1]
    assert many < one


def test_forecast_keeps_for_a_while_what_it_finds() -> None:
    # A provisioner that was restarted has seen no arrivals yet.
    loads = [a_load(float(t), ready=4, idle=4) for t in range(0, 60, 5)]
    replicas = answers(Forecast(hold_s=30.0), loads)
    assert replicas[:6] == [4] * 6
    assert replicas[7:] == [1] * 5


# To no replica and back

IDLE = {"min_replicas": 0, "idle": 2, "ready": 2}


@pytest.mark.parametrize("name", list(SCALING))
def test_without_work_for_the_timeout_the_last_replica_goes(name: str) -> None:
    policy = scaling_policy(PoolScaling(name, idle_timeout_s=30.0))
    assert policy is not None
    busy = a_load(0.0, min_replicas=0, ready=2, idle=1)
    loads = [busy, *(a_load(float(t), **IDLE) for t in (1, 15, 29, 30))]
    replicas = answers(policy, loads)
    assert all(n >= 1 for n in replicas[:-1])
    assert replicas[-1] == 0


@pytest.mark.parametrize("name", list(SCALING))
def test_the_first_call_that_waits_starts_a_replica(name: str) -> None:
    policy = scaling_policy(PoolScaling(name, idle_timeout_s=30.0))
    assert policy is not None
    asleep = [a_load(float(t), min_replicas=0, ready=0) for t in range(5)]
    assert answers(policy, asleep) == [0] * 5
    called = a_load(5.0, min_replicas=0, ready=0, queued=1, queued_s=0.1)
    starting = replace(called, now_s=6.0, starting=1)
    assert answers(policy, [*asleep, called, starting])[5:] == [1, 1]


@pytest.mark.parametrize(
    "work",
    [
        {"queued": 1},
        {"coming_s": 0.5},
        {"begun": Arrivals(1, 1.0)},
        {"arrived": Arrivals(1, 1.0)},
        {"idle": 1},
    ],
)
def test_a_pool_that_has_or_awaits_work_is_not_idle(work: dict[str, Any]) -> None:
    policy = IdleToZero(CatoScaling(), 30.0)
    load = a_load(29.0, **{**IDLE, **work})
    assert answers(policy, [a_load(0.0, **IDLE), load, a_load(58.0, **IDLE)])[-1] > 0


def test_a_minimum_outlasts_the_timeout() -> None:
    policy = IdleToZero(CatoScaling(idle_timeout_s=5.0), 30.0)
    assert answers(policy, [a_load(t, ready=1, idle=1, idle_s=t) for t in (0.0, 99.0)]) == [1, 1]


def test_loads_that_were_not_told_are_added_up() -> None:
    first = a_load(1.0, queued=9, arrived=Arrivals(1, 2.0), finished=(LATE,))
    second = a_load(2.0, queued=3, arrived=Arrivals(2, 3.0), begun=Arrivals(1, 1.0))
    both = second.since(first)
    assert (both.now_s, both.queued) == (2.0, 3)
    assert (both.arrived, both.begun) == (Arrivals(3, 5.0), Arrivals(1, 1.0))
    assert both.finished == (LATE,)


# Meter


# A call of n tokens takes n seconds alone.
PROFILE = a_profile(prefill_s=1.0, token_s=1.0)
N = CallKind(TaskName("t"), NodeId("n"))


def offered(id: str, at_s: float = 0.0, *, tokens: int = 3, **kw: Any) -> InvocationOffered:
    return InvocationOffered(at_s, an_invocation(id, tokens=tokens, arrived_at_s=at_s, **kw))


def ended(id: str, at_s: float, *, attempt: int = 1, outcome: str = "done") -> InvocationEnded:
    return InvocationEnded(at_s, InvocationId(id), attempt, 3, outcome)


def a_meter(*events: Event, places: int = 1) -> PoolMeter:
    meter = PoolMeter(PROFILE, places)
    for event in events:
        meter.handle(event)
    return meter


def look(
    meter: PoolMeter,
    now_s: float = 5.0,
    leased: Iterable[str] = (),
    replicas: tuple[ReplicaSnapshot, ...] = (),
    queued: int = 1,
) -> PoolDemand:
    picture = PoolPicture(A, now_s, queued, 0, 0, replicas)
    return meter.look(picture, {InvocationId(i) for i in leased})


def test_arrivals_are_told_once_and_a_later_attempt_is_none() -> None:
    meter = a_meter(offered("1"), offered("2", tokens=5), offered("1"), offered("3", attempt=2))
    assert look(meter).arrived == {N: Arrivals(2, 8.0)}
    assert look(meter).arrived == {}
    assert look(meter).unfinished == {N: 3}


def test_what_an_earlier_life_of_the_router_had_does_not_arrive_again() -> None:
    again = offered("1")
    meter = a_meter(replace(again, invocation=replace(again.invocation, was_taken=True)))
    demand = look(meter)
    assert (demand.arrived, demand.unfinished) == ({}, {N: 1})


def test_only_what_waits_is_queued_work() -> None:
    meter = a_meter(offered("1"), offered("2", tokens=5))
    demand = look(meter, leased=["1"])
    assert (demand.running, demand.queued_s) == (1, 5.0)


@pytest.mark.parametrize(
    "leave",
    [ended("1", 2.0), InvocationWithdrawn(2.0, InvocationId("1"), 1, "the client left")],
)
def test_what_has_left_is_no_demand(leave: Event) -> None:
    demand = look(a_meter(offered("1"), leave))
    assert (demand.unfinished, demand.queued_s) == ({}, 0.0)


def test_what_is_refused_is_no_demand() -> None:
    meter = a_meter(offered("1"))
    meter.refused(InvocationId("1"))
    assert look(meter).unfinished == {}


def test_calls_whose_replicas_went_to_another_router_are_no_demand() -> None:
    meter = a_meter(offered("1"), offered("2"))
    assert look(meter, leased=["1"], queued=1).unfinished == {N: 2}
    gone = look(meter, now_s=6.0, queued=0)
    assert (gone.unfinished, gone.queued_s, gone.running) == ({}, 0.0, 0)


def test_a_call_is_measured_from_its_offer_to_its_end() -> None:
    meter = a_meter(offered("1", 1.0, deadline_s=10.0, downstream_s=4.0), ended("1", 8.0))
    assert look(meter).finished == (Finished(7.0, 3.0, 2.0, 4.0),)
    assert look(meter).finished == ()


def test_a_call_with_a_first_token_to_come_is_measured_there() -> None:
    first = FirstTokenSent(4.0, InvocationId("1"))
    meter = a_meter(offered("1", until_first_token=True), first, ended("1", 9.0))
    assert look(meter).finished == (Finished(4.0, 1.0, 6.0, 0.0),)


def test_failures_late_news_and_calls_without_a_deadline_are_not_measured() -> None:
    meter = a_meter(
        offered("1"),
        ended("1", 2.0, outcome="failed"),
        offered("2", deadline_s=math.inf),
        ended("2", 2.0),
        offered("3", attempt=2),
        ended("3", 2.0, attempt=1),
    )
    demand = look(meter)
    assert demand.finished == ()
    assert demand.unfinished == {N: 1}


def test_a_batch_shares_the_time_of_its_replica() -> None:
    report = a_report(slots=4, profile=PROFILE)
    assert look(a_meter(report, offered("1"))).arrived == {N: Arrivals(1, 0.75)}


def test_work_is_measured_in_replicas_of_the_mean_speed() -> None:
    slow = replace(a_report("s", profile=PROFILE), deployment=DeploymentName("slow"))
    fast = a_profile(prefill_s=0.5, token_s=0.5)
    meter = a_meter(a_report("f", profile=fast, slots=3), slow, offered("1"))
    # Alone 3 s and 0.5 s (1.5 s in one of three places): 2 / (1/3 + 1/0.5).
    demand = look(meter)
    assert demand.arrived[N].work_s == pytest.approx(6 / 7)
    assert demand.places == 2


def test_a_call_on_a_replica_that_drains_does_not_wait() -> None:
    meter = a_meter(offered("1"), offered("2"))
    look(meter, leased=["1"])
    # The replica left the pool; its streams go on.
    demand = look(meter)
    assert (demand.queued_s, demand.unfinished) == (3.0, {N: 2})
    # It was lost after all: its ingress asks for another.
    meter.handle(offered("1", attempt=2))
    assert look(meter).queued_s == 6.0


def test_a_call_that_nobody_ends_is_forgotten() -> None:
    meter = a_meter(offered("1"), offered("2"))
    look(meter, 10.0, leased=["1"])
    assert look(meter, FORGET_AFTER_S + 5.0).unfinished == {N: 1}
    assert look(meter, FORGET_AFTER_S + 15.0).unfinished == {}


def test_a_replica_is_idle_since_it_was_first_seen_so() -> None:
    meter = a_meter()
    idle, busy, draining = a_replica("i"), a_replica("b", held=1), a_replica("d", accepting=False)
    look(meter, 1.0, replicas=(idle, busy, draining))
    ready = look(meter, 4.0, replicas=(idle, replace(busy, held=0), draining)).ready
    assert ready == (ReplicaLoad(ReplicaId("i"), 0, 3.0), ReplicaLoad(ReplicaId("b"), 0, 0.0))
