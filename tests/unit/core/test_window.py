"""How much prompt work a replica may hold ahead, and how the delay of messages is learnt."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import a_pool, a_profile, a_replica, a_report, an_invocation

from cato.core.decision import Admit, Defer
from cato.core.events import FirstTokenSent, InvocationEnded, InvocationOffered, ReplicaReported
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.window import (
    LATE_WEIGHT,
    LEAST_STEPS,
    MAX_DISPATCH_S,
    MOST_LATE_S,
    MOST_STEPS,
    learnt_dispatch_s,
    learnt_late_s,
    prompt_window_tokens,
    takes_prompt,
    wait_for_prompts_s,
)
from cato.core.snapshot import ReplicaSnapshot, Running
from cato.policies import schedulers
from cato.policies.admission.foresight import ForesightAdmission
from cato.policies.routing.foresight import ForesightRouting

# A decode step takes 10 ms, a prompt token 0.1 ms: four steps take 400 prompt tokens.
PROFILE = a_profile(prefill_s=0.01, token_s=0.01, prefill_token_s=1e-4)


def prefilling(id: str, ahead: int, *, held: int = 1) -> ReplicaSnapshot:
    """It holds `held` calls with 10 s to spare, and so many prompt tokens are ahead."""
    running = tuple(Running(an_invocation(f"{id}{i}"), 0.0, 1.0) for i in range(held))
    view = a_replica(id, held=held, profile=PROFILE)
    return replace(view, running=running, prefilling=held, prompt_tokens_ahead=ahead)


def test_the_window_is_what_the_next_steps_can_take() -> None:
    assert prompt_window_tokens(PROFILE, 1, 0) == pytest.approx(LEAST_STEPS * 100)


def test_the_window_grows_with_the_step_of_a_larger_batch_and_context() -> None:
    profile = replace(PROFILE, decode_per_request_s=0.001, decode_per_context_token_s=1e-6)
    # 10 ms, 1 ms each of ten requests, 1 us each of 5,000 context tokens: 25 ms.
    assert prompt_window_tokens(profile, 10, 5000) == pytest.approx(LEAST_STEPS * 250)


def test_the_window_holds_two_budgets_of_a_step_but_no_more_than_eight_decode_steps() -> None:
    assert prompt_window_tokens(PROFILE, 1, 0, step_tokens=100) == pytest.approx(LEAST_STEPS * 100)
    assert prompt_window_tokens(PROFILE, 1, 0, step_tokens=300) == pytest.approx(600)
    assert prompt_window_tokens(PROFILE, 1, 0, step_tokens=8192) == pytest.approx(MOST_STEPS * 100)


def test_the_window_covers_the_delay_of_messages() -> None:
    slow = replace(PROFILE, latency_s=0.005)
    without = prompt_window_tokens(PROFILE, 1, 0)
    assert prompt_window_tokens(slow, 1, 0, dispatch_s=0.008) == pytest.approx(without + 130)


def test_prompts_that_cost_nothing_have_no_bound() -> None:
    assert prompt_window_tokens(a_profile(), 1, 0) == inf


def test_the_first_prompt_always_joins() -> None:
    instant = replace(PROFILE, decode_base_s=0.0)  # its steps take no time: the window is empty
    assert takes_prompt(a_replica(held=3, profile=instant), an_invocation())


def test_short_prompts_join_while_others_are_processed() -> None:
    admission = ForesightAdmission()
    newcomer = an_invocation("new", prompt=64)
    assert isinstance(admission.admit(newcomer, prefilling("a", 336), 0.0), Admit)
    full = admission.admit(newcomer, prefilling("a", 337), 0.0)
    assert full == Defer("337 prompt tokens are ahead", closes=True)


def test_an_engine_that_mixes_prompts_has_room_for_a_short_one_beside_a_long_one() -> None:
    short, turn = an_invocation("s", prompt=50), an_invocation("t", prompt=90_000)
    in_order = prefilling("r", 50_000)
    mixing = replace(in_order, mixes_prompts=True)
    assert not takes_prompt(in_order, short)
    assert takes_prompt(mixing, short)
    assert not takes_prompt(mixing, turn)
    assert takes_prompt(mixing, replace(turn, session="s"))
    long = replace(in_order, prompts_ahead_s=5.0)
    assert wait_for_prompts_s(long, 0.01) == 5.0
    assert wait_for_prompts_s(replace(long, mixes_prompts=True), 0.01) == pytest.approx(0.01)


def test_routing_prefers_a_replica_whose_window_is_open() -> None:
    pool = a_pool(prefilling("a", 400), prefilling("b", 300, held=2))
    assert ForesightRouting().route(an_invocation("new"), pool).replica_id == "b"  # type: ignore[union-attr]


def test_a_newcomer_waits_for_the_prompts_ahead_of_it() -> None:
    """In time behind an idle engine, late behind 0.2 s of prompts."""
    stream = an_invocation("new", deadline_s=0.1, until_first_token=True)
    view = prefilling("a", 100)
    admission = ForesightAdmission(reserve=0.0)
    free = admission.admit(stream, view, 0.0)
    behind = admission.admit(stream, replace(view, prompts_ahead_s=0.2), 0.0)
    assert free.reason.startswith("in time with chance 1.00")
    assert behind.reason.startswith("late behind the prompts here")


# What the books keep of it


def offered(pool: PoolOrchestrator, id: str, now_s: float, prompt: int) -> None:
    pool.handle(InvocationOffered(now_s, an_invocation(id, prompt=prompt)))


def a_foresight_pool() -> PoolOrchestrator:
    pool = PoolOrchestrator(PoolName("p"), schedulers.foresight())
    report: ReplicaReported = a_report("r", slots=8, profile=PROFILE)
    pool.handle(replace(report, step_tokens=200))
    return pool


def test_the_books_count_what_is_ahead_and_for_how_long() -> None:
    pool = a_foresight_pool()
    offered(pool, "a", 0.0, 100)
    offered(pool, "b", 0.0, 200)
    (r,) = pool.picture(0.01).replicas
    assert (r.prompt_tokens_ahead, r.context_tokens, r.step_tokens) == (300, 300, 200)
    assert r.prompts_ahead_s == pytest.approx(0.02 + 0.03 - 0.01)
    pool.handle(FirstTokenSent(0.02, InvocationId("a")))
    (r,) = pool.picture(0.02).replicas
    assert (r.prompt_tokens_ahead, r.context_tokens) == (200, 301)
    assert r.prompts_ahead_s == pytest.approx(0.03)
    pool.handle(FirstTokenSent(0.05, InvocationId("b")))
    report = a_report("r", now_s=0.1, slots=8, profile=PROFILE)
    pool.handle(replace(report, mixes_prompts=True))
    (r,) = pool.picture(0.1).replicas
    assert r.mixes_prompts
    (r,) = pool.picture(0.05).replicas
    assert (r.prompt_tokens_ahead, r.prompts_ahead_s) == (0, 0.0)


def test_what_the_window_cannot_take_waits_for_the_next_first_token() -> None:
    pool = a_foresight_pool()
    offered(pool, "a", 0.0, 100)
    offered(pool, "b", 0.0, 300)
    offered(pool, "c", 0.0, 100)
    assert pool.why_waiting(InvocationId("c")) == "400 prompt tokens are ahead"
    dispatched = pool.handle(FirstTokenSent(0.02, InvocationId("a")))
    assert [c.invocation_id for c in dispatched] == ["c"]


def test_the_delay_of_messages_is_learnt_from_first_tokens_of_lone_prompts() -> None:
    pool = a_foresight_pool()
    for i in range(400):
        offered(pool, f"i{i}", 10.0 * i, 100)
        # 20 ms are the prompt's own, what it comes later is the way there and back.
        pool.handle(FirstTokenSent(10.0 * i + 0.033, InvocationId(f"i{i}")))
        pool.handle(replace(a_report("r", slots=8, profile=PROFILE), now_s=10.0 * i + 9))
    (r,) = pool.picture(4000.0).replicas
    assert r.id == ReplicaId("r")
    assert r.dispatch_s == pytest.approx(0.013, rel=0.05)


@pytest.mark.parametrize("late_s", [0.05, -0.005])
def test_how_late_first_tokens_come_is_learnt_from_all_of_them(late_s: float) -> None:
    """Of prompts that follow others, too; each takes 10 ms for every 100 tokens, and 10 more."""
    pool = a_foresight_pool()
    for i in range(60):
        at_s = 10.0 * i
        offered(pool, f"a{i}", at_s, 100)
        offered(pool, f"b{i}", at_s, 100)
        pool.handle(FirstTokenSent(at_s + 0.02 + late_s, InvocationId(f"a{i}")))
        pool.handle(FirstTokenSent(at_s + 0.04 + late_s, InvocationId(f"b{i}")))
        pool.handle(replace(a_report("r", slots=8, profile=PROFILE), now_s=at_s + 9))
    (r,) = pool.picture(600.0).replicas
    assert r.first_late_s == pytest.approx(late_s, abs=0.002)


def test_the_wait_of_a_standby_call_for_its_slot_is_expected() -> None:
    pool = PoolOrchestrator(PoolName("p"), schedulers.foresight())
    pool.handle(a_report("r", slots=1, standby=1, profile=PROFILE))
    offered(pool, "a", 0.0, 100)
    pool.handle(FirstTokenSent(0.02, InvocationId("a")))
    offered(pool, "b", 0.02, 100)
    pool.handle(InvocationEnded(0.51, InvocationId("a"), 1, 50, "finished"))
    pool.handle(FirstTokenSent(0.53, InvocationId("b")))
    (r,) = pool.picture(0.53).replicas
    assert r.first_late_s == pytest.approx(0.0, abs=0.002)


@given(st.floats(-MOST_LATE_S, MOST_LATE_S), st.floats(-10, 10))
def test_one_first_token_that_is_very_late_says_little(known_s: float, sample_s: float) -> None:
    learnt_s = learnt_late_s(known_s, sample_s)
    assert abs(learnt_s) <= MOST_LATE_S
    assert abs(learnt_s - known_s) <= 2 * LATE_WEIGHT * MOST_LATE_S + 1e-9


@given(st.floats(0, MAX_DISPATCH_S), st.floats(-10, 10))
def test_the_learnt_delay_is_never_negative_nor_a_profiles_error(
    known_s: float, sample_s: float
) -> None:
    assert 0 <= learnt_dispatch_s(known_s, sample_s) <= MAX_DISPATCH_S
