"""Clients wait for so long and no longer: what they would not see is refused, as early as known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from math import inf

import pytest
from kits.builders import a_profile, a_report, an_invocation

from cato.core.commands import Command, Dispatch, Refuse
from cato.core.events import (
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    ReplicaLost,
    Ticked,
)
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.patience import MEMORY_S, PRIOR_S, LateService, Line
from cato.core.pool.refused_turns import ASKS_AGAIN_S, LATE_FOR_S, MAX_TURNS, RefusedTurns
from cato.core.snapshot import Invocation
from cato.core.topology import PoolPolicies
from cato.policies.registry import policies_of

# One call at a time, a second each, of which the prompt takes half.
PROFILE = a_profile(prefill_s=0.5, token_s=0.5 / 9, slots=1)
TOKENS = 10
FCFS = PoolPolicies(ordering="fcfs")


class Pool:
    """One replica that is busy for ever, unless told."""

    def __init__(self, policies: PoolPolicies = FCFS) -> None:
        self.core = PoolOrchestrator(PoolName("p"), policies_of(policies, PROFILE))
        self._numbers: Iterator[int] = count()
        self.tell(0.0)
        assert not self.refused(self.offer(0.0))

    def tell(self, now_s: float) -> tuple[Command, ...]:
        """It is there."""
        held = tuple(self.core.leased)
        return self.core.handle(a_report("r", now_s=now_s, slots=1, profile=PROFILE, held=held))

    def offer(
        self, now_s: float, *, slo_s: float = 5.0, leaves_s: float = inf, attempt: int = 1
    ) -> tuple[Command, ...]:
        call = an_invocation(
            f"i{next(self._numbers):03d}",
            tokens=TOKENS,
            arrived_at_s=now_s,
            deadline_s=now_s + slo_s,
            attempt=attempt,
        )
        return self.offer_call(now_s, replace(call, leaves_at_s=now_s + leaves_s))

    def offer_call(self, now_s: float, call: Invocation) -> tuple[Command, ...]:
        return self.core.handle(InvocationOffered(now_s, call))

    def end_one(self, now_s: float) -> tuple[Command, ...]:
        (id,) = self.core.leased
        return self.core.handle(InvocationEnded(now_s, id, 1, TOKENS, "done"))

    @staticmethod
    def refused(commands: tuple[Command, ...]) -> list[Refuse]:
        return [c for c in commands if isinstance(c, Refuse)]

    @property
    def queued(self) -> int:
        return self.core.picture(0.0).queued


def test_a_call_that_the_queue_keeps_from_its_client_is_refused_at_arrival() -> None:
    pool = Pool()
    refused = [pool.refused(pool.offer(0.0)) for _ in range(80)]
    assert not any(refused[:55]), "a minute's work may wait"
    assert all(refused[65:])
    (refusal,) = refused[-1]
    assert "its client leaves in 60.0 s" in refusal.reason
    assert 30.0 <= refusal.retry_after_s <= 90.0


def test_a_client_that_says_how_long_it_waits_is_believed() -> None:
    pool = Pool()
    for _ in range(30):
        pool.offer(0.0)
    assert pool.refused(pool.offer(0.0, leaves_s=20.0))
    for _ in range(40):
        pool.offer(0.0)
    assert pool.refused(pool.offer(0.0))
    assert not pool.refused(pool.offer(0.0, leaves_s=300.0))


def test_an_slo_of_minutes_is_waited_for() -> None:
    pool = Pool()
    for _ in range(100):
        assert not pool.refused(pool.offer(0.0, slo_s=300.0))
    assert pool.refused(pool.offer(0.0))


def test_only_what_goes_before_a_call_keeps_it_from_its_client() -> None:
    pool = Pool(PoolPolicies())
    for _ in range(100):
        assert not pool.refused(pool.offer(0.0, slo_s=600.0))
    pool.tell(2.0)
    assert not pool.refused(pool.offer(2.0, slo_s=5.0)), "it is urgent, and they have time"


def test_a_pool_may_let_everybody_wait() -> None:
    pool = Pool(replace(FCFS, patience_s=None))
    for _ in range(200):
        assert not pool.refused(pool.offer(0.0))
    assert pool.refused(pool.core.handle(Ticked(4.0))) == []


def test_what_waits_is_refused_when_its_patience_is_over_and_not_before() -> None:
    pool = Pool()
    pool.offer(0.0)
    for now_s in range(4, 56, 4):
        assert pool.tell(float(now_s)) == ()
    assert pool.tell(59.0) == ()
    (refusal,) = pool.refused(pool.tell(59.6))  # its prompt alone takes half a second
    assert refusal.reason == "the patience of its client is used up"
    assert pool.queued == 0


def test_a_prompt_longer_than_any_patience_may_be_tried() -> None:
    """Another try would take as long: a refusal would never end."""
    pool = Pool()
    pool.end_one(1.0)
    (command,) = pool.offer(1.0, leaves_s=0.4)
    assert isinstance(command, Dispatch)


def test_an_offer_that_is_made_again_is_not_refused_in_the_same_breath() -> None:
    pool = Pool()
    call = an_invocation("again", tokens=TOKENS, deadline_s=5.0)
    pool.offer_call(0.0, call)
    assert pool.offer_call(70.0, call) == ()
    assert pool.refused(pool.tell(70.1))


def test_a_start_takes_as_long_as_it_does() -> None:
    """Clients that are told nothing wait for an engine that comes up; what they said counts."""
    pool = Pool()
    pool.offer(0.0)
    pool.offer(0.0, leaves_s=80.0)
    pool.core.handle(ReplicaLost(1.0, ReplicaId("r"), "died"))
    gone = [r for t in range(2, 100) for r in pool.refused(pool.core.handle(Ticked(float(t))))]
    assert len(gone) == 1
    assert pool.queued == 1
    assert pool.tell(100.0) != (), "the other one has its place at once"


def test_late_calls_that_others_keep_from_a_place_are_told_soon() -> None:
    """As long as calls that can be in time take all places, nothing is left for the late."""
    pool = Pool(PoolPolicies())
    now_s, refused = 0.0, []
    while now_s < 60.0:
        now_s += 0.25
        refused += pool.refused(pool.offer(now_s, slo_s=2.0))
        if now_s % 1.0 == 0.0:
            refused += pool.refused(pool.end_one(now_s))
    waits = [now_s - 0.25 * int(r.invocation_id[1:]) for r in refused]
    assert len(refused) >= 100
    assert min(waits) >= 0.0
    assert pool.queued <= 30, "no more than a lull would serve"


def test_a_burst_turns_nobody_away() -> None:
    pool = Pool(PoolPolicies())
    refused = [r for _ in range(30) for r in pool.refused(pool.offer(0.0, slo_s=2.0))]
    for second in range(1, 31):
        refused += pool.refused(pool.end_one(float(second)))
    assert refused == []
    assert pool.queued == 0


def test_work_that_an_engine_has_begun_is_not_refused_for_what_is_predicted() -> None:
    pool = Pool()
    for _ in range(80):
        pool.offer(0.0)
    begun = an_invocation("begun", tokens=TOKENS, deadline_s=5.0)
    assert not pool.refused(pool.offer_call(0.0, replace(begun, served_s=2.0)))
    assert not pool.refused(pool.offer(0.0, attempt=2))


def test_a_run_that_has_begun_does_not_end_with_its_clients_first_patience() -> None:
    """Its stream had signs of life meanwhile."""
    pool = Pool()
    later = an_invocation("later", tokens=TOKENS, arrived_at_s=70.0, deadline_s=75.0)
    pool.offer_call(70.0, replace(later, served_s=60.0, leaves_at_s=60.0))
    assert pool.tell(100.0) == ()
    assert pool.refused(pool.tell(130.0))


def test_the_wait_for_the_next_token_counts_from_the_loss_of_the_replica() -> None:
    pool = Pool()
    call = an_invocation("lost", tokens=TOKENS, arrived_at_s=0.0, deadline_s=5.0)
    assert pool.offer_call(100.0, call.continued(2, 3)) == ()
    assert pool.tell(130.0) == ()
    assert pool.tell(159.0) == ()
    assert pool.refused(pool.tell(160.0))


def test_who_has_left_is_forgotten() -> None:
    pool = Pool()
    for second in range(1000):
        pool.offer(float(second), slo_s=1.0)
        id = InvocationId(f"i{second + 1:03d}")
        pool.core.handle(InvocationWithdrawn(float(second), id, 1, "left"))
        pool.tell(float(second))
    assert len(pool.core._refusal._leaving) <= 64


@pytest.mark.parametrize("replicas", [1, 4])
def test_late_work_is_believed_to_go_at_full_speed_until_it_is_seen_not_to(replicas: int) -> None:
    late = LateService()
    assert late.speed(replicas) == replicas
    late.watch(MEMORY_S, have_waited=False)
    assert late.speed(replicas) == replicas
    late.watch(10 * MEMORY_S, have_waited=True)
    least = replicas * PRIOR_S / (PRIOR_S + MEMORY_S)
    assert late.speed(replicas) == pytest.approx(least, rel=0.01)
    late.served(replicas * MEMORY_S)
    assert late.speed(replicas) == pytest.approx(replicas, rel=0.01)


def test_a_place_in_the_line_tells_the_wait() -> None:
    line = Line(speed=2.0)
    line.join((3, 1.0, 0.0, "a"), 4.0)
    line.join((3, 2.0, 0.0, "b"), 6.0)
    assert [line.wait_s((3, key, 0.0, "x")) for key in (0.5, 1.5, 2.5)] == [0.0, 2.0, 5.0]


def a_turn(id: str, now_s: float, *, session: str = "s", last_block: int = 7) -> Invocation:
    """A turn that is due in 5 s; its client waits for 20 s."""
    call = an_invocation(id, tokens=TOKENS, arrived_at_s=now_s, deadline_s=now_s + 5.0)
    leaves_at_s = now_s + 20.0
    return replace(call, session=session, prefix=(1, last_block), leaves_at_s=leaves_at_s)


def due_s(pool: Pool, call: Invocation) -> float:
    """When it is due, as a call that waits in the pool."""
    assert not pool.refused(pool.offer_call(call.arrived_at_s, call))
    found = pool.core.invocation(call.id)
    assert found is not None
    return found.deadline_s


def refused_at(pool: Pool, call: Invocation, due: float | None = None) -> float:
    """Its client's patience ends in the queue; it is due at `due`."""
    assert due_s(pool, call) == (call.deadline_s if due is None else due)
    at_s = call.arrived_at_s + 19.9
    pool.tell(at_s - 10.0)
    assert [r.invocation_id for r in pool.refused(pool.tell(at_s))] == [call.id]
    return at_s


