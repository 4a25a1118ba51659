"""SLO-SA call by call: the order of a queue is that of its mapping."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from kits.builders import a_profile, a_replica, a_report, an_invocation

from cato.core.commands import Command, Dispatch
from cato.core.events import InvocationEnded, InvocationOffered
from cato.core.ids import InvocationId, PoolName
from cato.core.orchestrator import PoolOrchestrator
from cato.core.topology import PoolPolicies
from cato.policies.mapping.queue import MappedQueue
from cato.policies.mapping.registry import MAPPERS
from cato.policies.registry import policies_of

# A token a tenth of a second: 50 tokens take 5 s.
PROFILE = a_profile(prefill_s=0.1, token_s=0.1, slots=4)
LONG = an_invocation("long", tokens=50, deadline_s=100.0)
SHORT = an_invocation("short", tokens=5, deadline_s=1.0)
LOST = an_invocation("lost", tokens=50, deadline_s=0.5)


def a_queue(mapper: str = "annealing", cap: int = 1, **more: bool) -> MappedQueue:
    return MappedQueue(MAPPERS[mapper], cap, 6, **more)


@pytest.mark.parametrize("mapper", ["annealing", "moore-smith", "exhaustive"])
def test_what_can_be_met_starts_before_what_came_earlier_and_can_wait(mapper: str) -> None:
    replica = a_replica(slots=1, profile=PROFILE)
    assert a_queue(mapper).start([LONG, SHORT], replica, 0.0).ids == ("short",)


def test_as_many_start_as_have_a_place() -> None:
    queue = a_queue("exhaustive", cap=2)
    for held, places in ((0, 2), (1, 1), (2, 0)):
        replica = a_replica(held=held, slots=4, profile=PROFILE)
        found = queue.start([LOST, LONG, SHORT], replica, 0.0)
        assert len(found.ids) == places
        assert "short" in found.ids or not places


def test_a_batch_that_runs_to_its_end_lets_nobody_join() -> None:
    queue = a_queue(cap=2, runs_to_end=True)
    assert queue.start([LONG], a_replica(held=1, slots=2, profile=PROFILE), 0.0).ids == ()
    assert queue.start([LONG], a_replica(slots=2, profile=PROFILE), 0.0).ids == ("long",)


def test_every_kind_of_objective_and_a_deadline_long_past_can_be_mapped() -> None:
    calls = [
        replace(an_invocation("stream", until_first_token=True), tpot_target_s=0.05),
        an_invocation("none", deadline_s=inf),
        an_invocation("past", deadline_s=1.0, downstream_s=5.0),
    ]
    free = a_profile(prefill_s=0.0, token_s=0.0, slots=4)
    for profile in (PROFILE, free):
        found = a_queue(cap=3).start(calls, a_replica(slots=4, profile=profile), 50.0)
        assert sorted(found.ids) == ["none", "past", "stream"]


def started(commands: tuple[Command, ...]) -> list[str]:
    assert all(isinstance(c, Dispatch) for c in commands)
    return [c.invocation_id for c in commands]


@pytest.mark.parametrize("binding", ["early", "late"])
def test_a_pool_maps_its_queue_whenever_a_place_frees(binding: str) -> None:
    names = PoolPolicies("annealing", binding=binding, cap=1)
    pool = PoolOrchestrator(PoolName("p"), policies_of(names, PROFILE))
    pool.handle(replace(a_report("a", slots=4), profile=PROFILE))
    first = an_invocation("first", tokens=5)
    assert started(pool.handle(InvocationOffered(0.0, first))) == ["first"]
    for call in (LONG, SHORT):
        assert pool.handle(InvocationOffered(0.0, call)) == ()
    end = InvocationEnded(0.1, InvocationId("first"), 1, 5, "done")
    (command,) = pool.handle(end)
    assert isinstance(command, Dispatch)
    assert command.invocation_id == "short"
    assert "2 that wait in 2 batches: best seen while annealing; waited" in command.reason
