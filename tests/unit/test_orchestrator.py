"""The pool's books hold whatever happens, and its decisions follow the policies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cato.core.commands import Command, Dispatch, Refuse
from cato.core.decision import Hold, Rank, Route
from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    PoliciesChanged,
    ReplicaLost,
    ReplicaReported,
    Ticked,
)
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.core.orchestrator import (
    LEASE_GRACE_S,
    MIN_RETRY_AFTER_S,
    SILENCE_S,
    PoolOrchestrator,
    expected_wait_s,
)
from cato.core.policies import Policies, Work
from cato.core.snapshot import Invocation, PoolSnapshot
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.ordering.slack_priority import LateLast
from cato.policies.registry import ORDERING, ROUTING
from cato.policies.routing.cato import CatoRouting
from cato.testing.builders import a_profile, a_report, an_invocation

FAST, SLOW = a_profile(prefill_s=0.1), a_profile(prefill_s=1.0, token_s=0.1)


@dataclass(frozen=True, slots=True)
class HoldsSome:
    """Leaves every invocation with a draw of at least one half in the queue."""

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if invocation.draw >= 0.5 or not pool.replicas:
            return Hold("not this one")
        return Route(pool.replicas[-1].id, "the last")


SHIPPED = tuple(
    Policies(routing, ordering, late_binding, max_queued)
    for routing, ordering, late_binding in product(
        ROUTING.values(), ORDERING.values(), (True, False)
    )
    for max_queued in (0, 2, 1000)
)
HOLDING = tuple(Policies(HoldsSome(), o, late) for o in ORDERING.values() for late in (True, False))
LATE_CATO = Policies(CatoRouting(), LateLast())


def a_pool(policies: Policies = LATE_CATO) -> PoolOrchestrator:
    return PoolOrchestrator(PoolName("p"), policies)


def offer(
    id: str, now_s: float = 0.0, *, attempt: int = 1, deadline_s: float = 10.0
) -> InvocationOffered:
    return InvocationOffered(
        now_s, an_invocation(id, attempt=attempt, arrived_at_s=now_s, deadline_s=deadline_s)
    )


def ended(id: str, now_s: float = 0.0, *, attempt: int = 1) -> InvocationEnded:
    return InvocationEnded(now_s, InvocationId(id), attempt, 10, "done")


def dispatched(commands: tuple[Command, ...]) -> list[tuple[str, str]]:
    return [(c.invocation_id, c.replica_id) for c in commands if isinstance(c, Dispatch)]


# Any sequence of events, against books kept in the plainest way


@dataclass(slots=True)
class BookReplica:
    report: ReplicaReported
    adopted: set[InvocationId]

    @property
    def accepts(self) -> bool:
        return self.report.accepting and self.report.max_running > 0


@dataclass(slots=True)
class Books:
    """What must be true, by definition; checks every answer of the orchestrator against it."""

    policies: Policies
    waiting: dict[InvocationId, Invocation] = field(default_factory=dict)
    leases: dict[InvocationId, tuple[Dispatch, float]] = field(default_factory=dict)
    replicas: dict[ReplicaId, BookReplica] = field(default_factory=dict)
    refused: int = 0
    # Who still waits although something of a larger rank went to the replica.
    passed_over: list[tuple[InvocationId, ReplicaId]] = field(default_factory=list)

    def held(self, id: ReplicaId) -> int:
        leased = sum(lease.replica_id == id for lease, _ in self.leases.values())
        return leased + len(self.replicas[id].adopted)

    def has_room(self, id: ReplicaId) -> bool:
        r = self.replicas[id]
        return r.accepts and self.held(id) < r.report.max_running + r.report.standby

    def note(self, event: Event) -> Dispatch | None:
        """Keep the fact; returns the lease that must be said again, if any."""
        match event:
            case InvocationOffered(_, invocation):
                id = invocation.id
                if id in self.leases:
                    if invocation.attempt <= self.leases[id][0].attempt:
                        return self.leases[id][0]
                    del self.leases[id]
                old = self.waiting.get(id)
                if old is None or invocation.attempt >= old.attempt:
                    self.waiting[id] = invocation
                self._unadopt(id)
            case InvocationEnded(_, id, attempt):
                if id in self.leases and self.leases[id][0].attempt == attempt:
                    del self.leases[id]
                self._unadopt(id)
            case InvocationWithdrawn(_, id):
                self.waiting.pop(id, None)
                self.leases.pop(id, None)
                self._unadopt(id)
            case ReplicaReported(now_s, replica_id):
                for id, (lease, at_s) in list(self.leases.items()):
                    is_unnamed = lease.replica_id == replica_id and id not in event.held
                    if is_unnamed and now_s - at_s > LEASE_GRACE_S:
                        del self.leases[id]
                adopted = set(event.held) - set(self.leases) - set(self.waiting)
                self.replicas[replica_id] = BookReplica(event, adopted)
            case ReplicaLost(_, replica_id):
                self._lose(replica_id)
            case PoliciesChanged(_, policies):
                self.policies = policies
            case Ticked(now_s):
                for replica in list(self.replicas.values()):
                    if now_s - replica.report.now_s > SILENCE_S:
                        self._lose(replica.report.replica_id)
            case FirstTokenSent():
                pass
        return None

    def take(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Check that `commands` keep every promise, and keep them."""
        now_s = event.now_s
        ranks = {i.id: self._rank(i, now_s) for i in self.waiting.values()}
        for command in commands:
            id = command.invocation_id
            assert id in self.waiting, f"{id} does not wait"
            assert id not in self.leases
            invocation = self.waiting.pop(id)
            if isinstance(command, Refuse):
                assert isinstance(event, InvocationOffered)
                assert event.invocation.id == id
                assert len(self.waiting) >= self.policies.max_queued
                assert command.retry_after_s >= MIN_RETRY_AFTER_S
                self.refused += 1
                continue
            assert command.attempt == invocation.attempt
            assert command.replica_id in self.replicas, "dispatched to an unknown replica"
            assert self.has_room(command.replica_id), "dispatched to a full or closed replica"
            assert command.priority == ranks[id]
            assert command.queue_s == now_s - invocation.arrived_at_s
            assert command.slack_s == invocation.deadline_s - now_s
            self.leases[id] = (command, now_s)
        for command in commands:
            if isinstance(command, Dispatch):
                self._check_nobody_was_passed_over(command, ranks)

    def _check_nobody_was_passed_over(
        self, command: Dispatch, ranks: dict[InvocationId, int]
    ) -> None:
        self.passed_over += [
            (id, command.replica_id)
            for id in self.waiting
            if ranks[id] < ranks[command.invocation_id]
        ]

    def _rank(self, invocation: Invocation, now_s: float) -> int:
        profiles = [r.report.profile for r in self.replicas.values() if r.accepts]
        if not profiles:
            return 0
        work = Work(min(invocation.remaining_s(p) for p in profiles), 0.0)
        return self.policies.ordering.rank(invocation, work, now_s).value

    def _unadopt(self, id: InvocationId) -> None:
        for replica in self.replicas.values():
            replica.adopted.discard(id)

    def _lose(self, id: ReplicaId) -> None:
        if self.replicas.pop(id, None) is not None:
            self.leases = {i: x for i, x in self.leases.items() if x[0].replica_id != id}


