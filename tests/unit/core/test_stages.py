"""Calls of one run that a pool has at once know of each other."""

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
BY_ITSELF = replace(TEMPO, knows_stages=False)
FORESIGHT = schedulers.foresight()
ALONE = replace(FORESIGHT, knows_stages=False)


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


def left_in_stage(pool: PoolOrchestrator, id: str) -> list[int]:
    call = pool.invocation(InvocationId(id))
    assert call is not None
    return [c.expected_tokens - c.generated for c in call.stage]


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
    assert left_in_stage(pool, "short") == []
    pool.check_invariants()


def test_the_stage_of_running_calls_lasts_as_long_as_the_one_with_most_to_come() -> None:
    calls = a_call("x", 300, "a"), a_call("y", 200, "a"), a_call("z", 100, "a")
    pool = a_busy_pool(*calls, slots=2)
    tokens = ((InvocationId("x"), 250), (InvocationId("y"), 30))
    pool.handle(ReplicaProgressed(1.0, ReplicaId("r"), tokens))
    assert [left_in_stage(pool, id) for id in "xyz"] == [[50, 170, 100]] * 3
    pool.check_invariants()
    assert started(pool.handle(ended("y"))) == ["z"]


def test_runs_do_not_share_a_stage() -> None:
    pool = a_busy_pool(a_call("x", 300), a_call("y", 200), a_call("z", 100))
    pool.handle(ended("x"))
    assert left_in_stage(pool, "y") == []


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


def due(call: Invocation, deadline_s: float) -> Invocation:
    return replace(call, deadline_s=deadline_s)


def test_the_default_takes_a_single_call_before_a_stage_with_more_work_in_all() -> None:
    calls = [due(a_call("first", 10), 30.0)]
    calls += [due(a_call(id, 100, "a"), 5.0) for id in "xyz"]
    calls += [due(a_call("single", 200), 5.0)]
    assert started(a_busy_pool(*calls, policies=FORESIGHT).handle(ended("first", 0.1))) == [
        "single"
    ]
    alone = a_busy_pool(*calls, policies=ALONE)
    assert started(alone.handle(ended("first", 0.1))) == ["x"]


def test_the_default_gives_up_the_calls_of_a_stage_of_which_one_is_late() -> None:
    calls = [due(a_call("first", 10), 30.0), due(a_call("late", 900, "a"), 5.0)]
    calls += [due(a_call("short", 120, "a"), 5.0), due(a_call("single", 200), 5.0)]
    pool = a_busy_pool(*calls, policies=FORESIGHT)
    assert started(pool.handle(ended("first", 0.1))) == ["single"]
    alone = a_busy_pool(*calls, policies=ALONE)
    assert started(alone.handle(ended("first", 0.1))) == ["short"]


def test_calls_know_of_no_stage_once_policies_do_not_ask_for_it() -> None:
    pool = a_busy_pool(*(a_call(id, 100, "a") for id in "xyz"))
    pool.handle(ended("x"))
    assert left_in_stage(pool, "y") == [100, 100]
    pool.handle(PoliciesChanged(1.5, BY_ITSELF))
    assert left_in_stage(pool, "y") == []


def test_nobody_waits_for_the_end_of_a_stream() -> None:
    stream = replace(a_call("stream", 900, "a"), until_first_token=True)
    calls = stream, a_call("x", 100, "a"), a_call("y", 100, "a")
    pool = a_busy_pool(*calls)
    pool.handle(ReplicaProgressed(0.5, ReplicaId("r"), ((InvocationId("stream"), 10),)))
    assert [left_in_stage(pool, c.id) for c in calls] == [[], [100, 100], [100, 100]]
    pool.check_invariants()