def test_a_refused_turn_that_comes_again_keeps_its_due_date_and_others_do_not() -> None:
    pool = Pool()
    again_s = refused_at(pool, a_turn("a", 0.0)) + 3.0
    assert due_s(pool, a_turn("next", again_s, last_block=8)) == again_s + 5.0
    assert due_s(pool, a_turn("other", again_s, session="t")) == again_s + 5.0
    assert due_s(pool, a_turn("again", again_s)) == 5.0


def test_it_counts_as_new_a_minute_after_its_last_refusal() -> None:
    pool = Pool()
    late_s = refused_at(pool, a_turn("a", 0.0)) + ASKS_AGAIN_S + 1.0
    assert due_s(pool, a_turn("again", late_s)) == late_s + 5.0


def test_it_counts_as_new_minutes_after_its_first_refusal() -> None:
    """Otherwise it would stay late, and wait, until the load falls."""
    pool = Pool()
    first_s = at_s = refused_at(pool, a_turn("first", 0.0))
    while at_s + 3.0 <= first_s + LATE_FOR_S:
        at_s = refused_at(pool, a_turn(f"at {at_s}", at_s + 3.0), due=5.0)
    new = a_turn("new", at_s + 3.0)
    at_s = refused_at(pool, new)
    assert due_s(pool, a_turn("last", at_s + 3.0)) == new.deadline_s


def test_calls_without_a_session_are_new_each_time() -> None:
    pool = Pool()
    at_s = refused_at(pool, a_turn("a", 0.0, session="")) + 3.0
    assert due_s(pool, a_turn("again", at_s, session="")) == at_s + 5.0


def test_the_memory_of_refused_turns_is_bounded_and_forgets_the_old() -> None:
    turns = RefusedTurns()
    for i in range(MAX_TURNS + 10):
        turns.keep(a_turn(f"t{i}", 1.0, session=f"s{i}"), 21.0)
    assert len(turns) == MAX_TURNS
    again = [a_turn("again", 24.0, session=s) for s in ("s0", f"s{MAX_TURNS}")]
    assert [turns.as_first_asked(c, 24.0).deadline_s for c in again] == [29.0, 6.0]
    turns.keep(a_turn("new", 79.0), 99.0)
    assert len(turns) == 1
    assert turns.as_first_asked(a_turn("again", 102.0), 102.0).deadline_s == 84.0
