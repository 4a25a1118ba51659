"""Each policy is the rule it says it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_pool, a_profile, a_replica, an_invocation

from cato.core.decision import Admit, Defer, Hold, Rank, Route
from cato.core.errors import UnknownNameError
from cato.core.length import LengthBelief
from cato.core.policies import RoutingPolicy, Work
from cato.core.snapshot import Invocation, PoolSnapshot
from cato.core.topology import PoolPolicies
from cato.policies.admission.saber import SaberAdmission, speed_model
from cato.policies.admission.static_cap import StaticCap
from cato.policies.ordering.edf import EarliestDeadlineFirst
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.ordering.foresight import ForesightOrdering
from cato.policies.ordering.hopeless_last import HopelessLast
from cato.policies.ordering.sjf import ShortestJobFirst
from cato.policies.ordering.slack_priority import LateLast, SlackPriority
from cato.policies.registry import (
    ORDERING,
    ROUTING,
    ordering_names,
    policies_of,
    refits,
    routing_names,
    scheduler_names,
)
from cato.policies.routing.cato import CatoRouting
from cato.policies.routing.power_of_two import PowerOfTwo
from cato.policies.routing.round_robin import RoundRobin
from cato.policies.slack import FEASIBLE, LATE, TIGHT, slack_class

# The cost of an invocation is the prefill alone: remaining = prefill_s + downstream_s.
FAST, SLOW = a_profile(prefill_s=1.0, token_s=0.0), a_profile(prefill_s=3.0, token_s=0.0)


def chosen(decision: Route | Hold) -> str:
    assert isinstance(decision, Route)
    return decision.replica_id


# Algorithm 1 of CATO


def algorithm_1(invocation: Invocation, pool: PoolSnapshot) -> str:
    """The printed algorithm, line by line, but for line 24 (the first replica when none fits)."""
    slack_s = invocation.deadline_s - pool.now_s
    by_wait = sorted(
        pool.replicas,
        key=lambda r: (
            r.serial_s,
            invocation.remaining_s(r.profile),
            r.held + r.queued,
            r.id,
        ),
    )
    if slack_s < 0:
        return by_wait[0].id
    for replica in by_wait:
        if replica.serial_s + invocation.remaining_s(replica.profile) <= slack_s:
            return replica.id
    return by_wait[0].id


pools = st.lists(
    st.builds(
        a_replica,
        st.uuids().map(str),
        held=st.integers(0, 3),
        queued=st.integers(0, 2),
        wait_s=st.sampled_from([0.0, 0.0, 1.0, 2.5, float("inf")]),
        profile=st.sampled_from([FAST, SLOW, a_profile(batch_token_s=0.1)]),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda r: r.id,
).map(lambda replicas: a_pool(*sorted(replicas, key=lambda r: r.id), now_s=5.0))
invocations = st.builds(
    an_invocation,
    deadline_s=st.floats(3, 15),
    downstream_s=st.sampled_from([0.0, 2.0]),
    until_first_token=st.booleans(),
    draw=st.floats(0, 1, exclude_max=True),
)


@given(invocations, pools)
def test_cato_routes_as_algorithm_1_says(invocation: Invocation, pool: PoolSnapshot) -> None:
    assert chosen(CatoRouting().route(invocation, pool)) == algorithm_1(invocation, pool)


def test_cato_takes_the_least_wait_among_the_feasible_even_if_another_waits_less() -> None:
    pool = a_pool(
        a_replica("a", wait_s=1.0, profile=SLOW), a_replica("b", wait_s=2.0, profile=FAST)
    )
    decision = CatoRouting().route(an_invocation(deadline_s=3.5), pool)
    reason = "slack 3.500 s, feasible on 1 of 2: least wait 2.000 s, remaining 1.000 s"
    assert decision == Route(pool.replicas[1].id, reason)


def test_cato_takes_the_least_wait_of_all_when_none_is_feasible() -> None:
    pool = a_pool(a_replica("a", wait_s=9.0), a_replica("b", wait_s=8.0))
    decision = CatoRouting().route(an_invocation(deadline_s=0.1), pool)
    assert chosen(decision) == "b"
    assert "feasible on none of 2: least wait of all 8.000 s" in decision.reason


def test_cato_takes_the_least_wait_for_what_is_late() -> None:
    pool = a_pool(a_replica("a", wait_s=2.0), a_replica("b", wait_s=1.0), now_s=5.0)
    decision = CatoRouting().route(an_invocation(deadline_s=4.0), pool)
    assert chosen(decision) == "b"
    assert decision.reason.startswith("late by 1.000 s: least wait of 2 1.000 s")


def test_line_24_of_cato_takes_the_first_replica_only_while_slack_is_left() -> None:
    pool = a_pool(a_replica("a", wait_s=9.0), a_replica("b", wait_s=8.0), now_s=5.0)
    printed = CatoRouting(takes_first=True)
    assert chosen(printed.route(an_invocation(deadline_s=5.1), pool)) == "a"
    # Not yet late, at the last moment.
    assert chosen(printed.route(an_invocation(deadline_s=5.0), pool)) == "a"
    # Lines 11-16: a late call goes where it waits least.
    assert chosen(printed.route(an_invocation(deadline_s=4.9), pool)) == "b"
    # Whatever fits somewhere does too.
    assert chosen(printed.route(an_invocation(deadline_s=99.0), pool)) == "b"


def test_cato_counts_the_nodes_downstream_as_remaining() -> None:
    near, far = a_replica("a", profile=SLOW), a_replica("b", wait_s=0.5, profile=FAST)
    invocation = an_invocation(deadline_s=4.0, downstream_s=2.0)
    assert chosen(CatoRouting().route(invocation, a_pool(near, far))) == "b"


def test_cato_as_printed_ignores_that_a_batch_runs_together() -> None:
    profile = a_profile(prefill_s=1.0, token_s=0.0, batch_token_s=0.0)
    in_batch = a_replica("a", held=2, serial_s=5.0, profile=profile)
    full = a_replica("b", held=8, wait_s=2.0, serial_s=2.0, profile=profile)
    assert chosen(CatoRouting().route(an_invocation(), a_pool(in_batch, full))) == "b"
    knowing = CatoRouting(knows_batches=True)
    assert chosen(knowing.route(an_invocation(), a_pool(in_batch, full))) == "a"


def test_cato_breaks_ties_of_wait_by_remaining_work_then_load_then_id() -> None:
    slow, fast = a_replica("a", profile=SLOW), a_replica("b", profile=FAST)
    assert chosen(CatoRouting().route(an_invocation(), a_pool(slow, fast))) == "b"
    busy, idle = a_replica("a", held=1, profile=FAST), a_replica("b", profile=FAST)
    assert chosen(CatoRouting().route(an_invocation(), a_pool(busy, idle))) == "b"
    first, second = a_replica("a"), a_replica("b")
    assert chosen(CatoRouting().route(an_invocation(), a_pool(first, second))) == "a"


# Baselines


@pytest.mark.parametrize("n", [2, 3, 5])
def test_power_of_two_draws_each_pair_equally_often(n: int) -> None:
    """With loads in the order of ids the winner is the lower of the pair: n - 1 - i pairs each."""
    pool = a_pool(*(a_replica(str(i), held=i) for i in range(n)))
    draws = n * (n - 1) * 20
    winners = Counter(
        chosen(PowerOfTwo().route(an_invocation(draw=(k + 0.5) / draws), pool))
        for k in range(draws)
    )
    assert winners == {str(i): (n - 1 - i) * 40 for i in range(n - 1)}


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 6))
def test_power_of_two_never_takes_the_most_loaded(draw: float, n: int) -> None:
    pool = a_pool(*(a_replica(str(i), held=i) for i in range(n)))
    assert chosen(PowerOfTwo().route(an_invocation(draw=draw), pool)) != str(n - 1) or n == 1


def test_power_of_two_counts_what_is_queued_at_a_replica() -> None:
    pool = a_pool(a_replica("a", held=1, queued=3), a_replica("b", held=2))
    decision = PowerOfTwo().route(an_invocation(), pool)
    assert decision == Route(pool.replicas[1].id, "2 invocations against 4 on a")


@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 20))
def test_round_robin_gives_each_replica_the_same_number(n: int, turns: int, start: int) -> None:
    replicas = [a_replica(str(i)) for i in range(n)]
    takers = Counter(
        chosen(RoundRobin().route(an_invocation(), a_pool(*replicas, dispatched=start + k)))
        for k in range(n * turns)
    )
    assert set(takers.values()) == {turns}


@pytest.mark.parametrize("policy", ROUTING.values(), ids=ROUTING)
def test_without_a_replica_that_may_be_chosen_every_policy_holds(policy: RoutingPolicy) -> None:
    assert policy.route(an_invocation(), a_pool()) == Hold("no replica has room")


@given(st.sampled_from(sorted(ROUTING)), invocations, pools)
def test_every_policy_chooses_one_of_the_replicas_and_always_the_same(
    name: str, invocation: Invocation, pool: PoolSnapshot
) -> None:
    decision = ROUTING[name].route(invocation, pool)
    assert chosen(decision) in {r.id for r in pool.replicas}
    assert decision == ROUTING[name].route(invocation, pool)
    assert decision.reason


# Ordering


@pytest.mark.parametrize(
    ("slack_s", "wait_s", "remaining_s", "expected"),
    [
        (-0.001, 0.0, 0.0, LATE),
        (0.0, 0.0, 0.0, FEASIBLE),
        (0.0, 0.0, 0.1, TIGHT),
        (3.0, 1.0, 2.0, FEASIBLE),
        (3.0, 1.1, 2.0, TIGHT),
    ],
)
def test_the_classes_of_slack(
    slack_s: float, wait_s: float, remaining_s: float, expected: int
) -> None:
    assert slack_class(slack_s, wait_s, remaining_s) == expected


def test_the_orders_differ_in_where_they_put_what_is_late() -> None:
    late, tight, feasible = (an_invocation(deadline_s=d) for d in (4.0, 6.0, 20.0))

    def places(policy: FirstComeFirstServed | SlackPriority | LateLast) -> list[int]:
        return [
            policy.rank(i, Work(2.0, 2.0, 0.0), now_s=5.0).value for i in (late, tight, feasible)
        ]

    assert places(SlackPriority()) == [0, 1, 2]
    assert places(LateLast()) == [2, 0, 1]
    assert places(FirstComeFirstServed()) == [0, 0, 0]


# Names


@pytest.mark.parametrize("order", [LateLast(), SlackPriority()])
def test_what_has_no_slo_keeps_its_place(order: LateLast | SlackPriority) -> None:
    rank = order.rank(an_invocation(deadline_s=inf), Work(1.0, 1.0, 0.1), 0.0)
    assert rank.until_s == inf


def test_every_registered_name_gives_its_policy() -> None:
    for routing in routing_names():
        for ordering in ordering_names():
            names = PoolPolicies(routing=routing, ordering=ordering, binding="early", max_queued=7)
            found = policies_of(names)
            assert (found.routing, found.ordering) == (ROUTING[routing], ORDERING[ordering])
            assert (found.late_binding, found.max_queued) == (False, 7)


def test_hopeless_calls_go_behind_all_that_can_be_met() -> None:
    order = HopelessLast(EarliestDeadlineFirst())
    work = Work(remaining_s=2.0, service_s=2.0, token_s=0.01)

    def place(deadline_s: float) -> tuple[int, float]:
        rank = order.rank(an_invocation(deadline_s=deadline_s), work, 1.0)
        return rank.value, rank.key

    assert sorted([place(2.9), place(5.0), place(3.0)]) == [place(3.0), place(5.0), place(2.9)]


def test_a_stream_in_doubt_goes_behind_all_that_can_be_met() -> None:
    """Due in 10 s, its first token takes 2 s: at 6 s it has 2 s of its 8 s of slack, at 7 s 1 s."""
    order, work = HopelessLast(EarliestDeadlineFirst()), Work(2.0, 2.0, 0.01)
    stream = replace(an_invocation(deadline_s=10.0), until_first_token=True)
    early, late, lost = (order.rank(stream, work, now_s) for now_s in (6.0, 7.0, 8.1))
    assert early.value < late.value < lost.value
    assert early.until_s == pytest.approx(8.0 - 0.15 * 8.0)
    assert late.until_s == pytest.approx(8.0)
    assert order.rank(an_invocation(deadline_s=10.0), work, 7.0).value == early.value


def test_a_rank_of_what_can_be_met_ends_when_it_becomes_hopeless() -> None:
    work = Work(remaining_s=2.0, service_s=2.0, token_s=0.01)
    rank = HopelessLast(ShortestJobFirst()).rank(an_invocation(deadline_s=5.0), work, 1.0)
    assert rank.worsens
    assert rank.until_s == pytest.approx(3.0)


def a_planned(start_by_s: float, work_s: float, is_stream: bool = True) -> tuple[int, float]:
    """Its place by the default order at 0 s, if its place in the plan must start by then."""
    call = an_invocation(deadline_s=20.0, until_first_token=is_stream)
    work = Work(work_s, work_s, 0.01, load_s=work_s, start_by_s=start_by_s)
    rank = ForesightOrdering().rank(call, work, 0.0)
    return rank.value, rank.key


def test_foresight_goes_by_the_plan_and_shortest_first_where_a_call_has_no_place_in_it() -> None:
    places = [a_planned(3.0, 9.0), a_planned(4.0, 1.0), a_planned(inf, 1.0), a_planned(inf, 9.0)]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


def test_calls_due_as_a_whole_go_by_their_work() -> None:
    """When they must start depends on what runs beside them, so no plan keeps them."""
    assert a_planned(3.0, 4.0, is_stream=False) == a_planned(inf, 4.0, is_stream=False)
    assert a_planned(inf, 2.0) < a_planned(3.0, 4.0, is_stream=False)


def test_calls_due_as_a_whole_that_can_wait_long_go_by_their_deadlines_after_the_others() -> None:
    def place(slack_s: float) -> tuple[int, float]:
        call = an_invocation(deadline_s=slack_s + 1.0)
        rank = ForesightOrdering().rank(call, Work(1.0, 1.0, 0.01, load_s=1.0), 0.0)
        return rank.value, rank.key

    assert place(4.9) < place(5.1) < place(9.0)
    assert ForesightOrdering().rank(
        an_invocation(deadline_s=10.0), Work(1.0, 1.0, 0.01, load_s=1.0), 0.0
    ).until_s == pytest.approx(4.0, abs=0.01)


def test_the_engine_ranks_a_kept_call_like_the_others_that_come_later() -> None:
    """Otherwise they would pass it there until it is late."""

    def priority(slack_s: float, is_stream: bool, start_by_s: float = inf) -> int:
        call = an_invocation(deadline_s=slack_s + 1.0, until_first_token=is_stream)
        work = Work(1.0, 1.0, 0.01, load_s=1.0, start_by_s=start_by_s)
        return ForesightOrdering().rank(call, work, 0.0).priority

    assert priority(100.0, True, 50.0) == priority(3.0, True) == priority(3.0, False)
    assert priority(3.0, True) < priority(-1.0, True)


def a_place(
    slack_s: float,
    work_s: float,
    is_stream: bool = True,
    arrived_at_s: float = 0.0,
    share: float = 0.9,
) -> tuple[int, float]:
    """Its place by the default order at 10 s, with a slack as given and no place in the plan.

    `share` of the work is decoding.
    """
    call = an_invocation(deadline_s=10.0 + slack_s + work_s, until_first_token=is_stream)
    call = replace(call, arrived_at_s=arrived_at_s)
    work = Work(work_s, work_s, 0.01, work_s, share * work_s, inf)
    rank = ForesightOrdering().rank(call, work, 10.0)
    return rank.value, rank.key


@pytest.mark.parametrize(("second_s", "first"), [(1.3, "earlier"), (0.5, "shorter")])
def test_foresight_tells_no_small_differences_of_streams_apart(second_s: float, first: str) -> None:
    earlier, later = a_place(5.0, 1.25), a_place(5.0, second_s)
    assert (earlier == later) if first == "earlier" else (later < earlier)
    assert a_place(5.0, 1.25, is_stream=False) < a_place(5.0, 1.3, is_stream=False)


def test_prompts_are_known_so_streams_go_by_their_exact_work_where_little_is_decoding() -> None:
    shorter, longer = a_place(5.0, 1.25, share=0.05), a_place(5.0, 1.28, share=0.05)
    assert shorter < longer
    assert a_place(5.0, 1.25, share=0.0) < a_place(5.0, 1.2501, share=0.0)


def a_rest(
    behind_s: float,
    tpot_s: float = inf,
    in_time: bool = True,
    in_vain: float = 0.0,
    start_by_s: float = inf,
    crowded_s: float = 0.0,
    length: LengthBelief | None = None,
) -> Rank:
    """Of a stream that has begun, at 10 s, by how much it is behind its pace."""
    rest = an_invocation(deadline_s=11.0 - behind_s)
    rest = replace(rest, generated=10, tpot_target_s=tpot_s, begun_in_time=in_time, length=length)
    work = Work(1.0, 1.0, 0.01, start_by_s=start_by_s, in_vain=in_vain, crowded_s=crowded_s)
    return ForesightOrdering().rank(rest, work, 10.0)


def test_a_stream_that_began_in_time_is_never_hopeless() -> None:
    """Four seconds behind the pace of its reader it goes before all others."""
    soon, first = a_rest(3.0), a_rest(4.1)
    assert (soon.value, soon.key) < a_place(0.1, 0.1)
    assert soon.until_s == pytest.approx(11.0)
    assert not soon.worsens, "a queue computes it again then, wherever it is"
    assert (first.value, first.key) < a_place(5.0, 0.001)


def test_a_stream_rests_for_new_calls_until_its_pace_presses() -> None:
    """New calls that the plan drops go before it, too; then it has its place in the plan."""
    dropped = a_place(0.5, 0.1)
    # It needs 1 s more, and has 3.5 and 2.5 s beyond that.
    resting, pressed = (a_rest(-s, 0.05, start_by_s=20.0) for s in (3.5, 2.5))
    assert (pressed.value, pressed.key) < dropped < (resting.value, resting.key)
    assert resting.until_s == pytest.approx(10.5, abs=0.01)
    early = a_rest(-3.5, 0.05, in_vain=0.7, start_by_s=20.0)
    assert (early.value, early.key) < dropped, "where rests are in vain"
    burst, overload = (a_rest(-3.5, 0.05, start_by_s=20.0, crowded_s=s) for s in (3.4, 3.6))
    assert (overload.value, overload.key) < dropped < (burst.value, burst.key)


def test_a_stream_rests_less_if_its_output_may_be_short() -> None:
    """It is due sooner then. Both have 50 more tokens in the mean, due at 15 s at 0.1 s each; the
    context takes 0.5 s. From 9.5 s on each token has to make up for 0.09 s; there may be only two.
    """
    sure, unsure = (
        a_rest(-4.0, 0.1, start_by_s=20.0, length=LengthBelief(tokens))
        for tokens in ((55.0, 60.0, 65.0), (12.0, 60.0, 108.0))
    )
    assert sure.until_s == pytest.approx(11.0, abs=0.01), "three times its time alone before"
    assert (unsure.value, unsure.key) < a_place(0.5, 0.1) < (sure.value, sure.key)


@pytest.mark.parametrize(
    ("tpot_s", "in_time"),
    [
        pytest.param(0.01, True, id="its pace is an SLO, and missed"),
        pytest.param(inf, False, id="due as a whole, or begun too late"),
    ],
)
def test_other_calls_are_hopeless_then(tpot_s: float, in_time: bool) -> None:
    rank = a_rest(3.0, tpot_s, in_time)
    assert (rank.value, rank.key) > a_place(0.1, 0.1)


@pytest.mark.parametrize(("in_vain", "start_by_s"), [(0.6, 17.0), (0.9, 11.0)])
def test_a_rest_with_a_target_pace_goes_on_when_it_must_unless_rests_are_in_vain(
    in_vain: float, start_by_s: float
) -> None:
    """It needs less than most, so its place in the plan is an early one."""
    rest = a_rest(-8.0, 0.01, in_vain=in_vain, start_by_s=11.0)
    assert rest.key == pytest.approx(start_by_s)
    assert (rest.value, rest.key) < a_place(0.1, 0.1)


def test_a_stream_that_would_begin_just_in_time_follows_those_with_more_slack() -> None:
    """By arrival alone the oldest that is not hopeless would always begin just too late."""
    just_in_time, in_time, late = a_place(0.1, 0.1), a_place(0.3, 0.1), a_place(-0.1, 0.01)
    assert in_time < just_in_time < late


def test_a_stream_that_never_had_much_slack_is_not_doubtful() -> None:
    came_now, came_earlier = a_place(0.1, 0.1, arrived_at_s=10.0), a_place(0.1, 0.1)
    assert came_now == a_place(0.3, 0.1)
    assert came_now < came_earlier


def test_foresight_counts_a_stream_by_what_it_takes_of_a_replica() -> None:
    """Once it has begun it is in time, but where places are few it keeps others out of one."""
    call = an_invocation(deadline_s=10.0, until_first_token=True)

    def place(load_s: float) -> float:
        work = Work(0.1, 5.0, 0.01, load_s=load_s)
        return ForesightOrdering().rank(call, work, 0.0).key

    assert place(0.2) < place(5.0)


def test_bounded_schedulers_hold_back_the_prompts_that_do_not_fit() -> None:
    admission = policies_of(PoolPolicies("edf-bounded")).admission
    profile = a_profile(token_s=0.01, prefill_token_s=1e-4)  # 400 tokens in four steps
    ahead = replace(a_replica(held=2, profile=profile), prompt_tokens_ahead=350)
    assert isinstance(admission.admit(an_invocation(prompt=50), ahead, 0.0), Admit)
    assert isinstance(admission.admit(an_invocation(prompt=51), ahead, 0.0), Defer)


def test_ray_serve_binds_late_in_order_of_arrival() -> None:
    found = policies_of(PoolPolicies("ray-serve"))
    assert (found.routing, found.ordering) == (PowerOfTwo(), FirstComeFirstServed())
    assert found.late_binding


@pytest.mark.parametrize("scheduler", scheduler_names())
def test_every_scheduler_can_be_named_and_keeps_its_own_parts(scheduler: str) -> None:
    found = policies_of(
        PoolPolicies(scheduler, max_queued=7),
        replace(a_profile(prefill_s=1.0, token_s=0.1), max_running=4),
    )
    assert found.max_queued == 7
    other = policies_of(
        PoolPolicies(scheduler, ordering="fcfs"),
        replace(a_profile(prefill_s=1.0, token_s=0.1), max_running=4),
    )
    assert other.ordering == ORDERING["fcfs"]
    assert (other.routing, other.late_binding) == (found.routing, found.late_binding)


def test_the_cap_of_static_cap_is_the_number_given() -> None:
    assert policies_of(PoolPolicies("static-cap", cap=3)).admission == StaticCap(3)


@pytest.mark.parametrize(
    ("names", "kind", "known"),
    [
        (PoolPolicies("catoo"), "scheduler", scheduler_names()),
        (PoolPolicies(routing="cat0"), "routing policy", routing_names()),
        (PoolPolicies(ordering="lifo"), "ordering policy", ordering_names()),
        (PoolPolicies(binding="never"), "binding", ("late", "early")),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(
    names: PoolPolicies, kind: str, known: tuple[str, ...]
) -> None:
    with pytest.raises(UnknownNameError) as error:
        policies_of(names)
    assert error.value.kind == kind
    assert error.value.known == known
    assert all(name in str(error.value) for name in known)


# Speeds measured online


def test_saber_follows_measured_speeds_and_corrects_the_profile_where_none_were_measured() -> None:
    profile = a_profile(batch_token_s=0.001, slots=32)
    law = speed_model(profile)
    half = {load: law.speed(load) / 2 for load in (1, 2, 3, 4)}
    found = speed_model(profile, half)
    for load in (1, 4, 16, 32):
        assert found.speed(load) == pytest.approx(law.speed(load) / 2, rel=0.05)
    policies = policies_of(PoolPolicies("saber"), profile, half)
    assert isinstance(policies.admission, SaberAdmission)
    assert policies.admission.model == found
    assert refits(PoolPolicies("saber"))


def test_a_scheduler_without_a_law_of_speed_ignores_measured_ones() -> None:
    names = PoolPolicies("foresight")
    assert not refits(names)
    assert policies_of(names, a_profile(), {1: 5.0}) == policies_of(names, a_profile())
