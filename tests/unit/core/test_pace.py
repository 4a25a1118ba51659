"""Predictions follow the pace that is seen, where it differs from the profile by a factor."""

from __future__ import annotations

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.core.events import InvocationEnded, InvocationOffered, ReplicaProgressed
from cato.core.ids import PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.pace import LEAST_INTERVALS, PACE_STEP, Pace
from cato.core.profile import Profile
from cato.core.record import changed
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of

PROFILE = a_profile(prefill_s=0.1, token_s=0.02, slots=2)


def seen(took_s: float, predicted_s: float) -> Pace:
    pace = Pace(PROFILE)
    for _ in range(LEAST_INTERVALS):
        pace.saw(took_s, predicted_s)
    return pace


@pytest.mark.parametrize("ratio", [0.3, 0.7, 0.8, 1.2, 1.43, 1.6, 2.0, 4.0])
def test_a_profile_is_corrected_by_the_factor_that_is_seen(ratio: float) -> None:
    """A batch that is a tenth too large is late as a whole."""
    factor = seen(ratio, 1.0).corrected.decode_step_s(1) / PROFILE.decode_step_s(1)
    assert ratio / PACE_STEP < factor < ratio * PACE_STEP
    assert factor == pytest.approx(ratio, rel=0.011)


def test_what_chance_gives_corrects_nothing() -> None:
    assert seen(1.1, 1.0).corrected is PROFILE
    pace = Pace(PROFILE)
    for _ in range(LEAST_INTERVALS - 1):
        assert pace.saw(5.0, 1.0) == 1.0
    assert pace.corrected is PROFILE


def test_a_corrected_profile_is_corrected_back() -> None:
    pace = seen(2.0, 1.0)
    steps = pace.step
    for _ in range(LEAST_INTERVALS):  # predictions are by the corrected profile now
        pace.saw(1.0, PACE_STEP**steps)
    assert pace.corrected is PROFILE


def pool_of(scheduler: str, times: float, calls: int = 1) -> tuple[Profile, ...]:
    """Profiles that the router goes by, after streams on `a` at so many times the believed pace."""
    pool = PoolOrchestrator(PoolName("p"), policies_of(PoolPolicies(scheduler), PROFILE))
    for replica in ("a", "b"):
        pool.handle(a_report(replica, now_s=0.0, slots=2, profile=PROFILE))
    now_s, a = 0.0, ReplicaId("a")
    for call in range(20):
        invocation = changed(an_invocation(f"i{call}", tokens=60, arrived_at_s=now_s), calls=calls)
        pool.handle(InvocationOffered(now_s, invocation))
        running = next(r for r in pool.picture(now_s).replicas if r.held)
        assert running.id == a
        for tokens in (1, 20, 40):
            pool.handle(ReplicaProgressed(now_s, a, ((invocation.id, calls * tokens),)))
            now_s += 20 * times * PROFILE.decode_step_s(1, invocation.prompt_tokens)
        pool.handle(InvocationEnded(now_s, invocation.id, 1, calls * 60, "done"))
        for replica in ("a", "b"):
            pool.handle(a_report(replica, now_s=now_s, slots=2, profile=PROFILE))
    return tuple(r.profile for r in pool.picture(now_s).replicas)


def test_all_replicas_of_a_profile_share_what_is_seen_of_one() -> None:
    a, b = pool_of("foresight", 2.0)
    assert a is b
    assert a.decode_step_s(1) == pytest.approx(2 * PROFILE.decode_step_s(1), rel=0.15)


def test_several_answers_to_one_request_say_nothing_of_the_pace() -> None:
    assert pool_of("foresight", 1.0, calls=2) == (PROFILE, PROFILE)


def test_a_right_profile_stays_and_published_methods_keep_theirs() -> None:
    assert pool_of("foresight", 1.0) == (PROFILE, PROFILE)
    assert pool_of("edf-bounded", 2.0) == (PROFILE, PROFILE)
