"""Calls of one run that a pool has at once know the longest of them."""

from __future__ import annotations

from dataclasses import replace

from kits.builders import a_profile, a_report, an_invocation

from cato.core.commands import Command, Dispatch
from cato.core.events import (
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    PoliciesChanged,
    ReplicaProgressed,
)
from cato.core.ids import InvocationId, PoolName, ReplicaId, RunId
from cato.core.length import LengthBelief
from cato.core.orchestrator import PoolOrchestrator
from cato.core.policies import Policies
from cato.core.snapshot import Invocation
from cato.policies import schedulers

ONE = a_profile(prefill_s=0.01, token_s=0.01, slots=1)
TEMPO = schedulers.OF_PROFILE["tempo"](ONE, 1)
BY_ITSELF = replace(TEMPO, stages=None)


def a_call(id: str, tokens: int, run: str = "") -> Invocation:
    call = an_invocation(id, prompt=1, tokens=tokens, deadline_s=100.0)
    return replace(call, run_id=RunId(run or id), length=LengthBelief((float(tokens),)))


def a_busy_pool(*calls: Invocation, policies: Policies = TEMPO, slots: int = 1) -> PoolOrchestrator:
    """The first `slots` calls run."""
    pool = PoolOrchestrator(PoolName("p"), policies)
    pool.handle(a_report("r", slots=slots, profile=ONE))
    for call in calls:
        pool.handle(InvocationOffered(0.0, call))
    pool.check_invariants()
    return pool


def ended(id: str, now_s: float = 1.0) -> InvocationEnded:
    return InvocationEnded(now_s, InvocationId(id), 1, 10, "done")


def stage_tokens(pool: PoolOrchestrator, id: str) -> int:
    call = pool.invocation(InvocationId(id))
    assert call is not None
    return call.stage_tokens


def started(commands: tuple[Command, ...]) -> list[str]:
    return [c.invocation_id for c in commands if isinstance(c, Dispatch)]


def test_a_short_call_waits_behind_others_while_its_stage_takes_longer_anyway() -> None:
    calls = a_call("first", 10), a_call("short", 20, "a"), a_call("long", 400, "a")
    calls += (a_call("single", 60),)
    assert started(a_busy_pool(*calls).handle(ended("first"))) == ["single"]
    alone = a_busy_pool(*calls, policies=BY_ITSELF)
    assert started(alone.handle(ended("first"))) == ["short"]


def test_a_call_is_ranked_by_itself_again_when_the_longest_of_its_stage_has_gone() -> None:
    pool = a_busy_pool(
        a_call("first", 10),
        a_call("short", 20, "a"),
        a_call("single", 60),
        a_call("long", 400, "a"),
    )
    pool.handle(InvocationWithdrawn(0.5, InvocationId("long"), 1, "left"))
    assert started(pool.handle(ended("first"))) == ["short"]
    assert stage_tokens(pool, "short") == 0
    pool.check_invariants()


def test_the_stage_of_running_calls_lasts_as_long_as_the_one_with_most_to_come() -> None:
    calls = a_call("x", 300, "a"), a_call("y", 200, "a"), a_call("z", 100, "a")
    pool = a_busy_pool(*calls, slots=2)
    tokens = ((InvocationId("x"), 250), (InvocationId("y"), 30))
    pool.handle(ReplicaProgressed(1.0, ReplicaId("r"), tokens))
    assert [stage_tokens(pool, id) for id in "xyz"] == [170, 170, 170]
    pool.check_invariants()
    assert started(pool.handle(ended("y"))) == ["z"]


def test_runs_do_not_share_a_stage() -> None:
    pool = a_busy_pool(a_call("x", 300), a_call("y", 200), a_call("z", 100))
    pool.handle(ended("x"))
    assert stage_tokens(pool, "y") == 0


def test_a_change_of_policies_finds_the_stages_that_are_there() -> None:
    calls = a_call("first", 10), a_call("short", 20, "a"), a_call("single", 60)
    pool = a_busy_pool(*calls, a_call("long", 400, "a"), policies=BY_ITSELF)
    pool.handle(PoliciesChanged(0.5, TEMPO))
    assert started(pool.handle(ended("first"))) == ["single"]
    pool.check_invariants()
    pool.handle(PoliciesChanged(1.5, schedulers.foresight()))
    pool.check_invariants()


def test_a_pool_that_never_queues_forgets_runs_that_have_ended() -> None:
    pool = a_busy_pool(slots=4)
    for n in range(3):
        for id in (f"x{n}", f"y{n}"):
            pool.handle(InvocationOffered(1.0, a_call(id, 20, f"run{n}")))
        pool.check_invariants()
        pool.handle(ended(f"x{n}"))
        pool.handle(ended(f"y{n}"))
        pool.check_invariants()
