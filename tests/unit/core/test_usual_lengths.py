"""A turn of a session that comes without a belief gets that of the turns that have ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.core.commands import Dispatch
from cato.core.events import InvocationEnded, InvocationOffered
from cato.core.ids import InvocationId, PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.usual_lengths import FIRST_LENGTHS, KEPT_LENGTHS, KINDS, UsualLengths
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of


def a_turn(n: int = 0, *, tokens: int = 64) -> Invocation:
    call = an_invocation(f"t{n}", tokens=tokens, deadline_s=100.0, until_first_token=True)
    return replace(call, session="s", length=None)


def after(*lengths: int, turn: Invocation | None = None) -> UsualLengths:
    usual = UsualLengths()
    usual.believed(a_turn())
    for tokens in lengths:
        usual.ended(turn or a_turn(), tokens)
    return usual


def test_the_first_turns_keep_the_guess() -> None:
    few = after(*[400] * (FIRST_LENGTHS - 1))
    assert few.believed(a_turn()) == a_turn()
    few.ended(a_turn(), 400)
    assert few.believed(a_turn()).expected_tokens == 400


def test_the_belief_is_that_of_the_latest_turns() -> None:
    usual = after(*[100] * KEPT_LENGTHS)
    assert usual.believed(a_turn()).length == LengthBelief.of([100] * KEPT_LENGTHS)
    for _ in range(KEPT_LENGTHS):
        usual.ended(a_turn(), 400)
    assert usual.believed(a_turn()).length == LengthBelief.of([400] * KEPT_LENGTHS)


def test_a_turn_that_goes_on_has_less_to_come() -> None:
    usual = after(*[400] * FIRST_LENGTHS)
    rest = replace(a_turn(tokens=1), attempt=2, generated=300)
    assert usual.believed(rest).expected_tokens == 100
    longer = replace(rest, generated=500)
    assert usual.believed(longer).expected_tokens == 100, "a fifth of itself"
    assert usual.believed(a_turn()).expected_tokens == 400, "its 501 tokens limit no other"


def test_what_a_call_generated_before_it_lost_its_replica_counts() -> None:
    usual = after(*[100] * FIRST_LENGTHS, turn=replace(a_turn(), generated=300))
    assert usual.believed(a_turn()).expected_tokens == 400


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(replace(a_turn(), length=LengthBelief((30.0,))), id="has a belief"),
        pytest.param(replace(a_turn(), session=""), id="no session"),
        pytest.param(replace(a_turn(), task=TaskName("other")), id="another task"),
        pytest.param(a_turn(tokens=16), id="its caller allows fewer tokens"),
    ],
)
def test_other_calls_stay_as_they_are(call: Invocation) -> None:
    assert after(*[400] * FIRST_LENGTHS).believed(call) == call


def test_the_kinds_that_came_last_are_remembered() -> None:
    usual = after(*[400] * FIRST_LENGTHS)
    for n in range(KINDS):
        usual.ended(replace(a_turn(), task=TaskName(f"{n}")), 10)
    assert usual.believed(a_turn()) == a_turn()


def started(pool: PoolOrchestrator, turn: Invocation, now_s: float) -> Dispatch:
    (command,) = pool.handle(InvocationOffered(now_s, replace(turn, arrived_at_s=now_s)))
    assert isinstance(command, Dispatch)
    return command


@pytest.mark.parametrize(("outcome", "expected_s"), [("done", 4.0), ("cancelled", 0.64)])
def test_a_pool_learns_from_turns_that_were_answered(outcome: str, expected_s: float) -> None:
    pool = PoolOrchestrator(PoolName("p"), policies_of(PoolPolicies()))
    profile = a_profile(prefill_s=0.0, token_s=0.01, slots=4)
    pool.handle(a_report("r", profile=profile, slots=4))
    for n in range(FIRST_LENGTHS):
        started(pool, a_turn(n), 5.0 * n)
        pool.handle(InvocationEnded(5.0 * n + 4.0, InvocationId(f"t{n}"), 1, 400, outcome))
    command = started(pool, a_turn(99), 90.0)
    assert command.service_s == pytest.approx(expected_s, rel=0.05)
