"""What running calls do counts for the pace of the queue as it is done."""

from __future__ import annotations

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.core.events import InvocationEnded, InvocationOffered, ReplicaProgressed
from cato.core.ids import PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of

# Prompts take 1 s and a token 10 ms: a call of 101 tokens is 2 s of work, half of it its prompt.
PROFILE = a_profile(prefill_s=1.0, token_s=0.01)
SLOTS, LONG_S = 4, 1000.0


class Pool:
    """One replica that is full, and a queue."""

    def __init__(self) -> None:
        self.orchestrator = PoolOrchestrator(PoolName("p"), policies_of(PoolPolicies()))
        self.orchestrator.handle(a_report("r", profile=PROFILE, slots=SLOTS))
        for n in range(SLOTS + 3):
            call = an_invocation(f"c{n}", tokens=101, deadline_s=LONG_S)
            self.orchestrator.handle(InvocationOffered(0.0, call))
        self.ids = sorted(self.orchestrator.leased)
        assert self.orchestrator.queued == 3

    def reports(self, now_s: float, tokens: int) -> None:
        all_have = tuple((id, tokens) for id in self.ids)
        self.orchestrator.handle(ReplicaProgressed(now_s, ReplicaId("r"), all_have))

    @property
    def pace(self) -> float:
        return self.orchestrator._backlog.pressure.pace


def test_work_counts_before_the_first_call_has_ended() -> None:
    pool = Pool()
    assert pool.pace == 1.0
    for step in range(10):
        pool.reports(1.0 + 0.1 * step, 1 + 10 * step)
    # A tenth of a second of decoding of each, of which four share the steps.
    assert pool.pace == pytest.approx(1.0, rel=0.1)
    slow = Pool()
    for step in range(10):
        slow.reports(1.0 + 0.2 * step, 1 + 10 * step)
    assert slow.pace == pytest.approx(0.5, rel=0.1)


def test_a_call_that_is_shorter_than_believed_is_all_done_at_its_end() -> None:
    pool = Pool()
    pool.reports(1.0, 1)
    pool.reports(1.8, 51)
    before = pool.pace
    for id in pool.ids[:2]:
        pool.orchestrator.handle(InvocationEnded(1.8, id, 1, 51, "done"))
    assert pool.pace == pytest.approx(1.5 * before, rel=0.05)
    cut = Pool()
    cut.reports(1.0, 1)
    cut.reports(1.8, 51)
    for id in cut.ids[:2]:
        cut.orchestrator.handle(InvocationEnded(1.8, id, 1, 51, "cancelled"))
    assert cut.pace == pytest.approx(before)


def test_longer_outputs_than_believed_are_no_more_work() -> None:
    pool = Pool()
    pool.reports(1.0, 1)
    pool.reports(2.0, 101)
    lease = pool.orchestrator._leases.by_id[pool.ids[0]]
    assert lease.counted_s == pytest.approx(2.0 / SLOTS, rel=0.01)
    pool.reports(3.0, 201)
    assert lease.counted_s == pytest.approx(2.0 / SLOTS, rel=0.01)


def test_what_a_preempted_call_did_does_not_count() -> None:
    pool = Pool()
    pool.reports(1.0, 1)
    pool.reports(2.0, 101)
    before = pool.pace
    pool.orchestrator._leases.take_back(pool.ids[0])
    assert pool.pace < before
