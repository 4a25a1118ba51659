"""The reason of a dispatch says how urgent the call was, why there, and why it waited."""

from __future__ import annotations

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.core.commands import Command, Dispatch
from cato.core.events import InvocationEnded, InvocationOffered
from cato.core.ids import InvocationId, PoolName
from cato.core.orchestrator import PoolOrchestrator
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of

PROFILE = a_profile(prefill_s=0.5, token_s=0.5, slots=1)
TOKENS = 10


class Pool:
    """One replica with one batch slot."""

    def __init__(self) -> None:
        policies = policies_of(PoolPolicies(), PROFILE)
        self.core = PoolOrchestrator(PoolName("p"), policies)
        self.tell(0.0)

    def tell(self, now_s: float) -> None:
        held = tuple(self.core.leased)
        self.core.handle(a_report("r", now_s=now_s, slots=1, profile=PROFILE, held=held))

    def offer(
        self, id: str, now_s: float, *, slo_s: float = 60.0, head_start_s: float = 0.0
    ) -> str:
        call = an_invocation(
            id, tokens=TOKENS, arrived_at_s=now_s - head_start_s, deadline_s=now_s + slo_s
        )
        return reason_of(self.core.handle(InvocationOffered(now_s, call)))

    def end(self, id: str, now_s: float) -> str:
        self.tell(now_s)
        return reason_of(
            self.core.handle(InvocationEnded(now_s, InvocationId(id), 1, TOKENS, "done"))
        )


def reason_of(commands: tuple[Command, ...]) -> str:
    return "".join(c.reason for c in commands if isinstance(c, Dispatch))


def test_a_call_that_waited_says_how_long_and_what_ran_instead() -> None:
    pool = Pool()
    assert "waited" not in pool.offer("a", 0.0, head_start_s=5.0)
    assert pool.offer("b", 1.0, slo_s=600.0) == ""
    assert pool.offer("c", 2.0, slo_s=20.0) == ""
    assert "waited 3.00 s while 0 others started: no replica had room" in pool.end("a", 5.0)
    assert "waited 9.00 s while 1 others started: no replica had room" in pool.end("c", 10.0)


@pytest.mark.parametrize("slo_s", [0.1, 3.0])
def test_a_call_that_is_late_says_by_how_much(slo_s: float) -> None:
    pool = Pool()
    pool.offer("a", 0.0)
    pool.offer("b", 1.0, slo_s=slo_s)
    reason = pool.end("a", 10.0)
    assert reason.startswith("likely late, -")
    assert " s of slack, chance 0.00; " in reason
    assert "waited 9.00 s" in reason