IDS = [InvocationId(f"i{n}") for n in range(7)]
REPLICAS = [ReplicaId(f"r{n}") for n in range(3)]
ids, replica_ids = st.sampled_from(IDS), st.sampled_from(REPLICAS)
offers = st.builds(
    an_invocation,
    ids,
    prompt=st.integers(1, 3),
    tokens=st.integers(1, 400),
    deadline_s=st.floats(-2, 40),
    downstream_s=st.sampled_from([0.0, 1.0]),
    until_first_token=st.booleans(),
    draw=st.floats(0, 0.999),
    attempt=st.sampled_from([1, 1, 1, 2, 3]),
).map(lambda invocation: InvocationOffered(0.0, invocation))
reports = st.builds(
    a_report,
    replica_ids,
    slots=st.sampled_from([0, 1, 1, 2]),
    standby=st.integers(0, 1),
    accepting=st.sampled_from([True, True, True, False]),
    held=st.lists(st.sampled_from([*IDS, "stranger"]), max_size=3, unique=True),
    profile=st.sampled_from([FAST, SLOW]),
)
others = st.one_of(
    st.builds(ReplicaLost, st.just(0.0), replica_ids, st.just("gone")),
    st.builds(
        InvocationEnded, st.just(0.0), ids, st.integers(1, 3), st.just(9), st.sampled_from(["done"])
    ),
    st.builds(InvocationWithdrawn, st.just(0.0), ids, st.just("left")),
    st.builds(FirstTokenSent, st.just(0.0), ids),
    st.just(Ticked(0.0)),
)
steps_s = st.sampled_from([0.0, 0.0, 0.1, 1.0, 2.0, 4.0, 6.0])


