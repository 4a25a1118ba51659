"""CATO's default admission: what is late, or would be behind the prompts of one replica."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kits.builders import a_profile, a_replica, an_invocation

from cato.core.decision import Admit, Defer
from cato.core.snapshot import Invocation, ReplicaSnapshot, Running
from cato.policies.admission.foresight import AGED_S, MIN_PLACES, ForesightAdmission
from cato.policies.preemption.foresight import ForesightPreemption

# A step takes 10 ms and 0.1 ms more for each in the batch.
PROFILE = a_profile(prefill_s=0.01, token_s=0.01, batch_token_s=1e-4)
NOW_S = 100.0


def late(by_s: float, id: str = "late") -> Invocation:
    return an_invocation(id, deadline_s=NOW_S - by_s)


def a_busy_replica(*running: Invocation, slots: int = 2 * MIN_PLACES) -> ReplicaSnapshot:
    """They have been running since their prompts were done."""
    view = a_replica(held=len(running), slots=slots, profile=PROFILE)
    return replace(view, running=tuple(Running(i, NOW_S, 200.0, 0, NOW_S) for i in running))


def pressed(id: str, within_s: float = 0.53) -> Invocation:
    """50 tokens, 0.5 s alone: within the margin of what is believed."""
    return an_invocation(id, deadline_s=NOW_S + within_s)


def admit(invocation: Invocation, replica: ReplicaSnapshot) -> Admit | Defer:
    return ForesightAdmission().admit(invocation, replica, NOW_S)


def test_a_late_call_waits_while_it_costs_others_something() -> None:
    assert isinstance(admit(late(1.0), a_busy_replica(pressed("a"))), Defer)


def test_what_has_been_late_for_long_joins_at_a_small_loss() -> None:
    answer = admit(late(AGED_S + 1), a_busy_replica(pressed("a")))
    assert isinstance(answer, Admit)
    assert answer.reason.startswith("late by more than 30 s")


def test_one_of_those_at_a_time() -> None:
    busy = a_busy_replica(pressed("a"), late(AGED_S + 1, "first"))
    assert isinstance(admit(late(AGED_S + 5), busy), Defer)


def test_few_places_are_for_those_that_can_be_met() -> None:
    few = a_busy_replica(pressed("a"), slots=MIN_PLACES - 1)
    assert isinstance(admit(late(AGED_S + 1), few), Defer)


def given_way(by_s: float, *waiting: Invocation) -> list[str]:
    """Whether what is late gives way to two others: steps take 16 ms with it, 14 ms without."""
    replica = a_busy_replica(pressed("a", 0.72), pressed("b", 0.72), late(by_s))
    replica = replace(replica, profile=replace(PROFILE, decode_per_request_s=2e-3))
    return [id for id, _ in ForesightPreemption().preempt(replica, waiting, NOW_S, lambda: 1.0)]


def test_it_is_not_taken_back_for_being_late() -> None:
    hasty = an_invocation("hasty", deadline_s=NOW_S + 2.0)
    assert given_way(1.0, hasty) == ["late"]
    assert given_way(AGED_S + 1, hasty) == []


def test_what_is_late_runs_on_while_nobody_waits_who_can_be_in_time() -> None:
    """It would come back, and cost others the same then."""
    assert given_way(1.0) == []
    assert given_way(1.0, late(2.0, "other")) == []


def a_stream(within_s: float) -> Invocation:
    return an_invocation("stream", deadline_s=NOW_S + within_s, until_first_token=True)


def test_a_stream_that_would_be_late_behind_the_prompts_here_waits_until_it_is_late() -> None:
    """A prompt takes 10 ms, and 200 ms of prompts are ahead."""
    busy = replace(a_busy_replica(late(1.0)), prompts_ahead_s=0.2, prefilling=1)
    assert isinstance(admit(a_stream(0.3), busy), Admit)
    assert isinstance(admit(a_stream(0.1), busy), Defer)
    assert isinstance(admit(a_stream(-0.1), busy), Admit), "it costs nobody anything"
    no_prompts = replace(busy, prompts_ahead_s=0.0, prefilling=0, first_late_s=0.2)
    assert isinstance(admit(a_stream(0.1), no_prompts), Admit), "waiting would not help it"


def test_first_tokens_are_expected_as_late_as_they_have_come() -> None:
    busy = replace(a_busy_replica(late(1.0)), prompts_ahead_s=0.2, prefilling=1)
    assert isinstance(admit(a_stream(0.3), replace(busy, first_late_s=0.15)), Defer)
    assert isinstance(admit(a_stream(0.1), replace(busy, first_late_s=-0.15)), Admit)


@pytest.mark.parametrize(("began_late_s", "answer"), [(-0.1, Defer), (0.1, Admit)])
def test_the_pace_of_a_stream_that_began_too_late_costs_nobody_a_place(
    began_late_s: float, answer: type[Admit | Defer]
) -> None:
    """Its last five tokens take 55 ms alone, 70 ms beside another prompt; they are due in 63 ms."""
    runs = replace(a_stream(-0.5 - began_late_s), tpot_target_s=0.0115)
    running = (Running(runs, NOW_S - 1, 200.0, 45, NOW_S - 0.5),)
    profile = replace(PROFILE, decode_per_request_s=1e-3)
    view = replace(a_busy_replica(runs), running=running, profile=profile)
    assert isinstance(admit(late(AGED_S / 2), view), answer)
