"""The pool's books hold whatever happens, and its decisions follow the policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.decision import Admit, Defer, Hold, Rank, Route
from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    PoliciesChanged,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReported,
    Ticked,
)
from cato.core.ids import InvocationId, PoolName, ReplicaId
from cato.core.length import LengthBelief
from cato.core.orchestrator import (
    LEASE_GRACE_S,
    MIN_RETRY_AFTER_S,
    SILENCE_S,
    PoolOrchestrator,
    expected_wait_s,
)
from cato.core.policies import (
    ADMIT_ALWAYS,
    AdmissionPolicy,
    OrderingPolicy,
    Policies,
    RoutingPolicy,
    Work,
)
from cato.core.profile import Profile
from cato.core.snapshot import Invocation, PoolSnapshot, ReplicaView
from cato.estimators.usl import UslFit
from cato.policies import schedulers
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


@dataclass(frozen=True, slots=True)
class DefersSome:
    """Lets an invocation join when its draw is below one half, whatever runs."""

    closes_from: float = 1.0

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        if invocation.draw < 0.5:
            return Admit("this one may")
        return Defer("this one may not", closes=invocation.draw >= self.closes_from)


@dataclass(frozen=True, slots=True)
class TakesBackSome:
    """Takes back what runs and has a draw of at least 0.3, as many as wait."""

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
    ) -> Sequence[tuple[InvocationId, str]]:
        some = [r.invocation.id for r in replica.running if r.invocation.draw >= 0.3]
        return [(id, "gives way") for id in some[: len(waiting)]]


SHIPPED = tuple(
    Policies(routing, ordering, late_binding, max_queued)
    for routing, ordering, late_binding in product(
        ROUTING.values(), ORDERING.values(), (True, False)
    )
    for max_queued in (0, 2, 1000)
)
HOLDING = tuple(Policies(HoldsSome(), o, late) for o in ORDERING.values() for late in (True, False))
ASKING = tuple(
    Policies(routing, ordering, late_binding, max_queued, admission, preemption, window, *order)
    for routing, ordering in product(
        (ROUTING["power-of-two"], HoldsSome()), (FirstComeFirstServed(), LateLast())
    )
    for late_binding, max_queued in ((True, 1000), (True, 3), (False, 1000))
    for admission in (ADMIT_ALWAYS, DefersSome(), DefersSome(closes_from=0.75))
    for preemption in (None, TakesBackSome())
    for window, *order in ((0, False, False), (2, False, False), (3, True, True), (0, False, True))
)
SPEED = UslFit(lambda_tokens_per_s=50.0, sigma=0.2, kappa=0.01, r2=1.0)
WHOLE = (
    schedulers.foresight(),
    schedulers.saber(SPEED, window=3),
    schedulers.static_cap(1),
    schedulers.static_cap(2),
    schedulers.cato(),
    *(schedulers.early(name) for name in ("round-robin", "power-of-two", "least-wait")),
    *(schedulers.OF_PROFILE[name](SLOW, 2) for name in ("tempo", "plas", "sjf", "edf")),
)
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


@dataclass(frozen=True, slots=True)
class Ranked:
    """The latest rank of an invocation, and what it was judged by."""

    invocation: Invocation
    work: Work
    rank: Rank
    at_s: float


@dataclass(slots=True)
class BookLease:
    command: Dispatch
    at_s: float
    invocation: Invocation
    tokens: int = 0
    has_begun: bool = False


@dataclass(slots=True)
class Books:
    """What must be true, by definition; checks every answer of the orchestrator against it."""

    policies: Policies
    ranked: dict[InvocationId, Ranked] = field(default_factory=dict)
    waiting: dict[InvocationId, Invocation] = field(default_factory=dict)
    leases: dict[InvocationId, BookLease] = field(default_factory=dict)
    replicas: dict[ReplicaId, BookReplica] = field(default_factory=dict)
    # Preempted attempts that were not offered anew.
    taken_back: dict[InvocationId, int] = field(default_factory=dict)
    refused: int = 0
    # Who still waits although something of a larger rank went to the replica.
    passed_over: list[tuple[InvocationId, ReplicaId]] = field(default_factory=list)

    def leased(self, id: ReplicaId) -> list[BookLease]:
        return [lease for lease in self.leases.values() if lease.command.replica_id == id]

    def held(self, id: ReplicaId) -> int:
        return len(self.leased(id)) + len(self.replicas[id].adopted)

    def has_room(self, id: ReplicaId) -> bool:
        r = self.replicas[id]
        return r.accepts and self.held(id) < r.report.max_running + r.report.standby

    def note(self, event: Event) -> Dispatch | None:
        """Keep the fact; returns the lease that must be said again, if any."""
        match event:
            case InvocationOffered(_, invocation):
                id = invocation.id
                if self.taken_back.get(id, invocation.attempt) < invocation.attempt:
                    del self.taken_back[id]
                if id in self.leases:
                    if invocation.attempt <= self.leases[id].command.attempt:
                        return self.leases[id].command
                    del self.leases[id]
                old = self.waiting.get(id)
                if old is None or invocation.attempt >= old.attempt:
                    self.waiting[id] = invocation
                self._unadopt(id)
            case InvocationEnded(_, id, attempt):
                if id in self.leases and self.leases[id].command.attempt == attempt:
                    del self.leases[id]
                if id not in self.leases:
                    self.taken_back.pop(id, None)
                self._unadopt(id)
            case InvocationWithdrawn(_, id, attempt):
                known = self.leases[id].invocation if id in self.leases else self.waiting.get(id)
                is_late = known is not None and attempt < known.attempt
                if is_late and id not in self.taken_back:
                    return None
                self.taken_back.pop(id, None)
                self.waiting.pop(id, None)
                self.leases.pop(id, None)
                self._unadopt(id)
            case ReplicaReported(now_s, replica_id):
                for lease in self.leased(replica_id):
                    id = lease.command.invocation_id
                    if id not in event.held and now_s - lease.at_s > LEASE_GRACE_S:
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
            case FirstTokenSent(_, id):
                if id in self.leases:
                    self.leases[id].has_begun = True
                    self.leases[id].tokens = max(1, self.leases[id].tokens)
            case ReplicaProgressed(_, replica_id, tokens):
                for id, n in tokens:
                    if id in self.leases and self.leases[id].command.replica_id == replica_id:
                        self.leases[id].has_begun |= n > 0
                        self.leases[id].tokens = max(n, self.leases[id].tokens)
        return None

    def take(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Check that `commands` keep every promise, and keep them."""
        now_s = event.now_s
        for command in commands:
            id = command.invocation_id
            if isinstance(command, Preempt):
                self._take_back(event, command)
                continue
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
            self._check_rank(command, invocation, now_s)
            assert command.queue_s == now_s - invocation.arrived_at_s
            assert command.slack_s == invocation.deadline_s - now_s
            self.leases[id] = BookLease(command, now_s, invocation)
        if self.is_plain:
            for command in commands:
                if isinstance(command, Dispatch):
                    self._check_nobody_was_passed_over(command, now_s)

    @property
    def is_plain(self) -> bool:
        """Only the routing policy may leave anything in the queue."""
        p = self.policies
        return not (p.preemption or p.window or p.strict) and p.admission is ADMIT_ALWAYS

    @property
    def asks_all(self) -> bool:
        """Whatever waits is offered to every replica with room, and the answer never changes."""
        p = self.policies
        if not p.late_binding or p.window or p.strict:
            return False
        return p.admission in (ADMIT_ALWAYS, DefersSome())

    def _take_back(self, event: Event, command: Preempt) -> None:
        """It waits again, with what it has generated as a part of its prompt."""
        assert isinstance(event, ReplicaProgressed)
        assert event.replica_id == command.replica_id
        lease = self.leases.pop(command.invocation_id)
        assert (lease.command.replica_id, lease.command.attempt) == (
            command.replica_id,
            command.attempt,
        )
        before = lease.invocation
        self.taken_back[before.id] = before.attempt
        self.waiting[before.id] = replace(
            before,
            attempt=before.attempt + 1,
            prompt_tokens=before.prompt_tokens + lease.tokens,
            expected_tokens=max(1, before.expected_tokens - lease.tokens),
            generated=before.generated + lease.tokens,
        )

    def _check_rank(self, command: Dispatch, invocation: Invocation, now_s: float) -> None:
        """What goes has a rank that holds, by the replicas that there are."""
        ranked = self.ranked[invocation.id]
        rank = ranked.rank
        assert ranked.invocation == invocation
        assert ranked.at_s == now_s or rank.until_s > now_s, "the rank has run out"
        assert (command.priority, command.reason.split("; ")[0]) == (rank.value, rank.reason)
        assert ranked.work.remaining_s == min(invocation.remaining_s(p) for p in self.profiles)
        if self.is_plain:
            assert rank.value in self._ranks(invocation, ranked.work, now_s)

    def _check_nobody_was_passed_over(self, command: Dispatch, now_s: float) -> None:
        work = self.ranked[command.invocation_id].work
        for i in self.waiting.values():
            own = replace(work, remaining_s=min(i.remaining_s(p) for p in self.profiles))
            if max(self._ranks(i, own, now_s)) < command.priority:
                self.passed_over.append((i.id, command.replica_id))

    def _ranks(self, invocation: Invocation, work: Work, now_s: float) -> set[int]:
        """Its rank by definition; two where it changes at this very moment, but for rounding."""
        around = (now_s - 1e-6, now_s, now_s + 1e-6)
        return {self.policies.ordering.rank(invocation, work, t).value for t in around}

    @property
    def profiles(self) -> set[Profile]:
        """Of what accepts work: an invocation is judged by the fastest of them."""
        return {r.report.profile for r in self.replicas.values() if r.accepts}

    def _unadopt(self, id: InvocationId) -> None:
        for replica in self.replicas.values():
            replica.adopted.discard(id)

    def _lose(self, id: ReplicaId) -> None:
        if self.replicas.pop(id, None) is not None:
            self.leases = {i: x for i, x in self.leases.items() if x.command.replica_id != id}