def histories(policies: tuple[Policies, ...]) -> st.SearchStrategy[list[Event]]:
    changes = st.builds(PoliciesChanged, st.just(0.0), st.sampled_from(policies))
    events = st.one_of(offers, offers, reports, others, changes)
    steps = st.lists(st.tuples(steps_s, events), max_size=40)

    def timed(steps: list[tuple[float, Event]]) -> list[Event]:
        now_s, history = 0.0, []
        for step_s, event in steps:
            now_s += step_s
            if isinstance(event, InvocationOffered):
                shifted = replace(
                    event.invocation,
                    arrived_at_s=now_s,
                    deadline_s=now_s + event.invocation.deadline_s,
                )
                event = replace(event, invocation=shifted)
            history.append(replace(event, now_s=now_s))
        return history

    return st.builds(timed, steps)


def play(policies: Policies, history: list[Event], *, all_held: bool) -> PoolOrchestrator:
    """Feed `history` and check every promise after every event."""
    pool, books = a_pool(policies), Books(policies)
    for event in history:
        said_again = books.note(event)
        commands = pool.handle(event)
        if said_again is not None:
            assert commands == (said_again,)
            continue
        books.take(event, commands)
        picture = pool.picture(event.now_s)
        assert picture.queued == len(books.waiting)
        assert picture.refused == books.refused
        assert {r.id: r.held for r in picture.replicas} == {
            id: books.held(id) for id in books.replicas
        }
        assert not set(books.leases) & set(books.waiting)
        for id, replica_id in books.passed_over:
            why = pool.why_waiting(id)
            if books.policies.late_binding:
                assert all_held, f"{id} was passed over: {why}"
                assert books.waiting[id].draw >= 0.5
            else:
                assert not why.startswith(f"in the queue of {replica_id}:")
        books.passed_over.clear()
        if books.policies.late_binding and not all_held and books.waiting:
            assert not any(books.has_room(id) for id in books.replicas)
        waiting_first_attempts = [i for i in books.waiting.values() if i.attempt == 1]
        if not any(isinstance(e, PoliciesChanged | ReplicaLost) for e in history):
            assert len(waiting_first_attempts) <= books.policies.max_queued
    return pool


@settings(max_examples=120)
@given(st.sampled_from(SHIPPED), histories(SHIPPED))
def test_books_and_decisions_hold_under_any_events_with_the_shipped_policies(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, all_held=False)


@settings(max_examples=60)
@given(st.sampled_from(HOLDING), histories(HOLDING))
def test_only_what_the_routing_policy_holds_is_passed_over(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, all_held=True)


@settings(max_examples=60)
@given(st.sampled_from(SHIPPED + HOLDING), histories(SHIPPED + HOLDING))
def test_the_same_events_give_the_same_commands(policies: Policies, history: list[Event]) -> None:
    first, second = a_pool(policies), a_pool(policies)
    assert [first.handle(e) for e in history] == [second.handle(e) for e in history]
    assert first.picture(1e3) == second.picture(1e3)


