"""Tempo's density, reserve and preemption, and preemptive least attained service."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.decision import Admit, Defer
from cato.core.ids import DeploymentName, InvocationId, NodeId, ReplicaId, RunId, TaskName
from cato.core.length import LengthBelief
from cato.core.policies import Work
from cato.core.profile import UNMEASURED
from cato.core.snapshot import Invocation, ReplicaSnapshot, Running
from cato.policies import schedulers
from cato.policies.admission.tempo import TempoAdmission
from cato.policies.ordering.plas import LeastAttainedService
from cato.policies.ordering.tempo import GainDensity, TempoOrdering
from cato.policies.preemption.plas import LeastAttainedPreemption
from cato.policies.preemption.tempo import TempoPreemption

# 10 ms a step whatever the batch, 0.1 ms a prompt token, ten places.
PROFILE = replace(
    UNMEASURED,
    prefill_per_batch_token_s=1e-4,
    prefill_base_s=0.0,
    decode_per_context_token_s=0.0,
    decode_per_request_s=0.0,
    decode_base_s=0.01,
    max_running=10,
)
DENSITY = GainDensity(PROFILE)
ALONE = Work(1.0, 1.0, 0.01)


def an_invocation(
    id: str,
    *,
    tokens: float = 100,
    due_s: float = 20.0,
    prompt: int = 100,
    stream: bool = False,
    generated: int = 0,
    served_s: float = 0.0,
) -> Invocation:
    return Invocation(
        InvocationId(id),
        RunId(id),
        TaskName("t"),
        NodeId("n"),
        prompt,
        int(tokens),
        0.0,
        due_s,
        until_first_token=stream,
        tpot_target_s=0.1 if stream else inf,
        length=LengthBelief((float(tokens),)),
        generated=generated,
        served_s=served_s,
    )


def running(invocation: Invocation, tokens: int) -> Running:
    return Running(invocation, 0.0, 1.0, tokens, 0.0, 0.0)


def a_full_replica(*runs: Running, places: int | None = None) -> ReplicaSnapshot:
    held = len(runs)
    name = DeploymentName("d")
    return ReplicaSnapshot(
        ReplicaId("r"), name, PROFILE, held, places or held, 0, running=tuple(runs)
    )


def test_a_timely_call_gains_its_weighted_tokens_over_its_execution() -> None:
    # (100 + 2 * 100) tokens in 10 ms of prefill and 1 s of decoding
    assert DENSITY.of_waiting(an_invocation("a"), 0.0) == pytest.approx(300 / 1.01)


def test_a_late_call_gains_less_in_proportion() -> None:
    late = DENSITY.of_waiting(an_invocation("a", due_s=2.0), 3.0)
    assert late == pytest.approx(300 / 1.01 * 2.0 / 4.01)


def test_a_stream_that_starts_late_loses_its_prompt_but_catches_up() -> None:
    stream = an_invocation("a", due_s=2.0, stream=True)
    assert DENSITY.of_waiting(stream, 0.0) == pytest.approx(300 / 1.01)
    late = DENSITY.of_waiting(stream, 3.99) * 1.01
    assert 200 < late < 250 + 1e-9  # the prompt earns half; the later tokens are in time again


def test_what_was_generated_makes_the_rest_denser() -> None:
    call = an_invocation("a")
    assert DENSITY.of_running(call, 90, 1.0) == pytest.approx(300 / 0.1)


def test_the_printed_reading_prefers_the_deadline_that_is_near() -> None:
    printed = replace(DENSITY, over_budget=True)
    short_late, long_soon = an_invocation("a", tokens=50), an_invocation("b", tokens=300, due_s=5.0)
    assert DENSITY.of_waiting(short_late, 0.0) > DENSITY.of_waiting(long_soon, 0.0)
    assert printed.of_waiting(long_soon, 0.0) > printed.of_waiting(short_late, 0.0)


def test_a_bound_that_is_not_refined_ignores_what_was_generated() -> None:
    known = LengthBelief(tuple(float(n) for n in range(100, 200)))
    call = replace(an_invocation("a"), length=known)
    stale = replace(DENSITY, is_refined=False)
    assert stale.left_tokens(call, 150) == pytest.approx(40)
    # Of the lengths above 150 nine in ten are at most 195.
    assert DENSITY.left_tokens(call, 150) == pytest.approx(45)
    assert stale.left_tokens(call, 195) == 1


def test_the_densest_goes_first_and_waiting_counts_with_fairness() -> None:
    plain, fair = TempoOrdering(DENSITY, fairness=0.0), TempoOrdering(DENSITY, fairness=0.9)
    short = replace(an_invocation("a", tokens=50, due_s=100.0), arrived_at_s=40.0)
    long = an_invocation("b", tokens=200, due_s=100.0)
    assert plain.rank(short, ALONE, 40.0).key < plain.rank(long, ALONE, 40.0).key
    assert fair.rank(short, ALONE, 40.0).key > fair.rank(long, ALONE, 40.0).key


def test_work_without_slo_gets_its_reserve_and_no_more() -> None:
    admission = TempoAdmission(reserve=0.2)
    nothing_promised = an_invocation("x", due_s=inf)
    assert TempoOrdering(DENSITY).rank(nothing_promised, ALONE, 0.0).value == 0
    promised = [running(an_invocation(f"p{i}"), 5) for i in range(7)]
    others = [running(an_invocation(f"o{i}", due_s=inf), 5) for i in range(2)]
    one_taken = a_full_replica(*promised, others[0], places=10)
    two_taken = a_full_replica(*promised, *others, places=10)
    assert isinstance(admission.admit(nothing_promised, one_taken, 0.0), Admit)
    assert isinstance(admission.admit(nothing_promised, two_taken, 0.0), Defer)
    assert isinstance(admission.admit(an_invocation("p"), two_taken, 0.0), Admit)
    calm = a_full_replica(*others, places=10)
    assert isinstance(admission.admit(nothing_promised, calm, 0.0), Admit)


def test_preempts_when_the_gain_exceeds_the_context_to_be_processed_again() -> None:
    policy = TempoPreemption(DENSITY)
    # Due long ago: it gains a tenth of what the newcomer does.
    lost = running(an_invocation("lost", tokens=500, due_s=1.0), 20)
    sound = running(an_invocation("sound"), 20)
    replica = a_full_replica(lost, sound)
    (victim,) = policy.preempt(replica, [an_invocation("new")], 6.0, 1.0)
    assert victim[0] == "lost"
    costly = replace(lost, invocation=replace(lost.invocation, prompt_tokens=30_000))
    assert policy.preempt(a_full_replica(costly, sound), [an_invocation("new")], 6.0, 1.0) == []
    heedless = replace(policy, counts_loss=False)
    assert heedless.preempt(a_full_replica(lost, sound), [an_invocation("new")], 6.0, 1.0)


def test_what_has_just_begun_is_not_preempted() -> None:
    lost = running(an_invocation("lost", tokens=500, due_s=1.0), 19)
    assert (
        TempoPreemption(DENSITY).preempt(a_full_replica(lost), [an_invocation("n")], 6.0, 1.0) == []
    )
    unsafe = TempoPreemption(DENSITY, quantum_tokens=1)
    assert unsafe.preempt(a_full_replica(lost), [an_invocation("n")], 6.0, 1.0)


@given(
    st.lists(st.tuples(st.integers(1, 90), st.floats(0.5, 50.0)), min_size=1, max_size=6),
    st.lists(st.floats(0.5, 50.0), max_size=6),
    st.floats(0.0, 60.0),
)
def test_preemption_names_each_running_one_once_and_no_more_than_wait(
    runs: list[tuple[int, float]], dues_s: list[float], now_s: float
) -> None:
    replica = a_full_replica(
        *(running(an_invocation(f"r{i}", due_s=d), n) for i, (n, d) in enumerate(runs))
    )
    waiting = [an_invocation(f"w{i}", due_s=d) for i, d in enumerate(dues_s)]
    for policy in (TempoPreemption(DENSITY), LeastAttainedPreemption(LeastAttainedService())):
        victims = [id for id, _ in policy.preempt(replica, waiting, now_s, 1.0)]
        assert len(set(victims)) == len(victims) <= len(waiting)
        assert set(victims) <= {r.invocation.id for r in replica.running}


def test_least_attained_service_counts_the_run_and_the_tokens_before() -> None:
    ordering = LeastAttainedService(first_level_s=1.0, token_s=0.01)
    assert ordering.level(an_invocation("a")) == 0
    assert ordering.level(an_invocation("a", served_s=1.0)) == 1
    assert ordering.level(an_invocation("a", served_s=1.0, generated=200)) == 2


def test_what_has_been_demoted_gives_way_to_what_has_not() -> None:
    policy = LeastAttainedPreemption(LeastAttainedService(token_s=0.01))
    old = running(an_invocation("old", tokens=900), 400)  # level 2
    young = running(an_invocation("young"), 50)  # level 0
    replica = a_full_replica(old, young)
    newcomers = [an_invocation("n1"), an_invocation("n2")]
    assert [id for id, _ in policy.preempt(replica, newcomers, 9.0, 1.0)] == ["old"]
    assert policy.preempt(replica, [an_invocation("n", served_s=4.0)], 9.0, 1.0) == []
    with_room = a_full_replica(old, young, places=3)
    assert policy.preempt(with_room, newcomers, 9.0, 1.0) == ()


def test_least_attained_service_without_preemption_keeps_its_order() -> None:
    whole, waiting = schedulers.plas(PROFILE), schedulers.plas_waiting(PROFILE)
    assert waiting.ordering == whole.ordering
    assert whole.preemption is not None
    assert waiting.preemption is None
