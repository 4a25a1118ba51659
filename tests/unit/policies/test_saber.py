"""SABER's online phase: what a request needs is fixed when it is looked at."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from kits.builders import a_replica, an_invocation

from cato.core.decision import Admit, Defer
from cato.core.policies import Work
from cato.core.snapshot import Invocation, ReplicaSnapshot, Running
from cato.policies.admission.saber import HIGH, LOW, SaberAdmission, SaberOrdering


@dataclass(frozen=True)
class Speed:
    """10 tokens/s alone, less by one for each beside it."""

    def speed(self, batch: float) -> float:
        return 11.0 - batch


def a_call(tokens: int, deadline_s: float, *, stream: bool = False) -> Invocation:
    return an_invocation(tokens=tokens, deadline_s=deadline_s, until_first_token=stream)


def beside(call: Invocation, at_s: float, tokens: int) -> ReplicaSnapshot:
    running = Running(call, at_s, 0.0, tokens=tokens, first_token_at_s=at_s)
    return replace(a_replica(held=1), running=(running,))


def test_what_runs_asks_for_the_speed_that_it_needed_when_it_joined() -> None:
    # 50 tokens in 10 s: 5 a second. It has 1 s left for 40 more: it would now need 40.
    replica = beside(a_call(50, 10.0), at_s=0.0, tokens=10)
    newcomer = a_call(10, 19.0)
    assert isinstance(SaberAdmission(Speed()).admit(newcomer, replica, 9.0), Admit)
    # 50 tokens in 5.26 s: 9.5 a second, and two together run at 9.
    slow = beside(a_call(50, 5.26), at_s=0.0, tokens=40)
    assert isinstance(SaberAdmission(Speed()).admit(newcomer, slow, 1.0), Defer)


def test_refreshed_speeds_block_beside_what_has_fallen_behind() -> None:
    # 45 tokens in 9 s, none of them after 4.2 s: 9.4 a second, more than two together run at.
    replica = beside(a_call(45, 9.0), at_s=0.0, tokens=0)
    newcomer = a_call(10, 19.0)
    assert isinstance(SaberAdmission(Speed()).admit(newcomer, replica, 4.2), Admit)
    refreshed = SaberAdmission(Speed(), refreshes=True)
    assert isinstance(refreshed.admit(newcomer, replica, 4.2), Defer)


@pytest.mark.parametrize(("now_s", "queue"), [(0.8, HIGH), (0.95, LOW)])
def test_a_ttft_call_is_one_token_by_its_deadline(now_s: float, queue: int) -> None:
    rank = SaberOrdering(Speed()).rank(a_call(400, 1.0, stream=True), Work(1.0, 1.0, 0.1), now_s)
    assert rank.value == queue
    if queue == HIGH:
        assert rank.until_s == pytest.approx(0.9)  # 0.1 s for a token alone


def test_hopeless_calls_get_two_places() -> None:
    late = a_call(50, 1.0)
    two = replace(
        a_replica(held=2),
        running=tuple(Running(late, 2.0, 0.0, tokens=5) for _ in range(2)),
    )
    assert isinstance(SaberAdmission(Speed()).admit(late, two, 2.0), Defer)
    one = replace(two, held=1, running=two.running[:1])
    assert isinstance(SaberAdmission(Speed()).admit(late, one, 2.0), Admit)
    in_time = a_call(10, 20.0)
    assert isinstance(SaberAdmission(Speed()).admit(in_time, two, 2.0), Admit)