@settings(max_examples=60)
@given(st.sampled_from(SHIPPED), histories(SHIPPED))
def test_no_slot_leaks_once_everything_has_ended(policies: Policies, history: list[Event]) -> None:
    pool = play(policies, history, all_held=False)
    end_s = history[-1].now_s if history else 0.0
    for id in IDS:
        pool.handle(InvocationWithdrawn(end_s, id, "over"))
    for replica_id in REPLICAS:
        pool.handle(a_report(replica_id, now_s=end_s + LEASE_GRACE_S + 1, slots=2, held=()))
    picture = pool.picture(end_s)
    assert picture.queued == 0
    assert [r.held for r in picture.replicas] == [0, 0, 0]


# Offers and leases


def test_an_offer_made_again_gets_the_same_lease() -> None:
    pool = a_pool()
    pool.handle(a_report("r", slots=2))
    first = pool.handle(offer("i"))
    assert pool.handle(offer("i", 1.0)) == first
    assert pool.picture(1.0).replicas[0].held == 1


def test_a_higher_attempt_replaces_the_lease_of_the_one_before() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("i"))
    (again,) = pool.handle(offer("i", 1.0, attempt=2))
    assert isinstance(again, Dispatch)
    assert again.attempt == 2
    assert pool.handle(ended("i", 2.0, attempt=1)) == ()
    assert pool.picture(2.0).replicas[0].held == 1


def test_a_late_copy_of_an_earlier_attempt_does_not_replace_the_newer_one() -> None:
    pool = a_pool()
    pool.handle(offer("i", attempt=2))
    pool.handle(offer("i", attempt=1))
    (command,) = pool.handle(a_report("r"))
    assert isinstance(command, Dispatch)
    assert command.attempt == 2


def test_late_binding_gives_a_freed_slot_to_the_most_urgent_and_late_ones_come_last() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("running"))
    pool.handle(offer("late", 0.1, deadline_s=0.5))
    pool.handle(offer("relaxed", 0.2, deadline_s=60.0))
    pool.handle(offer("tight", 0.3, deadline_s=1.2))
    order = []
    for now_s, id in ((1.0, "running"), (1.1, "tight"), (1.2, "relaxed")):
        order += [i for i, _ in dispatched(pool.handle(ended(id, now_s)))]
    assert order == ["tight", "relaxed", "late"]


def test_slack_is_judged_again_at_dispatch_not_only_on_arrival() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("running"))
    pool.handle(offer("was-feasible", 0.0, deadline_s=5.0))
    pool.handle(offer("is-feasible", 1.0, deadline_s=50.0))
    (command,) = pool.handle(ended("running", 6.0))
    assert isinstance(command, Dispatch)
    assert command.invocation_id == "is-feasible"
    assert command.priority == 1
    assert command.slack_s == pytest.approx(44.0)
    assert command.queue_s == pytest.approx(5.0)
    assert command.reason.startswith("feasible (place 1); slack 44.000 s")


def test_standby_places_are_filled_after_every_running_place() -> None:
    pool = a_pool()
    pool.handle(a_report("a", standby=1))
    pool.handle(a_report("b", standby=1))
    places = [dispatched(pool.handle(offer(f"i{n}", 0.1 * n))) for n in range(5)]
    assert places == [[("i0", "a")], [("i1", "b")], [("i2", "a")], [("i3", "b")], []]


# The bound of the queue


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    pool = a_pool(replace(LATE_CATO, max_queued=2))
    pool.handle(a_report("r", profile=a_profile(prefill_s=3.0, token_s=0.0)))
    for id in ("running", "first", "second"):
        pool.handle(offer(id))
    (refusal,) = pool.handle(offer("third"))
    reason = "2 invocations wait, the bound of pool 'p'"
    assert refusal == Refuse(InvocationId("third"), reason, retry_after_s=6.0)
    assert pool.picture(0.0).refused == 1


def test_a_pool_that_may_not_queue_still_serves_what_it_has_room_for() -> None:
    pool = a_pool(replace(LATE_CATO, max_queued=0))
    pool.handle(a_report("r"))
    assert dispatched(pool.handle(offer("i"))) == [("i", "r")]
    (refusal,) = pool.handle(offer("j"))
    assert isinstance(refusal, Refuse)
    assert refusal.retry_after_s == MIN_RETRY_AFTER_S


