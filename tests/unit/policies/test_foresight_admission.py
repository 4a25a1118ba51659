"""Late calls in CATO's default admission: one at a time joins although it costs others a little."""

from __future__ import annotations

from dataclasses import replace

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
