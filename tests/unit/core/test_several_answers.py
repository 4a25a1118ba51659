"""A call for several answers: replicas report the sum of their tokens, a pool expects each."""

from __future__ import annotations

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.core.commands import Dispatch
from cato.core.events import InvocationEnded, InvocationOffered, ReplicaProgressed
from cato.core.ids import PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.usual_lengths import FIRST_LENGTHS
from cato.core.record import changed
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of

PROFILE = a_profile(prefill_s=0.0, token_s=0.01)
REPLICA = ReplicaId("r")


def a_pool() -> PoolOrchestrator:
    pool = PoolOrchestrator(PoolName("p"), policies_of(PoolPolicies()))
    pool.handle(a_report("r", profile=PROFILE, slots=8))
    return pool


def a_call(calls: int, n: int = 0, *, now_s: float = 0.0, session: str = "") -> Invocation:
    call = an_invocation(f"c{n}", tokens=64, arrived_at_s=now_s, deadline_s=1000.0)
    return changed(call, calls=calls, session=session)


def dispatched(pool: PoolOrchestrator, call: Invocation, now_s: float = 0.0) -> Dispatch:
    (command,) = pool.handle(InvocationOffered(now_s, call))
    assert isinstance(command, Dispatch)
    return command


@pytest.mark.parametrize("calls", [1, 4])
def test_what_is_left_of_each_answer_is_what_is_left_of_one(calls: int) -> None:
    pool = a_pool()
    call = a_call(calls)
    dispatched(pool, call)
    for now_s, each in ((0.1, 1), (0.2, 11), (0.3, 21)):
        pool.handle(ReplicaProgressed(now_s, REPLICA, ((call.id, calls * each),)))
    replica = pool._replicas.known[REPLICA]
    (running,) = replica.running
    assert running.tokens == 21
    assert running.left_tokens == 64
    assert running.expected_end_s == pytest.approx(0.3 + 64 * 0.01)
    assert replica.context_tokens == running.context_tokens == call.prompt_tokens + calls * 21
    pool.handle(InvocationEnded(0.4, call.id, 1, calls * 25, "done"))
    assert (replica.held, replica.context_tokens) == (0, 0)


@pytest.mark.parametrize("calls", [1, 4])
def test_a_pool_learns_the_length_of_one_answer(calls: int) -> None:
    pool = a_pool()
    for n in range(FIRST_LENGTHS):
        call, now_s = a_call(calls, n, now_s=5.0 * n, session="s"), 5.0 * n
        dispatched(pool, call, now_s)
        pool.handle(InvocationEnded(now_s + 4.0, call.id, 1, calls * 400, "done"))
    next_one = dispatched(pool, a_call(1, 99, now_s=90.0, session="s"), 90.0)
    assert next_one.service_s == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("calls", [1, 4])
def test_a_tenant_pays_for_the_tokens_of_all_answers(calls: int) -> None:
    pool = a_pool()
    charged = list[int]()
    shares = pool._backlog.shares
    shares.charge = lambda _, __, ___, tokens: charged.append(tokens)  # type: ignore[method-assign]
    for n, end_tokens in enumerate((calls * 30 - 1, 0)):
        call = a_call(calls, n)
        dispatched(pool, call)
        pool.handle(ReplicaProgressed(0.1, REPLICA, ((call.id, calls * 21),)))
        outcome = "done" if end_tokens else "cancelled"
        pool.handle(InvocationEnded(0.2, call.id, 1, end_tokens, outcome))
    assert sum(charged[:2]) == calls * 30 - 1
    assert calls * 20 < sum(charged[2:]) <= calls * 21