def test_what_goes_on_after_a_lost_replica_is_never_refused() -> None:
    pool = a_pool(replace(LATE_CATO, max_queued=1))
    pool.handle(a_report("a"))
    pool.handle(offer("streaming"))
    pool.handle(offer("queued"))
    pool.handle(ReplicaLost(1.0, ReplicaId("a"), "host died"))
    assert pool.handle(offer("streaming", 1.0, attempt=2)) == ()
    assert pool.picture(1.0).queued == 2


# Replicas come, go and restart


def test_a_lease_that_its_replica_never_takes_up_is_free_after_the_grace_time() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("i"))
    pool.handle(a_report("r", now_s=LEASE_GRACE_S))
    assert pool.picture(1.0).replicas[0].held == 1
    pool.handle(a_report("r", now_s=LEASE_GRACE_S + 0.1))
    assert pool.picture(1.0).replicas[0].held == 0


def test_a_silent_replica_is_lost_and_its_leases_end() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("i"))
    pool.handle(Ticked(SILENCE_S))
    assert len(pool.picture(0.0).replicas) == 1
    pool.handle(Ticked(SILENCE_S + 0.1))
    assert pool.picture(0.0).replicas == ()
    assert dispatched(pool.handle(a_report("s", now_s=6.0))) == []


def test_a_router_that_restarted_counts_what_its_replicas_already_hold() -> None:
    pool = a_pool()
    pool.handle(a_report("r", slots=2, held=("x", "y")))
    assert pool.handle(offer("i")) == ()
    assert dispatched(pool.handle(ended("x"))) == [("i", "r")]


def test_an_adopted_invocation_that_is_offered_again_counts_once() -> None:
    pool = a_pool()
    pool.handle(a_report("r", slots=2, held=("x",)))
    pool.handle(offer("x"))
    assert pool.picture(0.0).replicas[0].held == 1


def test_withdrawing_an_adopted_invocation_frees_its_slot_at_once() -> None:
    pool = a_pool()
    pool.handle(a_report("r", held=("x",)))
    pool.handle(offer("i"))
    withdrawn = pool.handle(InvocationWithdrawn(0.0, InvocationId("x"), "left"))
    assert dispatched(withdrawn) == [("i", "r")]


def test_a_report_made_before_the_end_of_an_invocation_blocks_a_slot_until_the_next() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("i"))
    pool.handle(ended("i", 1.0))
    pool.handle(a_report("r", now_s=1.1, held=("i",)))
    assert pool.picture(1.1).replicas[0].held == 1
    pool.handle(a_report("r", now_s=1.6))
    assert pool.picture(1.6).replicas[0].held == 0


@pytest.mark.parametrize("routing", ["cato", "power-of-two", "round-robin"])
def test_a_draining_replica_passes_its_queue_to_the_others(routing: str) -> None:
    policies = Policies(ROUTING[routing], FirstComeFirstServed(), late_binding=False)
    pool = a_pool(policies)
    pool.handle(a_report("a"))
    for n in range(3):
        pool.handle(offer(f"i{n}"))
    pool.handle(a_report("b", slots=2))
    moved = pool.handle(a_report("a", accepting=False, held=("i0",)))
    assert dispatched(moved) == [("i1", "b"), ("i2", "b")]


def test_early_binding_keeps_each_queue_with_its_replica() -> None:
    policies = Policies(ROUTING["round-robin"], FirstComeFirstServed(), late_binding=False)
    pool = a_pool(policies)
    pool.handle(a_report("a"))
    pool.handle(a_report("b"))
    for n in range(4):
        pool.handle(offer(f"i{n}", 0.1 * n))
    assert pool.why_waiting(InvocationId("i3")) == "in the queue of b: turn 2 of 2"
    assert [r.queued for r in pool.picture(1.0).replicas] == [1, 1]
    assert dispatched(pool.handle(ended("i0", 1.0))) == [("i2", "a")]
    assert dispatched(pool.handle(ended("i2", 1.1))) == []
    assert dispatched(pool.handle(PoliciesChanged(1.2, LATE_CATO))) == [("i3", "a")]


