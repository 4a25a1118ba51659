"""The default scheduler keeps as many queued streams in time as it can, and plans again in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.core.commands import Dispatch
from cato.core.decision import Rank
from cato.core.events import InvocationEnded, InvocationOffered, InvocationWithdrawn
from cato.core.ids import InvocationId, PoolName
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.queue import Queue, Waiting
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of

# One at a time, a prompt token a millisecond.
PROFILE = a_profile(prefill_s=0.0, token_s=0.0, slots=1)
PROFILE = replace(PROFILE, prefill_per_token_s=0.001)


def a_stream(id: str, seconds: float, due_s: float) -> Invocation:
    call = an_invocation(id, tokens=1, deadline_s=due_s, until_first_token=True)
    return replace(call, prompt_tokens=int(seconds * 1000))


class Pool:
    """One replica that is busy with "running"."""

    def __init__(self) -> None:
        self.pool = PoolOrchestrator(PoolName("p"), policies_of(PoolPolicies()))
        self.pool.handle(a_report("r", profile=PROFILE, slots=1))
        self.now_s = 0.0
        self.takes_s: dict[str, float] = {}
        self.offer(a_stream("running", 0.1, 9.0))

    def offer(self, *calls: Invocation) -> None:
        for call in calls:
            self.takes_s[call.id] = call.prompt_tokens / 1000
            self.pool.handle(InvocationOffered(self.now_s, replace(call, arrived_at_s=self.now_s)))

    def started(self) -> list[str]:
        """Whose turn it is, one after another, until the queue is empty."""
        found: list[str] = []
        running = "running"
        while running:
            self.now_s += self.takes_s[running]
            ended = InvocationEnded(self.now_s, InvocationId(running), 1, 1, "done", 0, 10)
            starts = [c for c in self.pool.handle(ended) if isinstance(c, Dispatch)]
            running = starts[0].invocation_id if starts else ""
            found += [running] if running else []
            self.pool.check_invariants()
        return found


@pytest.mark.parametrize(
    ("long_due_s", "middle_due_s", "order"),
    [
        pytest.param(9.0, 9.0, ["short", "middle", "long"], id="all can wait"),
        pytest.param(1.2, 9.0, ["long", "short", "middle"], id="the long one cannot"),
        pytest.param(1.5, 0.9, ["middle", "short", "long"], id="one must be late"),
    ],
)
def test_the_shortest_goes_first_of_those_that_can_wait(
    long_due_s: float, middle_due_s: float, order: Sequence[str]
) -> None:
    pool = Pool()
    pool.offer(a_stream("long", 1.0, long_due_s), a_stream("middle", 0.5, middle_due_s))
    pool.offer(a_stream("short", 0.2, 9.0))
    assert pool.started() == order


def test_one_that_was_not_kept_has_a_place_again_when_others_leave() -> None:
    for leaves, order in ((False, ["middle", "short", "long"]), (True, ["long", "short"])):
        pool = Pool()
        pool.offer(a_stream("long", 1.0, 1.5), a_stream("middle", 0.5, 0.9))
        pool.offer(a_stream("short", 0.2, 9.0))
        if leaves:
            left = InvocationWithdrawn(0.0, InvocationId("middle"), 1, "cancelled")
            pool.pool.handle(left)
        assert pool.started() == order


def test_in_a_long_queue_a_newcomer_has_its_place_before_the_next_plan() -> None:
    pool = Pool()
    pool.offer(*(a_stream(f"{n}", 0.3, 99.0) for n in range(40)))
    pool.offer(a_stream("short", 0.1, 99.0))
    assert pool.started()[0] == "short"


def test_calls_of_one_size_go_as_they_came() -> None:
    pool, names = Pool(), [f"{n:02d}" for n in range(40)]
    pool.offer(*(a_stream(name, 0.3, 99.0) for name in names))
    assert pool.started() == names


def test_among_many_replicas_a_long_stream_starts_before_it_is_in_doubt() -> None:
    """There others are served so fast that it could wait for them until it is nearly late."""
    pool = PoolOrchestrator(PoolName("p"), policies_of(PoolPolicies()))
    for n in range(20):
        pool.handle(a_report(f"r{n}", profile=PROFILE, slots=1))
        pool.handle(InvocationOffered(0.0, a_stream(f"running{n}", 0.1, 9.0)))
    pool.handle(InvocationOffered(0.0, a_stream("long", 0.1, 0.6)))
    for n in range(30):
        pool.handle(InvocationOffered(0.0, a_stream(f"short{n}", 0.05, 99.0)))
    for turn, (now_s, starts_long) in enumerate(((0.2, False), (0.42, True))):
        # In doubt from 0.425 s on, late from 0.5. Five newcomers make a new plan.
        for n in range(5):
            newcomer = a_stream(f"new{turn}-{n}", 0.05, 99.0)
            pool.handle(InvocationOffered(now_s, replace(newcomer, arrived_at_s=now_s)))
        started: list[str] = []
        for n in range(4):
            ended = InvocationEnded(
                now_s, InvocationId(f"running{4 * turn + n}"), 1, 1, "done", 0, 10
            )
            started += [c.invocation_id for c in pool.handle(ended) if isinstance(c, Dispatch)]
        assert len(started) == 4
        assert ("long" in started) == starts_long


def test_calls_that_leave_while_there_is_no_replica_are_not_kept() -> None:
    pool = PoolOrchestrator(PoolName("p"), policies_of(PoolPolicies()))
    pool.handle(InvocationOffered(0.0, an_invocation("stays")))
    for n in range(1_000):
        pool.handle(InvocationOffered(1.0, an_invocation(f"c{n}")))
        pool.handle(InvocationWithdrawn(1.0, InvocationId(f"c{n}"), 1, "left"))
    pool.check_invariants()
    kept = pool._backlog.queue._by_tenant[""]
    assert len(kept._unranked) < 100
    assert [c.id for c in pool.waiting] == ["stays"]
    (start,) = pool.handle(a_report("r", profile=PROFILE, slots=1))
    assert isinstance(start, Dispatch)
    assert start.invocation_id == "stays"


def test_calls_that_leave_long_before_their_rank_is_due_are_not_kept() -> None:
    """As calls of an SLO of a day whose rank holds until then."""
    queue = Queue(count(1))

    def add(id: str) -> Waiting:
        waiting = Waiting(an_invocation(id), queue)
        queue.add(waiting)
        return waiting

    add("stays")
    for n in range(1_000):
        gone = add(f"c{n}")
        queue.refresh(lambda _waiting, now_s: Rank(0, "can wait", 0.0, now_s + 86_400.0), 1.0)
        queue.remove(gone)
    queue.check_invariants()
    assert len(queue._due) < 100