IDS = [InvocationId(f"i{n}") for n in range(7)]
MANY = 1000  # attempts: more than any history has
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
)
# With what only some policies look at: a belief of the length, a pace, no SLO at all.
rich_offers = st.builds(
    lambda invocation, length, tpot_s, has_slo: replace(
        invocation,
        length=length,
        tpot_target_s=tpot_s,
        deadline_s=invocation.deadline_s if has_slo else inf,
    ),
    offers,
    st.sampled_from([None, LengthBelief((5.0, 40.0, 300.0))]),
    st.sampled_from([inf, 0.05]),
    st.sampled_from([True, True, True, False]),
)
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
    st.builds(InvocationWithdrawn, st.just(0.0), ids, st.integers(1, 3), st.just("left")),
    st.builds(FirstTokenSent, st.just(0.0), ids),
    st.just(Ticked(0.0)),
)
progress = st.builds(
    ReplicaProgressed,
    st.just(0.0),
    replica_ids,
    st.lists(st.tuples(ids, st.integers(0, 30)), max_size=4).map(tuple),
)
steps_s = st.sampled_from([0.0, 0.0, 0.1, 1.0, 2.0, 4.0, 6.0])


def histories(
    policies: tuple[Policies, ...],
    offers: st.SearchStrategy[Invocation] = offers,
) -> st.SearchStrategy[list[Event]]:
    offered = offers.map(lambda invocation: InvocationOffered(0.0, invocation))
    changes = st.builds(PoliciesChanged, st.just(0.0), st.sampled_from(policies))
    events = st.one_of(offered, offered, reports, progress, others, changes)
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


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that a pool put to its policies: may this invocation go there?"""

    invocation: Invocation
    replica_id: ReplicaId | None
    answer: Route | Hold | Admit | Defer


@dataclass(frozen=True, slots=True)
class WatchedRouting:
    policy: RoutingPolicy
    asked: list[Asked]

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        ids = [r.id for r in pool.replicas]
        assert ids == sorted(set(ids)), "replicas are shown once each, in the order of their ids"
        answer = self.policy.route(invocation, pool)
        self.asked.append(Asked(invocation, None, answer))
        return answer


@dataclass(frozen=True, slots=True)
class WatchedAdmission:
    policy: AdmissionPolicy
    asked: list[Asked]

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        assert replica.accepting
        answer = self.policy.admit(invocation, replica, now_s)
        self.asked.append(Asked(invocation, replica.id, answer))
        return answer


@dataclass(frozen=True, slots=True)
class WatchedOrdering:
    policy: OrderingPolicy
    ranked: dict[InvocationId, Ranked]

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        rank = self.policy.rank(invocation, work, now_s)
        self.ranked[invocation.id] = Ranked(invocation, work, rank, now_s)
        return rank


def watched(policies: Policies, asked: list[Asked], ranked: dict[InvocationId, Ranked]) -> Policies:
    """The same policies, and a list of what they were asked."""
    admission = policies.admission
    if admission is not ADMIT_ALWAYS:
        admission = WatchedAdmission(admission, asked)
    return replace(
        policies,
        routing=WatchedRouting(policies.routing, asked),
        ordering=WatchedOrdering(policies.ordering, ranked),
        admission=admission,
    )


def check_questions(
    event: Event, commands: tuple[Command, ...], asked: list[Asked], books: Books
) -> None:
    """Only what was admitted goes; who closes is asked no more; `window` and `strict` hold."""
    policies = books.policies
    closed: set[ReplicaId] = set()
    admitted: set[tuple[InvocationId, ReplicaId]] = set()
    for a in asked:
        if a.replica_id is None:
            continue
        assert a.replica_id not in closed, f"{a.replica_id} is closed"
        if isinstance(a.answer, Admit):
            admitted.add((a.invocation.id, a.replica_id))
        elif isinstance(a.answer, Defer) and a.answer.closes:
            closed.add(a.replica_id)
    if policies.admission is not ADMIT_ALWAYS:
        assert admitted == set(dispatched(commands))
    if not policies.late_binding:
        return
    order = [a.invocation for a in asked if a.replica_id is None]
    assert len({i.id for i in order}) == len(order), "asked about twice"
    assert not policies.window or len(order) <= policies.window
    gone = {c.invocation_id for c in commands if isinstance(c, Dispatch)}
    passed_over = [i for i in order if i.id not in gone]
    rank_of = {id: r.rank.value for id, r in books.ranked.items()}
    if policies.strict and passed_over:
        least = min(rank_of[i.id] for i in passed_over)
        first = order.index(passed_over[0])
        assert all(rank_of[i.id] <= least for i in order[first:])
    # An offer may ask about the newcomer alone: who waited before it was asked before.
    if order and not isinstance(event, InvocationOffered):
        unasked = set(books.waiting) - {i.id for i in order}
        worst = max(rank_of[i.id] for i in order)
        assert all(worst <= rank_of[id] for id in unasked), "out of order"


def play(
    policies: Policies, history: list[Event], *, some_held: bool, never_idle: bool = False
) -> PoolOrchestrator:
    """Feed `history` and check every promise after every event.

    `some_held`: the policies leave in the queue, if anything, what has a draw of at least one half.
    `never_idle`: they give an idle replica whatever waits for it.
    """
    asked: list[Asked] = []
    books = Books(policies)
    pool = a_pool(watched(policies, asked, books.ranked))
    for event in history:
        said_again = books.note(event)
        if isinstance(event, PoliciesChanged):
            event = PoliciesChanged(event.now_s, watched(event.policies, asked, books.ranked))
        asked.clear()
        commands = pool.handle(event)
        if said_again is not None:
            assert commands == (said_again,)
            assert not asked
            continue
        books.take(event, commands)
        check_questions(event, commands, asked, books)
        check_picture(pool, books, event.now_s, never_idle=never_idle)
        for id, replica_id in books.passed_over:
            why = pool.why_waiting(id)
            if books.policies.late_binding:
                assert some_held, f"{id} was passed over: {why}"
                assert books.waiting[id].draw >= 0.5
            else:
                assert not why.startswith(f"in the queue of {replica_id}:")
        books.passed_over.clear()
        if books.asks_all:
            has_room = any(books.has_room(id) for id in books.replicas)
            kept = [i for i in books.waiting.values() if not some_held or i.draw < 0.5]
            assert not (kept and has_room), f"{kept[0].id} waits although there is room"
        waiting_first_attempts = [i for i in books.waiting.values() if i.attempt == 1]
        if not any(isinstance(e, PoliciesChanged | ReplicaLost) for e in history):
            assert len(waiting_first_attempts) <= books.policies.max_queued
    return pool


def check_picture(pool: PoolOrchestrator, books: Books, now_s: float, *, never_idle: bool) -> None:
    picture = pool.picture(now_s)
    assert picture.queued == len(books.waiting)
    assert picture.refused == books.refused
    assert {r.id: r.held for r in picture.replicas} == {id: books.held(id) for id in books.replicas}
    assert not set(books.leases) & set(books.waiting)
    for r in picture.replicas:
        assert r.prefilling == sum(not lease.has_begun for lease in books.leased(r.id))
        assert r.wait_s >= 0
        assert isfinite(r.wait_s) or r.max_running == 0
        is_idle = books.has_room(r.id) and r.held == 0
        if is_idle and never_idle:
            waits_for_it = picture.queued if books.policies.late_binding else r.queued
            assert not waits_for_it, f"{r.id} is idle while {waits_for_it} wait"


@settings(max_examples=120)
@given(st.sampled_from(SHIPPED), histories(SHIPPED))
def test_books_and_decisions_hold_under_any_events_with_the_shipped_policies(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=False)


@settings(max_examples=60)
@given(st.sampled_from(HOLDING), histories(HOLDING))
def test_only_what_the_routing_policy_holds_is_passed_over(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=True)


@settings(max_examples=200)
@given(st.sampled_from(ASKING), histories(ASKING))
def test_books_hold_with_policies_that_defer_close_take_back_and_look_at_a_part(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=True)


@settings(max_examples=200)
@given(st.sampled_from(WHOLE), histories(WHOLE, rich_offers))
def test_books_hold_with_whole_schedulers_and_nothing_idles_while_work_waits(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=True, never_idle=True)


EVERY = SHIPPED + HOLDING + ASKING + WHOLE


@settings(max_examples=120)
@given(st.sampled_from(EVERY), histories(EVERY, rich_offers))
def test_the_same_events_give_the_same_commands(policies: Policies, history: list[Event]) -> None:
    first, second = a_pool(policies), a_pool(policies)
    assert [first.handle(e) for e in history] == [second.handle(e) for e in history]
    assert first.picture(1e3) == second.picture(1e3)


@settings(max_examples=120)
@given(st.sampled_from(EVERY), histories(EVERY, rich_offers))
def test_no_slot_leaks_once_everything_has_ended(policies: Policies, history: list[Event]) -> None:
    pool = play(policies, history, some_held=True)
    end_s = history[-1].now_s if history else 0.0
    for id in IDS:
        pool.handle(InvocationWithdrawn(end_s, id, MANY, "over"))
    for replica_id in REPLICAS:
        pool.handle(a_report(replica_id, now_s=end_s + LEASE_GRACE_S + 1, slots=2, held=()))
    picture = pool.picture(end_s)
    assert picture.queued == 0
    assert [(r.held, r.prefilling, r.queued) for r in picture.replicas] == [(0, 0, 0)] * 3
    for books in (pool._waiting, pool._leases, pool._adopters):
        assert not books


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


def test_what_was_saved_for_work_without_an_slo_ends_with_its_reserve() -> None:
    edf = Policies(ROUTING["least-wait"], ORDERING["edf"], reserve=0.5)
    pool = a_pool(edf)
    pool.handle(a_report("r"))
    for id, deadline_s in (("running", 1.0), ("free", inf), ("soon", 2.0), ("later", 3.0)):
        pool.handle(offer(id, deadline_s=deadline_s))
    assert dispatched(pool.handle(ended("running"))) == [("soon", "r")]
    pool.handle(PoliciesChanged(1.0, replace(edf, reserve=0.0)))
    assert dispatched(pool.handle(ended("soon", 1.0))) == [("later", "r")]


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


def test_what_a_router_had_before_its_restart_is_never_refused() -> None:
    late = replace(LATE_CATO, max_queued=1, refuse_late=True)
    pool = a_pool(late)
    pool.handle(a_report("a", profile=a_profile(prefill_s=30.0)))
    for n in range(4):
        again = replace(offer(f"i{n}").invocation, was_taken=True)
        commands = pool.handle(InvocationOffered(0.0, again))
        assert not any(isinstance(c, Refuse) for c in commands)
    (refusal,) = pool.handle(offer("new"))
    assert isinstance(refusal, Refuse)


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
    withdrawn = pool.handle(InvocationWithdrawn(0.0, InvocationId("x"), 1, "left"))
    assert dispatched(withdrawn) == [("i", "r")]


def test_a_withdrawal_of_an_attempt_leaves_a_newer_one_alone() -> None:
    pool = a_pool()
    pool.handle(offer("i", attempt=2))
    assert pool.handle(InvocationWithdrawn(0.0, InvocationId("i"), 1, "its stream broke")) == ()
    assert dispatched(pool.handle(a_report("r"))) == [("i", "r")]
    pool.handle(InvocationWithdrawn(0.0, InvocationId("i"), 1, "its stream broke"))
    assert [r.held for r in pool.picture(0.0).replicas] == [1]
    pool.handle(InvocationWithdrawn(0.0, InvocationId("i"), 2, "the client left"))
    assert [r.held for r in pool.picture(0.0).replicas] == [0]


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


# Admission and preemption


def progressed(id: str, *tokens: tuple[str, int], now_s: float = 1.0) -> ReplicaProgressed:
    return ReplicaProgressed(now_s, ReplicaId(id), tuple((InvocationId(i), n) for i, n in tokens))


def drawn(id: str, draw: float, *, attempt: int = 1, now_s: float = 0.0) -> InvocationOffered:
    return InvocationOffered(now_s, an_invocation(id, draw=draw, attempt=attempt))


def test_a_replica_that_closes_is_not_asked_about_the_next_in_the_queue() -> None:
    asked: list[Asked] = []
    fcfs = FirstComeFirstServed()
    policies = Policies(ROUTING["power-of-two"], fcfs, admission=DefersSome(closes_from=0.75))
    pool = a_pool(watched(policies, asked, {}))
    pool.handle(drawn("closing", 0.9))
    pool.handle(drawn("willing", 0.1, now_s=0.1))
    assert pool.handle(a_report("r", slots=2)) == ()
    assert [a.invocation.id for a in asked if a.replica_id is not None] == ["closing"]
    assert pool.why_waiting(InvocationId("closing")) == "this one may not"


@dataclass(frozen=True, slots=True)
class ByTokens:
    """Ranks by the last digit of the expected tokens."""

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        return Rank(invocation.expected_tokens % 10, "")


def test_nothing_of_a_larger_rank_is_asked_about_though_a_tenant_that_is_ahead_goes_last() -> None:
    asked: list[Asked] = []
    strict = Policies(ROUTING["least-wait"], ByTokens(), admission=DefersSome(), strict=True)
    pool = a_pool(watched(strict, asked, {}))
    pool.handle(a_report("r"))
    ahead = an_invocation("running", tokens=40_000)
    pool.handle(InvocationOffered(0.0, replace(ahead, tenant="ahead")))
    for id, tenant, tokens in (("a0", "ahead", 0), ("a1", "ahead", 1), ("b2", "behind", 2)):
        call = replace(an_invocation(id, tokens=tokens, draw=0.9), tenant=tenant)
        pool.handle(InvocationOffered(0.0, call))
    asked.clear()
    pool.handle(InvocationEnded(1.0, ahead.id, 1, 40_000, "done"))
    assert [a.invocation.id for a in asked if a.replica_id is None] == ["b2", "a0"]


def test_a_place_that_a_new_attempt_leaves_goes_to_whoever_waits_for_it() -> None:
    pool = a_pool(Policies(HoldsSome(), FirstComeFirstServed()))
    pool.handle(a_report("r"))
    pool.handle(drawn("i", 0.1))
    pool.handle(drawn("j", 0.1))
    assert dispatched(pool.handle(drawn("i", 0.9, attempt=2))) == [("j", "r")]


def test_what_is_taken_back_goes_to_an_idle_replica_with_early_binding_too() -> None:
    policies = Policies(
        ROUTING["cato"], FirstComeFirstServed(), late_binding=False, preemption=TakesBackSome()
    )
    pool = a_pool(policies)
    pool.handle(a_report("a"))
    pool.handle(drawn("i", 0.9))
    pool.handle(drawn("j", 0.1))
    pool.handle(a_report("b"))
    back, *given = pool.handle(progressed("a", ("i", 7)))
    assert isinstance(back, Preempt)
    assert sorted(dispatched(tuple(given))) == [("i", "b"), ("j", "a")]
    assert [r.prefilling for r in pool.picture(1.0).replicas] == [1, 1]


def test_a_client_that_leaves_before_it_heard_of_a_preemption_takes_the_call_with_it() -> None:
    policies = Policies(CatoRouting(), FirstComeFirstServed(), preemption=TakesBackSome())
    pool = a_pool(policies)
    pool.handle(a_report("r"))
    pool.handle(drawn("i", 0.9))
    pool.handle(drawn("j", 0.1))
    back, *_ = pool.handle(progressed("r", ("i", 7)))
    assert isinstance(back, Preempt)
    pool.handle(InvocationWithdrawn(0.0, InvocationId("i"), 1, "the client left"))
    assert pool.invocation(InvocationId("i")) is None


def test_nothing_gives_way_while_no_replica_accepts_work() -> None:
    policies = Policies(CatoRouting(), FirstComeFirstServed(), preemption=TakesBackSome())
    pool = a_pool(policies)
    pool.handle(a_report("r"))
    pool.handle(drawn("i", 0.9))
    pool.handle(drawn("j", 0.1))
    pool.handle(a_report("r", accepting=False, held=("i",)))
    assert pool.handle(progressed("r", ("i", 7))) == ()


@dataclass(frozen=True, slots=True)
class HearsOfPlaces:
    heard_s: list[float] = field(default_factory=list)

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
    ) -> Sequence[tuple[InvocationId, str]]:
        self.heard_s.append(place_s())
        return ()


def test_a_preemption_policy_hears_when_the_first_of_all_replicas_has_a_place() -> None:
    hears = HearsOfPlaces()
    pool = a_pool(Policies(CatoRouting(), FirstComeFirstServed(), preemption=hears))
    for id in ("a", "b"):
        pool.handle(a_report(id, profile=a_profile(prefill_s=1.0, token_s=0.1)))
    pool.handle(offer("i"))  # 50 tokens: until 5.9 s
    pool.handle(offer("j"))
    pool.handle(progressed("a", ("i", 1), now_s=1.0))
    assert hears.heard_s == []  # nobody waits for one
    pool.handle(offer("k"))
    pool.handle(progressed("a", ("i", 2), now_s=3.0))  # 48 more tokens: until 7.8 s
    assert hears.heard_s == [pytest.approx(2.9)]  # that of "b"


# Expected waits


def test_what_a_batch_holds_is_as_much_as_it_would_take_alone_one_after_another() -> None:
    pool = a_pool(Policies(CatoRouting(), FirstComeFirstServed(), late_binding=False))
    profile = a_profile(prefill_s=1.0, token_s=0.1, batch_token_s=0.05)  # 0.15 s a token alone
    pool.handle(a_report("r", slots=2, profile=profile))
    for id in "ijk":  # 50 tokens each; the third is bound and waits
        pool.handle(offer(id))
    assert pool.picture(0.0).replicas[0].serial_s == pytest.approx(
        1 + 7.5 + 1 + 7.5 + 1 + 49 * 0.15
    )
    pool.handle(progressed("r", ("i", 30)))
    assert pool.picture(1.0).replicas[0].serial_s == pytest.approx(20 * 0.15 + 8.5 + 8.35)


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