# Expected waits


def test_the_wait_at_a_full_replica_is_what_its_running_invocation_still_needs() -> None:
    pool = a_pool()
    pool.handle(a_report("r", profile=a_profile(prefill_s=1.0, token_s=0.1)))
    pool.handle(offer("i"))  # 50 tokens: 1 s and 49 steps of 0.1 s
    assert pool.picture(2.0).replicas[0].wait_s == pytest.approx(3.9)
    pool.handle(FirstTokenSent(3.0, InvocationId("i")))  # 2 s later than the profile said
    assert pool.picture(3.0).replicas[0].wait_s == pytest.approx(4.9)


def test_the_end_of_a_lease_does_not_wait_for_what_is_queued_behind_it() -> None:
    pool = a_pool(Policies(CatoRouting(), FirstComeFirstServed(), late_binding=False))
    pool.handle(a_report("r", profile=a_profile(prefill_s=1.0, token_s=0.0)))
    for n in range(3):
        pool.handle(offer(f"i{n}"))
    assert pool.picture(0.0).replicas[0].wait_s == pytest.approx(3.0)
    pool.handle(ended("i0", 1.0))  # i1 starts, i2 waits
    assert pool.picture(1.0).replicas[0].wait_s == pytest.approx(2.0)


@given(
    st.lists(st.floats(0, 9), max_size=5), st.lists(st.floats(0, 9), max_size=6), st.integers(1, 4)
)
def test_the_expected_wait_is_that_of_serving_in_order_by_the_first_free_slot(
    running_s: list[float], queued_s: list[float], slots: int
) -> None:
    running_s = running_s[:slots]
    free_at = running_s + [0.0] * (slots - len(running_s))
    for service_s in queued_s:
        first = free_at.index(min(free_at))
        free_at[first] += service_s
    assert expected_wait_s(running_s, queued_s, slots) == pytest.approx(min(free_at))


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=4), st.floats(0.1, 9))
def test_a_standby_that_follows_the_first_to_end_counts_as_its_slots_new_end(
    running_s: list[float], service_s: float
) -> None:
    slots = len(running_s)
    standby_end_s = min(running_s) + service_s
    expected = expected_wait_s(running_s, [service_s], slots)
    assert expected_wait_s([*running_s, standby_end_s], [], slots) == pytest.approx(expected)


def test_a_replica_without_slots_is_never_free() -> None:
    assert expected_wait_s([], [], 0) == float("inf")


# Words for the operator


def test_why_waiting_names_the_reason() -> None:
    pool = a_pool(Policies(HoldsSome(), FirstComeFirstServed()))
    held = an_invocation("held", draw=0.9)
    pool.handle(InvocationOffered(0.0, held))
    assert pool.why_waiting(held.id) == "none of 0 replicas has room"
    pool.handle(a_report("r"))
    assert pool.why_waiting(held.id) == "not this one"
    pool.handle(offer("i"))
    assert pool.why_waiting(held.id) == "none of 1 replicas has room"
    assert pool.why_waiting(InvocationId("i")) == ""


# Price of a decision


@dataclass(frozen=True, slots=True)
class CountedRanks:
    """First come, first served, and a list of what was ranked."""

    ranked: list[InvocationId]

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        self.ranked.append(invocation.id)
        return Rank(0, "")


def test_an_event_that_frees_nothing_does_not_look_at_the_queue() -> None:
    ranked: list[InvocationId] = []
    pool = a_pool(Policies(CatoRouting(), CountedRanks(ranked)))
    pool.handle(a_report("r"))
    pool.handle(offer("running"))
    ranked.clear()
    for n in range(50):
        pool.handle(offer(f"i{n}"))
    pool.handle(FirstTokenSent(1.0, InvocationId("running")))
    pool.handle(a_report("r", now_s=1.0, held=("running",)))
    pool.handle(Ticked(1.0))
    assert ranked == []
    pool.handle(ended("running", 1.0))
    assert len(ranked) == 50
