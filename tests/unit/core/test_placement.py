"""Which model sits on which card: examples of each rule, and promises under any events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.commands import Dispatch
from cato.core.errors import InputError, UnknownNameError
from cato.core.events import InvocationEnded, InvocationOffered, InvocationWithdrawn
from cato.core.eviction import (
    Card,
    CardId,
    CardPolicies,
    CopyId,
    DispatchOrder,
    EvictionPolicy,
    FleetSnapshot,
    HostMemory,
    ModelFacts,
    ModelState,
    Wanted,
)
from cato.core.ids import (
    DeploymentName,
    HostId,
    InvocationId,
    ModelName,
    NodeId,
    PoolName,
    ReplicaId,
    RunId,
    TaskName,
)
from cato.core.policies import Policies
from cato.core.pool.failing_cards import CARD_RETRY_S
from cato.core.pool.hosted import STEADY_AFTER_S
from cato.core.pool.loading import STARVED_AFTER_S
from cato.core.pool.placement import (
    LOAD_RETRY_S,
    LOAD_TRIES,
    MAX_LOAD_RETRY_S,
    Placement,
)
from cato.core.pool.placement_events import (
    CardAdded,
    CardLent,
    CardLost,
    CardPoliciesChanged,
    CopyFound,
    CopyPicture,
    Evicted,
    GiveUp,
    HostMemorySized,
    Load,
    LoadFailed,
    LoadFinished,
    ModelPinned,
    ModelRemoved,
    Served,
)
from cato.core.profile import UNMEASURED
from cato.core.shared import (
    Looked,
    ModelAdded,
    ModelPoliciesChanged,
    OfLine,
    SharedEvent,
    SharedOrchestrator,
    Told,
)
from cato.core.snapshot import Invocation
from cato.policies.eviction.belady import Belady
from cato.policies.eviction.cace import Cace
from cato.policies.eviction.foresight import ForesightEviction
from cato.policies.eviction.lfu import LeastFrequentlyUsed
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import BatchedPerModel, InOrder, QueueAware
from cato.policies.eviction.sites import ShapeBlind
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.routing.least_wait import LeastWait

BY_ARRIVAL = Policies(LeastWait(), FirstComeFirstServed())
ALIKE = DeploymentName("cards")
A, B, C = ModelName("a"), ModelName("b"), ModelName("c")
EVICTIONS: tuple[EvictionPolicy, ...] = (
    LeastRecentlyUsed(),
    LeastFrequentlyUsed(),
    Cace(),
    ForesightEviction(doubt=0.0),
    Belady({A: (1.0, 5.0, 9.0), B: (2.0,)}),
)
ORDERS: tuple[DispatchOrder, ...] = (InOrder(), BatchedPerModel(), QueueAware())


def alike(eviction: EvictionPolicy, order: DispatchOrder) -> CardPolicies:
    """Policies of accelerators of one shape."""
    return CardPolicies(eviction, order, ShapeBlind())


def a_model(
    name: str,
    *,
    load_s: float = 8.0,
    slo_s: float = 1.0,
    gb: int = 1,
    cards: int = 1,
    max_running: int = 8,
    min_copies: int = 0,
    max_copies: int = 1,
) -> ModelFacts:
    return ModelFacts(
        ModelName(name), load_s, load_s / 4, gb * 10**9, slo_s, cards, max_running, min_copies,
        max_copies,
    )  # fmt: skip


@dataclass(frozen=True)
class Started:
    """A call that a copy has taken."""

    id: InvocationId
    copy_id: CopyId
    model: ModelName
    is_hit: bool


Command = Load | GiveUp | Started


class Shared:
    """A shared pool as its driver sees it: what starts, what is loaded, and what is given up."""

    def __init__(
        self,
        policies: CardPolicies,
        models: Iterable[ModelFacts],
        cards: Iterable[Card] = (),
        memories: Iterable[HostMemory] = (),
    ) -> None:
        self.books = SharedOrchestrator(lambda tell: Placement(policies, tell))
        self.log: list[tuple[SharedEvent, tuple[Command, ...]]] = []
        self.attempts: dict[InvocationId, tuple[ModelName, int]] = {}
        self._orders: tuple[Command, ...] = ()  # of the opening
        for memory in memories:
            self._orders += self._tell(HostMemorySized(0.0, memory))
        for card in cards:
            self._orders += self._tell(CardAdded(0.0, card))
        for facts in models:
            self._orders += self._tell(an_added(facts))

    def handle(self, event: SharedEvent) -> tuple[Command, ...]:
        orders, self._orders = self._orders, ()
        return (*orders, *self._tell(event))

    def _tell(self, event: SharedEvent) -> tuple[Command, ...]:
        found: list[Command] = []
        steps = self.books.handle(event)
        for step in steps:
            if not isinstance(step, Told):
                found.append(step)
                continue
            for command in step.commands:
                assert isinstance(command, Dispatch)
                if command.invocation_id in step.started:
                    found.append(self._started(command, step))
        self.books.check_invariants()
        self.log.append((event, tuple(found)))
        return tuple(found)

    def _started(self, command: Dispatch, told: Told) -> Started:
        (copy,) = (c for c in self.copies() if ReplicaId(c.cards[0]) == command.replica_id)
        is_hit = command.invocation_id in told.hits
        return Started(command.invocation_id, copy.id, told.model, is_hit)

    def offer(self, at_s: float, wanted: Wanted, attempt: int = 1) -> tuple[Command, ...]:
        if wanted.model in self.books.lines:
            self.attempts[wanted.id] = wanted.model, attempt
        return self.handle(OfLine(wanted.model, InvocationOffered(at_s, a_call(wanted, attempt))))

    def finish(self, at_s: float, id: str) -> tuple[Command, ...]:
        model, attempt = self.attempts[InvocationId(id)]
        return self.handle(
            OfLine(model, InvocationEnded(at_s, InvocationId(id), attempt, 10, "done"))
        )

    def withdraw(self, at_s: float, id: str) -> tuple[Command, ...]:
        model, attempt = self.attempts[InvocationId(id)]
        return self.handle(
            OfLine(model, InvocationWithdrawn(at_s, InvocationId(id), attempt, "left"))
        )

    def waiting(self) -> tuple[InvocationId, ...]:
        """By arrival."""
        calls = [i for line in self.books.lines.values() for i in line.waiting]
        return tuple(i.id for i in sorted(calls, key=lambda i: (i.arrived_at_s, i.id)))

    def copies(self) -> tuple[CopyPicture, ...]:
        return self.books.placement.copies()


def a_call(wanted: Wanted, attempt: int = 1) -> Invocation:
    return Invocation(
        wanted.id, RunId(wanted.id), TaskName("test"), NodeId("call"), 10,
        round(wanted.expected_tokens), wanted.arrived_at_s, wanted.deadline_s,
        until_first_token=True, attempt=attempt,
    )  # fmt: skip


def an_added(facts: ModelFacts, at_s: float = 0.0) -> ModelAdded:
    served = Served(facts, UNMEASURED, ALIKE)
    return ModelAdded(at_s, PoolName(facts.name), (served,), BY_ARRIVAL)


def a_fleet(
    *models: ModelFacts,
    cards: int = 1,
    eviction: EvictionPolicy | None = None,
    order: DispatchOrder | None = None,
    memory_gb: int = 0,
) -> Shared:
    host = HostId("h")
    return Shared(
        alike(eviction or LeastRecentlyUsed(), order or InOrder()),
        models,
        [Card(CardId(f"card-{i}"), host, ALIKE) for i in range(cards)],
        [HostMemory(host, memory_gb * 10**9)],
    )


def wants(id: str, model: str, at_s: float, *, slo_s: float = 1.0, tokens: float = 10) -> Wanted:
    return Wanted(InvocationId(id), ModelName(model), at_s, at_s + slo_s, tokens)


def queue(fleet: Shared, id: str, model: str, at_s: float) -> tuple[Command, ...]:
    return fleet.offer(at_s, wants(id, model, at_s))


def finish(fleet: Shared, id: str, at_s: float) -> tuple[Command, ...]:
    return fleet.finish(at_s, id)


@pytest.mark.parametrize("order", [BatchedPerModel(), QueueAware()], ids=lambda o: type(o).__name__)
def test_a_model_whose_rivals_are_never_idle_is_loaded_all_the_same(order: DispatchOrder) -> None:
    """Calls of 3 s come every 2 s to each of two loaded models."""
    fleet = a_fleet(a_model("a"), a_model("b"), a_model("c"), cards=2, order=order)
    for name in "ab":
        load = next(c for c in queue(fleet, f"{name}-0", name, 0.0) if isinstance(c, Load))
        fleet.handle(LoadFinished(0.0, load.copy_id))
    queue(fleet, "c-0", "c", 1.0)
    loads: list[tuple[float, Load]] = []
    for n in range(1, 30):
        commands: list[Command] = []
        for name in "ab":
            commands += queue(fleet, f"{name}-{n}", name, 2.0 * n)
            if any(f"{name}-{n - 1}" in c.running for c in fleet.copies()):
                commands += finish(fleet, f"{name}-{n - 1}", 2.0 * n + 1.0)
        loads += [(2.0 * n + 1.0, c) for c in commands if isinstance(c, Load)]
    at_s, load = loads[0]
    assert load.model == C
    assert STARVED_AFTER_S < at_s <= 2.0 + STARVED_AFTER_S + 4.0
    assert len(loads) == 1  # one closed copy makes room, and the other models go on


@pytest.mark.parametrize("copies", [1, 2])
def test_room_that_is_made_for_a_model_is_not_anothers(copies: int) -> None:
    """Not that of the model that gave way and may have another copy, nor of one in more demand."""
    models = [a_model(name, max_copies=copies) for name in "abcd"]
    fleet = a_fleet(*models, order=QueueAware())
    load = next(c for c in queue(fleet, "a-0", "a", 0.0) if isinstance(c, Load))
    fleet.handle(LoadFinished(0.0, load.copy_id))
    queue(fleet, "c-0", "c", 0.0)
    fleet.handle(Looked(STARVED_AFTER_S + 2.0))
    assert [c for c in queue(fleet, "a-1", "a", 40.0) if isinstance(c, Started)] == []  # it closes
    for n in range(5):
        queue(fleet, f"d-{n}", "d", 40.0)
    loads = [c for c in finish(fleet, "a-0", 40.5) if isinstance(c, Load)]
    assert [c.model for c in loads] == [C]
    # It serves for as long as others may have to wait before it is asked to go, too.
    fleet.handle(LoadFinished(50.0, loads[0].copy_id))
    for at_s, is_served in ((50.0 + STARVED_AFTER_S - 1.0, True), (51.0 + STARVED_AFTER_S, False)):
        fleet.handle(Looked(at_s))  # "d" is starved at both
        served = [c for c in queue(fleet, f"c-{at_s}", "c", at_s) if isinstance(c, Started)]
        assert bool(served) == is_served


def test_an_order_by_arrival_opens_what_was_closed() -> None:
    fleet = a_fleet(a_model("a"), a_model("c"), order=QueueAware())
    load = next(c for c in queue(fleet, "a-0", "a", 0.0) if isinstance(c, Load))
    fleet.handle(LoadFinished(0.0, load.copy_id))
    queue(fleet, "a-1", "a", 0.5)
    queue(fleet, "c-0", "c", 1.0)
    fleet.handle(Looked(STARVED_AFTER_S + 5.0))
    queue(fleet, "a-2", "a", 40.0)
    fleet.withdraw(41.0, "c-0")
    assert [x for c in fleet.copies() for x in c.running] == ["a-0", "a-1", "a-2"]
    queue(fleet, "c-1", "c", 42.0)
    fleet.handle(Looked(80.0))
    queue(fleet, "a-3", "a", 81.0)
    assert fleet.waiting() == ("c-1", "a-3")
    fleet.handle(CardPoliciesChanged(82.0, alike(LeastRecentlyUsed(), InOrder())))
    commands = fleet.withdraw(83.0, "c-1")
    assert [c.id for c in commands if isinstance(c, Started)] == ["a-3"]


def serve_once(fleet: Shared, id: str, model: str, at_s: float) -> Load | None:
    """Queue, load when needed and finish, all at `at_s`; the load that it took."""
    commands = list(queue(fleet, id, model, at_s))
    load = next((c for c in commands if isinstance(c, Load)), None)
    if load is not None:
        commands += fleet.handle(LoadFinished(at_s, load.copy_id))
    serve = next(c for c in commands if isinstance(c, Started))
    fleet.finish(at_s, serve.id)
    return load


def a_state(
    model: ModelFacts,
    *,
    idle_s: float = 0.0,
    uses: int = 0,
    rate_per_s: float = 0.0,
    evidence: float = 100.0,
    tokens: float = 0.0,
    place: int | None = None,
    waiting: tuple[Wanted, ...] = (),
    copies: int = 1,
    load_s: float | None = None,
) -> ModelState:
    return ModelState(
        model, model.load_s if load_s is None else load_s, idle_s, uses, rate_per_s, evidence,
        tokens, place, waiting, copies,
    )  # fmt: skip


def a_snapshot(*states: ModelState, now_s: float = 0.0) -> FleetSnapshot:
    return FleetSnapshot(now_s, {s.facts.name: s for s in states})


def evicted_first(policy: EvictionPolicy, *states: ModelState, now_s: float = 0.0) -> str:
    fleet = a_snapshot(*states, now_s=now_s)
    return min(fleet.models, key=lambda m: policy.keep(m, fleet).worth)


# The books


def test_a_load_is_a_miss_and_what_comes_later_is_a_hit() -> None:
    fleet = a_fleet(a_model("a"))
    (load,) = queue(fleet, "1", "a", 0.0)
    assert isinstance(load, Load)
    assert (load.model, load.cards, load.evicted) == (A, (CardId("card-0"),), ())
    (first,) = fleet.handle(LoadFinished(8.0, load.copy_id))
    (second,) = queue(fleet, "2", "a", 9.0)
    assert isinstance(first, Started)
    assert isinstance(second, Started)
    assert (first.id, first.is_hit) == ("1", False)
    assert (second.id, second.is_hit, second.copy_id) == ("2", True, load.copy_id)


def test_a_busy_copy_stays_and_goes_as_soon_as_it_is_idle() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"))
    (load,) = queue(fleet, "1", "a", 0.0)
    assert isinstance(load, Load)
    fleet.handle(LoadFinished(8.0, load.copy_id))
    assert queue(fleet, "2", "b", 9.0) == ()
    (swap,) = fleet.finish(10.0, "1")
    assert isinstance(swap, Load)
    assert swap.evicted == (Evicted(load.copy_id, A),)


def test_a_pinned_model_stays_until_it_is_unpinned() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"))
    serve_once(fleet, "1", "a", 0.0)
    fleet.handle(ModelPinned(1.0, A, True))
    assert queue(fleet, "2", "b", 2.0) == ()
    (load,) = fleet.handle(ModelPinned(3.0, A, False))
    assert isinstance(load, Load)
    assert load.model == B


def test_the_last_of_min_copies_is_loaded_unasked_and_never_evicted() -> None:
    fleet = a_fleet(a_model("a", min_copies=1), a_model("b"))
    (load,) = fleet.handle(Looked(0.0))
    assert isinstance(load, Load)
    assert load.model == A
    fleet.handle(LoadFinished(8.0, load.copy_id))
    assert queue(fleet, "1", "b", 9.0) == ()


def test_a_model_of_two_cards_takes_them_from_one_host() -> None:
    hosts = [HostId("h1"), HostId("h1"), HostId("h2"), HostId("h2")]
    cards = [Card(CardId(f"card-{i}"), h, ALIKE) for i, h in enumerate(hosts)]
    models = (a_model("a"), a_model("b", cards=2))
    fleet = Shared(alike(LeastRecentlyUsed(), InOrder()), models, cards)
    serve_once(fleet, "1", "a", 0.0)
    load = serve_once(fleet, "2", "b", 1.0)
    assert load is not None
    assert (load.host, load.cards, load.evicted) == (HostId("h2"), ("card-2", "card-3"), ())


def test_in_order_the_head_holds_up_those_behind_it_and_batched_it_does_not() -> None:
    for order, served in ((InOrder(), 0), (BatchedPerModel(), 1)):
        fleet = a_fleet(a_model("a"), a_model("b"), order=order)
        (load,) = queue(fleet, "1", "a", 0.0)
        assert isinstance(load, Load)
        fleet.handle(LoadFinished(8.0, load.copy_id))
        queue(fleet, "2", "b", 9.0)  # the only card is busy
        assert len(queue(fleet, "3", "a", 10.0)) == served


def test_one_load_serves_all_that_wait_and_one_of_them_missed() -> None:
    fleet = a_fleet(a_model("a"), order=BatchedPerModel())
    (load,) = queue(fleet, "1", "a", 0.0)
    assert isinstance(load, Load)
    assert queue(fleet, "2", "a", 1.0) == ()
    served = fleet.handle(LoadFinished(8.0, load.copy_id))
    assert [(c.id, c.is_hit) for c in served if isinstance(c, Started)] == [
        ("1", False),
        ("2", True),
    ]


def test_weights_in_host_memory_load_faster_and_the_cheapest_to_miss_leave_first() -> None:
    models = (a_model("a", gb=2), a_model("b", gb=2), a_model("c", gb=2))
    fleet = a_fleet(*models, memory_gb=4)
    for i, model in enumerate("aabbc"):
        serve_once(fleet, str(i), model, float(i))
    again = [serve_once(fleet, f"again-{m}", m, 10.0) for m in "abc"]
    assert [x.from_host_memory for x in again if x] == [True, True, False]
    assert [x.expected_s for x in again if x] == [2.0, 2.0, 8.0]


def test_a_failed_load_is_tried_again_after_a_while_and_loses_nobody() -> None:
    fleet = a_fleet(a_model("a"))
    (load,) = queue(fleet, "1", "a", 0.0)
    assert isinstance(load, Load)
    assert fleet.handle(LoadFailed(1.0, load.copy_id, "out of memory")) == ()
    assert fleet.waiting() == ("1",)
    (retry,) = fleet.handle(Looked(1.0 + LOAD_RETRY_S))
    assert isinstance(retry, Load)
    assert retry.copy_id != load.copy_id
    assert fleet.handle(LoadFinished(12.0, load.copy_id)) == ()  # the late report of the first


def test_weights_in_memory_that_do_not_load_are_read_from_storage_at_once() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"), memory_gb=4)
    serve_once(fleet, "1", "a", 0.0)
    serve_once(fleet, "2", "b", 1.0)
    (load,) = queue(fleet, "3", "a", 2.0)
    assert isinstance(load, Load)
    assert load.from_host_memory
    (again,) = fleet.handle(LoadFailed(3.0, load.copy_id, "the memory was reclaimed"))
    assert isinstance(again, Load)
    assert (again.model, again.from_host_memory) == (A, False)


def test_a_model_that_never_loads_is_given_up_and_holds_up_nobody_else() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"))
    commands: list[Command] = list(queue(fleet, "1", "a", 0.0))
    queue(fleet, "2", "b", 0.5)
    now_s, tries, served = 1.0, 0, []
    while not any(isinstance(c, GiveUp) for c in commands):
        now_s += MAX_LOAD_RETRY_S
        match commands:
            case [Load(model=model, copy_id=copy_id)] if model == A:
                tries += 1
                commands = list(fleet.handle(LoadFailed(now_s, copy_id, "no such file")))
            case [Load(copy_id=copy_id)]:
                commands = list(fleet.handle(LoadFinished(now_s, copy_id)))
            case [Started(id=id, copy_id=copy_id)]:
                served.append((id, tries))
                commands = list(fleet.finish(now_s, id))
            case _:
                commands = list(fleet.handle(Looked(now_s)))
    assert served == [("2", 1)]
    (given_up,) = commands
    assert isinstance(given_up, GiveUp)
    assert (given_up.id, tries) == ("1", LOAD_TRIES)
    assert "no such file" in given_up.problem
    assert given_up.retry_after_s == LOAD_RETRY_S * 2 ** (LOAD_TRIES - 1)
    assert fleet.waiting() == ()


def test_a_model_that_must_be_loaded_is_tried_for_days() -> None:
    fleet = a_fleet(a_model("a", min_copies=1))
    for n in range(1100):
        commands = fleet.handle(Looked(n * MAX_LOAD_RETRY_S))
        (load,) = [c for c in commands if isinstance(c, Load)]
        fleet.handle(LoadFailed(n * MAX_LOAD_RETRY_S, load.copy_id, "no such file"))


def die_after(fleet: Shared, lived_s: float, at_s: float) -> tuple[tuple[str, ...], float]:
    """The next load succeeds and its copy dies `lived_s` later; where, and when that was."""
    while not (loads := [c for c in fleet.handle(Looked(at_s)) if isinstance(c, Load)]):
        at_s += 0.5
    fleet.handle(LoadFinished(at_s, loads[0].copy_id))
    fleet.handle(LoadFailed(at_s + lived_s, loads[0].copy_id, "CUDA error"))
    return loads[0].cards, at_s + lived_s


def waits_s(fleet: Shared, at_s: float, deaths: int, lived_s: float = 0.0) -> list[float]:
    """How long after each of these deaths the next load is ordered."""
    found = []
    for _ in range(deaths):
        _, died_s = die_after(fleet, lived_s, at_s)
        found.append(died_s - lived_s - at_s)
        at_s = died_s
    return found


def test_a_model_that_loads_and_dies_at_once_is_loaded_ever_more_rarely() -> None:
    fleet = a_fleet(a_model("a", min_copies=1))
    assert waits_s(fleet, 0.0, 8) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_LOAD_RETRY_S]


def test_calls_that_wait_for_a_model_that_dies_at_once_are_given_up() -> None:
    fleet = a_fleet(a_model("a", max_running=1))
    queue(fleet, "killer", "a", 0.0)
    queue(fleet, "waits", "a", 0.0)
    at_s, commands = 0.0, fleet.handle(Looked(0.0))
    for attempt in range(LOAD_TRIES):
        (copy,) = fleet.copies()
        (started,) = fleet.handle(LoadFinished(at_s, copy.id))
        assert isinstance(started, Started)
        assert started.id == "killer"
        commands = fleet.handle(LoadFailed(at_s, copy.id, "CUDA error"))
        fleet.offer(at_s, wants("killer", "a", 0.0), attempt + 2)
        at_s += MAX_LOAD_RETRY_S
        fleet.handle(Looked(at_s))
    (given_up,) = commands
    assert isinstance(given_up, GiveUp)
    assert given_up.id == "waits"
    assert "died at once" in given_up.problem


def test_a_copy_that_was_ready_for_long_starts_the_count_of_failures_anew() -> None:
    fleet = a_fleet(a_model("a", min_copies=1))
    waits_s(fleet, 0.0, 5)
    assert waits_s(fleet, 100.0, 3, lived_s=STEADY_AFTER_S) == [0.0, 1.0, 1.0]
    assert waits_s(fleet, 400.0, 3, lived_s=STEADY_AFTER_S - 1.0) == [0.0, 2.0, 4.0]


def test_a_copy_that_has_answered_starts_the_count_of_failures_anew() -> None:
    fleet = a_fleet(a_model("a", min_copies=1))
    waits_s(fleet, 0.0, 5)
    (load,) = [c for c in fleet.handle(Looked(100.0)) if isinstance(c, Load)]
    fleet.handle(LoadFinished(100.0, load.copy_id))
    queue(fleet, "1", "a", 100.0)
    fleet.finish(100.5, "1")
    fleet.handle(LoadFailed(101.0, load.copy_id, "CUDA error"))
    assert waits_s(fleet, 101.0, 2) == [1.0, 2.0]


def test_a_copy_that_serves_does_not_hide_that_another_one_dies_at_once() -> None:
    fleet = a_fleet(a_model("a", min_copies=2, max_copies=2), cards=2)
    first, second = [c for c in fleet.handle(Looked(0.0)) if isinstance(c, Load)]
    fleet.handle(LoadFinished(0.0, first.copy_id))
    queue(fleet, "1", "a", 0.0)
    fleet.finish(0.5, "1")
    fleet.handle(LoadFinished(1.0, second.copy_id))
    fleet.handle(LoadFailed(1.0, second.copy_id, "CUDA error"))
    waits = []
    at_s = 1.0
    for n in range(3):
        queue(fleet, f"later-{n}", "a", at_s)
        fleet.finish(at_s, f"later-{n}")
        _, died_s = die_after(fleet, 0.0, at_s)
        waits.append(died_s - at_s)
        at_s = died_s
    assert waits == [1.0, 2.0, 4.0]


def test_a_model_that_died_at_once_is_tried_on_another_accelerator() -> None:
    fleet = a_fleet(a_model("a", min_copies=1), cards=2)
    where, died_s = die_after(fleet, 0.0, 0.0)
    again, _ = die_after(fleet, 0.0, died_s)
    assert {*where, *again} == {"card-0", "card-1"}


def test_calls_wait_for_the_copy_that_serves_when_another_one_does_not_load() -> None:
    fleet = a_fleet(a_model("a", max_running=1, max_copies=2), cards=2, order=QueueAware())
    (load,) = queue(fleet, "1", "a", 0.0)
    assert isinstance(load, Load)
    fleet.handle(LoadFinished(1.0, load.copy_id))
    commands, now_s = queue(fleet, "2", "a", 2.0), 2.0
    for _ in range(LOAD_TRIES + 1):
        (second,) = commands
        assert isinstance(second, Load)
        assert fleet.handle(LoadFailed(now_s, second.copy_id, "broken")) == ()
        now_s += MAX_LOAD_RETRY_S
        commands = fleet.handle(Looked(now_s))
    (served,) = [c for c in fleet.finish(now_s, "1") if isinstance(c, Started)]
    assert (served.id, served.copy_id) == ("2", load.copy_id)


def fail_until_served(fleet: Shared, at_s: float, broken: set[str]) -> list[tuple[str, ...]]:
    """Loads on `broken` cards fail, others succeed; where loads were tried until a call starts."""
    tried: list[tuple[str, ...]] = []
    commands = fleet.handle(Looked(at_s))
    while not any(isinstance(c, Started) for c in commands):
        loads = [c for c in commands if isinstance(c, Load)]
        at_s += MAX_LOAD_RETRY_S
        if not loads:
            assert len(tried) < LOAD_TRIES, tried
            commands = fleet.handle(Looked(at_s))
            continue
        tried.append(loads[0].cards)
        if broken & set(loads[0].cards):
            commands = fleet.handle(LoadFailed(at_s, loads[0].copy_id, "CUDA error"))
        else:
            commands = fleet.handle(LoadFinished(at_s, loads[0].copy_id))
    return tried


def test_a_broken_card_does_not_attract_every_load() -> None:
    """It is empty, and another one holds an idle copy."""
    fleet = a_fleet(a_model("a"), a_model("b"), a_model("c"), cards=2, order=QueueAware())
    serve_once(fleet, "0", "b", 0.0)  # on card-0, so that card-1 is the empty one
    first = load_on("card-1", queue(fleet, "1", "a", 3.0))
    fleet.handle(LoadFailed(4.0, first.copy_id, "CUDA error"))
    again = load_on("card-0", fleet.handle(Looked(4.0 + LOAD_RETRY_S)))
    assert [v.model for v in again.evicted] == [B]
    fleet.handle(LoadFinished(6.0, again.copy_id))
    fleet.finish(7.0, "1")
    other = load_on("card-0", queue(fleet, "2", "c", 8.0))
    fleet.handle(LoadFinished(9.0, other.copy_id))
    forced = load_on("card-1", queue(fleet, "3", "b", 10.0))  # card-0 is busy
    fleet.handle(LoadFailed(11.0, forced.copy_id, "CUDA error"))
    fleet.withdraw(11.5, "3")
    fleet.finish(12.0, "2")
    # It has failed twice in a row.
    retry_at_s = 11.0 + 2 * CARD_RETRY_S
    early = load_on("card-0", queue(fleet, "4", "a", retry_at_s - 5.0))
    fleet.handle(LoadFinished(retry_at_s - 4.0, early.copy_id))
    fleet.finish(retry_at_s - 3.0, "4")
    repaired = load_on("card-1", queue(fleet, "5", "c", retry_at_s))
    fleet.handle(LoadFinished(retry_at_s + 1.0, repaired.copy_id))
    assert len(fleet.copies()) == 2


def load_on(card: str, commands: tuple[Command, ...]) -> Load:
    """The only command, a load there."""
    (load,) = commands
    assert isinstance(load, Load)
    assert load.cards == (card,)
    return load


def test_two_broken_cards_of_three_do_not_keep_a_model_from_the_third() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"), cards=3, order=QueueAware())
    serve_once(fleet, "0", "b", 0.0)
    queue(fleet, "1", "a", 1.0)
    (load,) = [c for c in fleet.copies() if c.model == A]
    fleet.handle(LoadFailed(2.0, load.id, "CUDA error"))
    assert fail_until_served(fleet, 3.0, {"card-1", "card-2"})[-1] == ("card-0",)


def test_a_model_that_fails_everywhere_evicts_few_and_leaves_cards_in_use() -> None:
    names = "bcdef"
    models = [a_model("a"), *(a_model(n) for n in names)]
    fleet = a_fleet(*models, cards=6, order=QueueAware())
    for n in names:
        serve_once(fleet, f"{n}-0", n, 0.0)
    evicted, now_s = [], 1.0
    for n in range(20):
        commands: tuple[Command, ...] = queue(fleet, f"a-{n}", "a", now_s)
        for _ in range(LOAD_TRIES):
            for load in (c for c in commands if isinstance(c, Load)):
                evicted += [v.model for v in load.evicted]
                now_s += 1.0
                fleet.handle(LoadFailed(now_s, load.copy_id, "no such file"))
            now_s += MAX_LOAD_RETRY_S
            commands = fleet.handle(Looked(now_s))
        for name in names:
            serve_once(fleet, f"{name}-{n + 1}", name, now_s)
    assert len(evicted) == 2  # it tried three cards, one of them empty
    assert fleet.waiting() == ()


def test_models_come_and_go_and_one_in_use_stays() -> None:
    fleet = a_fleet(a_model("a"))
    fleet.handle(an_added(a_model("b", load_s=2.0)))
    load = serve_once(fleet, "1", "b", 1.0)
    assert load is not None
    assert load.expected_s == 2.0
    queue(fleet, "2", "b", 2.0)
    with pytest.raises(InputError, match="1 invocations wait for 'b' or run there"):
        fleet.handle(ModelRemoved(3.0, B))
    fleet.finish(4.0, "2")
    fleet.handle(ModelRemoved(5.0, B))
    assert [m.name for m in fleet.books.placement.models()] == ["a"]
    assert fleet.copies() == ()
    with pytest.raises(UnknownNameError, match="no model named 'b'"):
        queue(fleet, "3", "b", 6.0)


def test_a_smaller_host_memory_forgets_weights() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"), memory_gb=4)
    for i, model in enumerate("aab"):
        serve_once(fleet, str(i), model, float(i))
    fleet.handle(HostMemorySized(9.0, HostMemory(HostId("h"), 10**9)))
    assert fleet.books.placement.in_host_memory() == {"h": ("a",)}


def test_weights_in_memory_outlast_new_policies_but_not_new_facts() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"), memory_gb=4)
    serve_once(fleet, "1", "a", 0.0)
    serve_once(fleet, "2", "b", 1.0)
    for model in (A, B):
        fleet.handle(ModelPoliciesChanged(2.0, model, replace(BY_ARRIVAL, max_queued=1)))
    assert fleet.books.placement.in_host_memory() == {"h": (A, B)}
    fleet.handle(an_added(a_model("a"), 4.0))  # its files may differ, although its facts do not
    assert fleet.books.placement.in_host_memory() == {"h": (B,)}


def test_policies_change_at_run_time() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"), cards=2)
    for i, model in enumerate("aaabb"):
        serve_once(fleet, str(i), model, float(i))
    fleet.handle(an_added(a_model("c"), 6.0))
    fleet.handle(CardPoliciesChanged(7.0, alike(LeastFrequentlyUsed(), QueueAware())))
    (load,) = queue(fleet, "9", "c", 8.0)
    assert isinstance(load, Load)
    assert [v.model for v in load.evicted] == [B]  # used more recently, but less often


def test_the_easiest_card_is_an_empty_one_then_that_of_the_worst_idle_copy() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"), cards=2)
    serve_once(fleet, "1", "a", 0.0)
    used = next(card for card, copy in fleet.books.placement.cards().items() if copy is not None)
    empty = fleet.books.placement.easiest_card(1.0, ALIKE)
    assert empty is not None
    assert empty != used
    serve_once(fleet, "2", "b", 2.0)
    assert fleet.books.placement.easiest_card(3.0, ALIKE) == used  # a was used less recently
    queue(fleet, "3", "a", 4.0)
    assert fleet.books.placement.easiest_card(5.0, ALIKE) == empty
    queue(fleet, "4", "b", 6.0)
    assert fleet.books.placement.easiest_card(7.0, ALIKE) is None


def test_no_card_is_lent_while_a_model_needs_another_copy() -> None:
    fleet = a_fleet(a_model("a"), cards=2)
    (load,) = queue(fleet, "1", "a", 0.0)
    assert isinstance(load, Load)
    fleet.handle(LoadFailed(1.0, load.copy_id, "broken"))  # it is tried again in a moment
    assert fleet.waiting() == ("1",)
    assert fleet.books.placement.easiest_card(1.1, ALIKE) is None
    warm = a_fleet(a_model("c", min_copies=1), cards=2)
    (load,) = warm.handle(Looked(0.0))
    assert isinstance(load, Load)
    warm.handle(LoadFailed(1.0, load.copy_id, "broken"))
    assert warm.books.placement.easiest_card(1.1, ALIKE) is None  # nothing is loaded yet


def test_a_lent_card_serves_nobody_until_it_is_back_and_memory_stays() -> None:
    fleet = a_fleet(a_model("a"), memory_gb=4)
    serve_once(fleet, "1", "a", 0.0)
    card = fleet.books.placement.easiest_card(1.0, ALIKE)
    assert card is not None
    fleet.handle(CardLent(1.0, card))
    assert fleet.copies() == ()
    assert queue(fleet, "2", "a", 2.0) == ()
    (load,) = fleet.handle(CardAdded(3.0, Card(card, HostId("h"), ALIKE)))
    assert isinstance(load, Load)
    assert load.from_host_memory
    fleet.handle(CardLost(4.0, card))
    assert fleet.books.placement.in_host_memory() == {}


def test_what_ran_on_a_lost_card_waits_again_before_those_who_came_later() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"))
    (load,) = queue(fleet, "1", "a", 0.0)
    assert isinstance(load, Load)
    fleet.handle(LoadFinished(8.0, load.copy_id))
    queue(fleet, "2", "b", 9.0)
    assert fleet.handle(CardLost(10.0, CardId("card-0"))) == ()
    fleet.offer(10.5, wants("1", "a", 0.0), attempt=2)
    assert fleet.waiting() == ("1", "2")
    (reload,) = fleet.handle(CardAdded(11.0, Card(CardId("card-9"), HostId("h"), ALIKE)))
    assert isinstance(reload, Load)
    assert (reload.model, reload.cards) == (A, ("card-9",))


def test_a_copy_found_after_a_restart_serves_without_a_load() -> None:
    fleet = a_fleet(a_model("a"))
    fleet.handle(CopyFound(0.0, CopyId("copy-1"), A, (CardId("card-0"),)))
    (serve,) = queue(fleet, "1", "a", 1.0)
    assert isinstance(serve, Started)
    assert (serve.copy_id, serve.is_hit) == ("copy-1", True)
    fleet.handle(CopyFound(2.0, CopyId("copy-7"), A, (CardId("card-0"),)))  # the card is taken
    assert [c.id for c in fleet.copies()] == ["copy-1"]


def test_a_copy_found_with_running_work_is_not_evicted_until_that_has_ended() -> None:
    fleet = a_fleet(a_model("a"), a_model("b"))
    held = InvocationId("0")
    fleet.attempts[held] = A, 1
    fleet.handle(CopyFound(0.0, CopyId("old"), A, (CardId("card-0"),), (held,)))
    assert queue(fleet, "1", "b", 1.0) == ()
    (load,) = fleet.finish(2.0, held)
    assert isinstance(load, Load)
    assert [v.copy_id for v in load.evicted] == ["old"]


def test_refuses_unknown_models_and_impossible_facts() -> None:
    with pytest.raises(UnknownNameError, match="no model named 'z'; known: a"):
        queue(a_fleet(a_model("a")), "1", "z", 0.0)
    with pytest.raises(InputError, match="raise max_copies"):
        a_fleet(a_model("a", min_copies=2))
    with pytest.raises(InputError, match="cards and max_running"):
        a_fleet(a_model("a", max_running=0))


# Prefetch


def a_fleet_that_foresees(cards: int = 1) -> Shared:
    """`a` was asked for often; `b`, on the only card, once."""
    fleet = a_fleet(a_model("a"), a_model("b"), cards=cards, eviction=ForesightEviction())
    for i in range(20):
        serve_once(fleet, f"a{i}", "a", float(i))
    return fleet


def test_an_idle_card_gets_back_what_is_asked_for_most() -> None:
    fleet = a_fleet_that_foresees()
    commands = queue(fleet, "b", "b", 30.0)
    assert isinstance(commands[0], Load)
    fleet.handle(LoadFinished(38.0, commands[0].copy_id))
    (load,) = fleet.finish(39.0, "b")
    assert isinstance(load, Load)
    assert (load.model, load.is_prefetch) == (A, True)


def test_a_prefetch_yields_to_whoever_asks_and_its_late_report_is_harmless() -> None:
    fleet = a_fleet_that_foresees()
    (first,) = queue(fleet, "b", "b", 30.0)
    assert isinstance(first, Load)
    fleet.handle(LoadFinished(38.0, first.copy_id))
    (prefetch,) = fleet.finish(39.0, "b")
    assert isinstance(prefetch, Load)
    (load,) = queue(fleet, "b2", "b", 40.0)
    assert isinstance(load, Load)
    assert load.evicted == (Evicted(prefetch.copy_id, A),)
    assert fleet.handle(LoadFinished(41.0, prefetch.copy_id)) == ()


def test_few_arrivals_are_no_reason_to_prefetch() -> None:
    policy = ForesightEviction(doubt=1.5)
    for evidence, above in ((1.0, -0.5), (225.0, 0.9)):
        a = a_state(a_model("a"), rate_per_s=1 / 60, evidence=evidence, copies=0)
        prefetch = policy.prefetch(a_snapshot(a, a_state(a_model("b"))))
        assert prefetch is not None
        assert prefetch.above == pytest.approx(above)
    assert ForesightEviction(prefetches=False).prefetch(a_snapshot(a)) is None


# Policies


def test_lru_evicts_the_longest_unused_and_lfu_the_least_used() -> None:
    a = a_state(a_model("a"), idle_s=9.0, uses=9)
    b = a_state(a_model("b"), idle_s=1.0, uses=1)
    assert evicted_first(LeastRecentlyUsed(), a, b) == A
    assert evicted_first(LeastFrequentlyUsed(), a, b) == B


def test_cace_sums_what_is_switched_on() -> None:
    a = a_state(a_model("a", load_s=100.0), idle_s=0.0, tokens=200.0, place=5)
    fleet = a_snapshot(a)
    off = Cace(recency=False, reload_cost=False, demand=False, output=False)
    only = {
        "recency": 0.0,  # 1 - 1/(1 + ln 1)
        "reload_cost": 0.5,  # 1/(1 + 100/100)
        "demand": 0.25,  # 5/20
        "output": 0.2,  # 0.001 · 200
    }
    assert off.keep(A, fleet).worth == 0.0
    assert Cace().keep(A, fleet).worth == pytest.approx(-sum(only.values()))
    assert Cace(recency=False).keep(A, fleet).worth == pytest.approx(-0.95)
    assert Cace(reload_cost=False).keep(A, fleet).worth == pytest.approx(-0.45)
    assert Cace(demand=False).keep(A, fleet).worth == pytest.approx(-0.7)
    assert Cace(output=False).keep(A, fleet).worth == pytest.approx(-0.75)


def test_cace_as_printed_evicts_the_most_recent() -> None:
    a, b = a_state(a_model("a"), idle_s=100.0), a_state(a_model("b"), idle_s=1.0)
    assert evicted_first(Cace(), a, b) == A
    assert evicted_first(Cace(printed_recency=True), a, b) == B


def test_belady_evicts_what_is_wanted_last() -> None:
    policy = Belady({A: (1.0, 20.0), B: (2.0, 12.0)})
    states = (a_state(a_model("a")), a_state(a_model("b")), a_state(a_model("c"), place=3))
    assert evicted_first(policy, *states, now_s=10.0) == A
    assert evicted_first(policy, *states, now_s=15.0) == B  # never again


def test_foresight_keeps_what_loses_most_value_per_cold_start() -> None:
    often = a_state(a_model("a"), rate_per_s=0.2)
    seldom = a_state(a_model("b"), rate_per_s=0.1)
    patient = a_state(a_model("c", slo_s=100.0), rate_per_s=0.3)
    assert evicted_first(ForesightEviction(), often, seldom) == B
    assert evicted_first(ForesightEviction(), often, seldom, patient) == C
    wanted = a_state(
        a_model("b"), rate_per_s=0.1, waiting=tuple(wants("1", "b", 0) for _ in "12345678")
    )
    assert evicted_first(ForesightEviction(), often, wanted) == A


def test_the_queue_aware_order_loads_most_value_per_second_of_load() -> None:
    quick = a_state(a_model("a", load_s=2.0), waiting=(wants("2", "a", 0.5),), copies=0)
    slow = a_state(a_model("b", load_s=8.0), waiting=(wants("1", "b", 0.0),), copies=0)
    crowd = a_state(
        a_model("b", load_s=8.0), waiting=tuple(wants(f"{i}", "b", 0.0) for i in range(9)), copies=0
    )
    fleet = a_snapshot(quick, slow, now_s=1.0)
    assert [w.model for w in QueueAware().wants(fleet)] == [A, B]
    assert [w.model for w in BatchedPerModel().wants(fleet)] == [B, A]
    assert [w.model for w in QueueAware().wants(a_snapshot(quick, crowd, now_s=1.0))] == [B, A]


def test_the_queue_aware_order_passes_nobody_by_for_ever() -> None:
    crowd = tuple(wants(f"{i}", "a", 1000.0) for i in range(4))
    quick = a_state(a_model("a", load_s=2.0), waiting=crowd, copies=0)
    old = a_state(a_model("b", load_s=8.0), waiting=(wants("1", "b", 0.0),), copies=0)
    wanted = QueueAware(patience_s=10.0).wants(a_snapshot(quick, old, now_s=1000.0))
    assert wanted[0].model == B


# Promises under any events

HOSTS = (HostId("h1"), HostId("h2"))
MEMORY_BYTES = 4 * 10**9
CARDS = tuple(Card(CardId(f"card-{i}"), HOSTS[i // 2], ALIKE) for i in range(4))
MODELS = (
    a_model("a", max_running=2),
    a_model("b", cards=2, max_running=1, gb=3),
    a_model("c", min_copies=1, max_copies=2, max_running=1),
    a_model("d"),
    a_model("e"),
)
ACTIONS = (
    "queue", "queue", "queue", "finish", "finish", "loaded", "loaded", "late", "fail", "withdraw",
    "lose", "lose host", "lend", "add", "pin", "unpin", "memory", "tick",
)  # fmt: skip


@dataclass
class Witness:
    """What a driver sees: it believes the commands only, and checks each against them."""

    fleet: Shared
    cards: dict[CardId, HostId] = field(default_factory=lambda: {c.id: c.host for c in CARDS})
    loads: dict[CopyId, Load] = field(default_factory=dict)
    ready: set[CopyId] = field(default_factory=set)
    running: dict[InvocationId, CopyId] = field(default_factory=dict)
    alive: dict[InvocationId, Wanted] = field(default_factory=dict)
    pinned: set[ModelName] = field(default_factory=set)
    ended: list[InvocationId] = field(default_factory=list)
    room: dict[HostId, int] = field(default_factory=lambda: dict.fromkeys(HOSTS, MEMORY_BYTES))
    lent: dict[CardId, HostId] = field(default_factory=dict)
    lost: set[InvocationId] = field(default_factory=set)  # offered again in a moment
    now_s: float = 0.0

    def tell(self, event: SharedEvent) -> None:
        self.heard(self.fleet.handle(event))

    def heard(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            self.perform(command)
        held = [id for c in self.fleet.copies() for id in c.running]
        assert sorted((*self.fleet.waiting(), *held)) == sorted(self.alive.keys() - self.lost)
        used = [card for c in self.fleet.copies() for card in c.cards]
        assert len(used) == len(set(used)) <= len(self.cards)
        assert {c.id for c in self.fleet.copies()} == set(self.loads)
        for host, models in self.fleet.books.placement.in_host_memory().items():
            weights = [m.weights_bytes for m in MODELS if m.name in models]
            assert sum(weights) <= self.room[host]
            assert host in (*self.cards.values(), *self.lent.values())

    def perform(self, command: Command) -> None:
        if isinstance(command, GiveUp):
            assert command.id not in self.running
            assert self.alive.pop(command.id).model == command.model
            assert not any(load.model == command.model for load in self.loads.values())
            return
        if isinstance(command, Started):
            assert command.copy_id in self.ready
            assert self.loads[command.copy_id].model == command.model
            assert self.alive[command.id].model == command.model
            assert command.id not in self.running
            self.running[command.id] = command.copy_id
            facts = next(m for m in MODELS if m.name == command.model)
            assert list(self.running.values()).count(command.copy_id) <= facts.max_running
            return
        for victim in command.evicted:
            facts = next(m for m in MODELS if m.name == victim.model)
            assert victim.copy_id not in self.running.values()
            assert victim.model not in self.pinned
            assert victim.copy_id in self.ready or self.loads[victim.copy_id].is_prefetch
            self.forget(victim.copy_id)
            left = sum(self.loads[id].model == victim.model for id in self.ready)
            assert left >= facts.min_copies
        facts = next(m for m in MODELS if m.name == command.model)
        assert len(command.cards) == facts.cards
        assert {self.cards[c] for c in command.cards} == {command.host}
        assert not {c for load in self.loads.values() for c in load.cards} & set(command.cards)
        self.loads[command.copy_id] = command

    def forget(self, copy_id: CopyId) -> None:
        del self.loads[copy_id]
        self.ready.discard(copy_id)
        self.lost |= {id for id, copy in self.running.items() if copy == copy_id}
        self.running = {id: copy for id, copy in self.running.items() if copy != copy_id}

    def offer_lost(self) -> None:
        """Whose copy is gone comes again, with its arrival."""
        for id in sorted(self.lost):
            self.lost.discard(id)
            _, attempt = self.fleet.attempts[id]
            self.heard(self.fleet.offer(self.now_s, self.alive[id], attempt + 1))

    def act(self, action: str, number: int) -> None:
        self.now_s += 1.0 + number % 3
        now_s = self.now_s
        loading = sorted(set(self.loads) - self.ready)
        match action:
            case "queue":
                id = InvocationId(f"{len(self.fleet.log):04d}")
                model = MODELS[number % len(MODELS)].name
                self.alive[id] = wants(id, model, now_s)
                self.heard(self.fleet.offer(now_s, self.alive[id]))
                self.heard(self.fleet.offer(now_s, self.alive[id]))  # heard twice
            case "finish" if self.running:
                id = sorted(self.running)[number % len(self.running)]
                del self.running[id], self.alive[id]
                self.ended.append(id)
                self.heard(self.fleet.finish(now_s, id))
                self.heard(self.fleet.finish(now_s, id))
            case "loaded" if loading:
                copy_id = loading[number % len(loading)]
                self.ready.add(copy_id)
                self.tell(LoadFinished(now_s, copy_id))
                self.tell(LoadFinished(now_s, copy_id))
            case "late":
                gone = CopyId(f"copy-{number % 9 + 1}")
                if gone not in self.loads:
                    self.tell(LoadFinished(now_s, gone))
                if gone not in self.loads:  # the first report may be the very first event
                    self.tell(LoadFailed(now_s, gone, "late"))
                for id in self.ended[-2:]:
                    self.heard(self.fleet.finish(now_s, id))
                    self.heard(self.fleet.withdraw(now_s, id))
            case "fail" if self.loads:
                copy_id = sorted(self.loads)[number % len(self.loads)]
                self.forget(copy_id)
                self.tell(LoadFailed(now_s, copy_id, "broken"))
                self.offer_lost()
            case "withdraw" if self.alive:
                id = sorted(self.alive)[number % len(self.alive)]
                del self.alive[id]
                self.running.pop(id, None)
                self.heard(self.fleet.withdraw(now_s, id))
            case "lend":
                card = self.fleet.books.placement.easiest_card(now_s, ALIKE)
                if card is None:
                    return
                for copy_id in [id for id, load in self.loads.items() if card in load.cards]:
                    model = self.loads[copy_id].model
                    assert copy_id not in self.running.values()
                    assert model not in self.pinned
                    self.forget(copy_id)
                    facts = next(m for m in MODELS if m.name == model)
                    left = sum(self.loads[id].model == model for id in self.ready)
                    assert left >= facts.min_copies
                self.lent[card] = self.cards.pop(card)
                self.tell(CardLent(now_s, card))
            case "lose" if self.cards:
                card = sorted(self.cards)[number % len(self.cards)]
                del self.cards[card]
                self.lose(card)
            case "lose host":
                host = HOSTS[number % len(HOSTS)]
                known = {**self.cards, **self.lent}
                for card in sorted(c for c, h in known.items() if h == host):
                    self.cards.pop(card, None)
                    self.lent.pop(card, None)
                    self.lose(card)
            case "memory":
                host = HOSTS[number % len(HOSTS)]
                self.room[host] = number * 10**9 // 4
                self.tell(HostMemorySized(now_s, HostMemory(host, self.room[host])))
            case "add":
                card_ = CARDS[number % len(CARDS)]
                self.lent.pop(card_.id, None)
                self.cards[card_.id] = card_.host
                self.tell(CardAdded(now_s, card_))
            case "pin":
                self.pinned.add(MODELS[number % len(MODELS)].name)
                self.tell(ModelPinned(now_s, MODELS[number % len(MODELS)].name, True))
            case "unpin":
                self.pinned.discard(MODELS[number % len(MODELS)].name)
                self.tell(ModelPinned(now_s, MODELS[number % len(MODELS)].name, False))
            case _:
                self.tell(Looked(now_s))

    def lose(self, card: CardId) -> None:
        for copy_id in [id for id, load in self.loads.items() if card in load.cards]:
            self.forget(copy_id)
        self.tell(CardLost(self.now_s, card))
        self.offer_lost()

    def finish_everything(self) -> None:
        """All cards are back, nothing is pinned, and all that was ordered comes true."""
        for i in range(len(CARDS)):
            self.act("add", i)
        for i in range(len(MODELS)):
            self.act("unpin", i)
        for _ in range(40 + 4 * len(self.alive)):
            if not self.alive:
                return
            self.now_s += MAX_LOAD_RETRY_S
            self.act("tick", 0)
            self.act("loaded", 0)
            self.act("finish", 0)
        raise AssertionError(f"{sorted(self.alive)} wait for ever")


def all_of_them(eviction: EvictionPolicy, order: DispatchOrder) -> Shared:
    memories = [HostMemory(h, MEMORY_BYTES) for h in HOSTS]
    return Shared(alike(eviction, order), MODELS, CARDS, memories)


@given(
    st.sampled_from(EVICTIONS),
    st.sampled_from(ORDERS),
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 30)), max_size=60),
)
def test_cards_hold_one_model_the_busy_stay_and_nobody_is_lost(
    eviction: EvictionPolicy, order: DispatchOrder, actions: Iterable[tuple[str, int]]
) -> None:
    witness = Witness(all_of_them(eviction, order))
    witness.act("tick", 0)  # it hears of the loads that were ordered at the opening
    for action, number in actions:
        witness.act(action, number)
    witness.finish_everything()
    again = Shared(alike(eviction, order), ())
    for event, commands in witness.fleet.log:
        assert again.handle(event) == commands
