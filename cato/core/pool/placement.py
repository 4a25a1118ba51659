"""Placement: which model sits on which card, for pools whose replicas change models.

What waits and what runs is known to the lines: each model has the books of a pool of its own
(`cato.core.orchestrator`), whose replicas are the model's loaded copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import assert_never

from cato.core.arrival_rates import ArrivalRates, UsualArrivals
from cato.core.errors import InputError, UnknownNameError
from cato.core.events import (
    Event,
    InvocationWithdrawn,
    ReplicaLost,
    ReplicaReported,
    TurnCame,
    TurnsEnded,
)
from cato.core.eviction import (
    Card,
    CardId,
    CopyId,
    DispatchOrder,
    EvictionPolicy,
    FleetSnapshot,
    HostMemory,
    ModelFacts,
    ModelState,
    Wanted,
    in_units,
)
from cato.core.ids import DeploymentName, HostId, InvocationId, ModelName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.profile import Profile
from cato.core.snapshot import Invocation

# A load that failed is not tried again at once: what broke it is seldom gone in a second. Each
# further failure in a row doubles the wait, up to the second value.
LOAD_RETRY_S = 1.0
MAX_LOAD_RETRY_S = 60.0
# Who waits for longer than this past its model's SLO, because all that is loaded is busy, has a
# copy closed to newcomers: it empties within one answer, where it never would with enough traffic.
STARVED_AFTER_S = 30.0
# After so many failures in a row those that wait for the model are given up: 1 + 2 + 4 s passed.
LOAD_TRIES = 4


@dataclass(frozen=True, slots=True)
class LoadFinished:
    """The copy can serve. Harmless when it is unknown, superseded, or ready already."""

    now_s: float
    copy_id: CopyId


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The copy never came up, or its engine died; its cards are empty."""

    now_s: float
    copy_id: CopyId
    problem: str


@dataclass(frozen=True, slots=True)
class CopyFound:
    """A loaded copy that these books did not load: after a restart of their keeper.

    `held` are the invocations that run there. With `host` the cards need not be known.
    """

    now_s: float
    copy_id: CopyId
    model: ModelName
    cards: tuple[CardId, ...]
    held: tuple[InvocationId, ...] = ()
    host: HostId | None = None


@dataclass(frozen=True, slots=True)
class CopyReported:
    """The copy serves, and holds the invocations `held`. Harmless when it is unknown."""

    now_s: float
    copy_id: CopyId
    held: tuple[InvocationId, ...]


@dataclass(frozen=True, slots=True)
class CardAdded:
    """An empty card; one that is known stays as it is."""

    now_s: float
    card: Card


@dataclass(frozen=True, slots=True)
class CardLost:
    """The card is gone with every copy that used it; leases there end."""

    now_s: float
    card_id: CardId


@dataclass(frozen=True, slots=True)
class CardLent:
    """The card, on which nothing runs, serves another purpose until it is added again. Its copy is
    unloaded; what its host's memory holds stays."""

    now_s: float
    card_id: CardId


@dataclass(frozen=True, slots=True)
class ModelPinned:
    """While `pinned`, no copy of the model is evicted."""

    now_s: float
    model: ModelName
    pinned: bool


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """The model can no longer be asked for. Its copies, which must be idle, leave their cards."""

    now_s: float
    model: ModelName


@dataclass(frozen=True, slots=True)
class HostMemorySized:
    """How much room for weights a host has; what does not fit any more is forgotten."""

    now_s: float
    memory: HostMemory


@dataclass(frozen=True, slots=True)
class HostMemoryHeld:
    """Of the weights that these books believe in a host's memory no others than those are there."""

    now_s: float
    host: HostId
    models: frozenset[ModelName]


@dataclass(frozen=True, slots=True)
class CardPoliciesChanged:
    """From now on these decide."""

    now_s: float
    eviction: EvictionPolicy
    order: DispatchOrder


@dataclass(frozen=True, slots=True)
class ClockTold:
    """What the wall clock shows: seconds since 1970 of a clock that has local time."""

    now_s: float
    local_s: float


@dataclass(frozen=True, slots=True)
class ArrivalsRemembered:
    """What was learnt before these books were opened."""

    now_s: float
    slices: tuple[UsualArrivals, ...]


PlacementEvent = (
    LoadFinished
    | LoadFailed
    | CopyFound
    | CopyReported
    | CardAdded
    | CardLost
    | CardLent
    | ModelPinned
    | ModelRemoved
    | HostMemorySized
    | HostMemoryHeld
    | CardPoliciesChanged
    | ClockTold
    | ArrivalsRemembered
)


@dataclass(frozen=True, slots=True)
class Evicted:
    """A copy that goes; one still loading is aborted (only a prefetch ever is)."""

    copy_id: CopyId
    model: ModelName


@dataclass(frozen=True, slots=True)
class Load:
    """Unload `evicted`, then load `model` on `cards` of `host`; report with `copy_id`."""

    copy_id: CopyId
    model: ModelName
    host: HostId
    cards: tuple[CardId, ...]
    evicted: tuple[Evicted, ...]
    from_host_memory: bool
    is_prefetch: bool
    expected_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The invocation cannot be served: its model does not load. The next try is in
    `retry_after_s`."""

    id: InvocationId
    model: ModelName
    problem: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class CopyPicture:
    """What an operator sees of a copy."""

    id: CopyId
    model: ModelName
    host: HostId
    cards: tuple[CardId, ...]
    is_ready: bool
    is_prefetch: bool
    running: tuple[InvocationId, ...]


_BY_ARRIVAL: Callable[[Wanted], tuple[float, str]] = attrgetter("arrived_at_s", "id")


@dataclass(frozen=True, slots=True)
class Served:
    """How a model is served where it is loaded; its copies are replicas of `deployment`."""

    facts: ModelFacts
    profile: Profile
    deployment: DeploymentName
    prefix_caching: bool = False
    step_tokens: int = 0


@dataclass(slots=True)
class _Copy:
    id: CopyId
    model: ModelName
    host: HostId
    cards: tuple[CardId, ...]
    is_ready: bool
    is_prefetch: bool = False
    from_host_memory: bool = False
    ready_at_s: float = -inf
    # Takes no newcomers, so that it can make room for a model that waits for too long.
    is_closing: bool = False

    @property
    def replica_id(self) -> ReplicaId:
        """What it is called in its model's line."""
        return ReplicaId(self.cards[0])


@dataclass(slots=True)
class _Model:
    served: Served
    facts: ModelFacts
    line: PoolOrchestrator
    pinned: bool = False
    uses: int = 0
    last_use_s: float | None = None
    arrivals: int = 0
    mean_tokens: float = 0.0
    retry_at_s: float = -inf
    failures: int = 0  # in a row
    _made: dict[InvocationId, tuple[Invocation, Wanted]] = field(default_factory=dict)

    @property
    def waits(self) -> int:
        """How many calls wait for a copy."""
        return len(self.line.unplaced)

    def queue(self) -> tuple[Wanted, ...]:
        """What waits, by arrival."""
        known, self._made = self._made, {}
        for waiting in self.line.unplaced.values():
            invocation = waiting.invocation
            made = known.get(invocation.id)
            if made is None or made[0] is not invocation:
                made = invocation, _wanted(self.served, invocation)
            self._made[invocation.id] = made
        return tuple(sorted((w for _, w in self._made.values()), key=_BY_ARRIVAL))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a copy could go: cards of one host, and the copies that must leave them."""

    host: HostId
    cards: tuple[CardId, ...]
    victims: tuple[_Copy, ...]
    reasons: tuple[str, ...]


class Placement:
    """Copies of models on the cards of a fleet, and the memories of its hosts.

    It keeps, whatever the policies say: a card holds one model; a copy that is busy, pinned, or one
    of the last `min_copies` is not evicted. Time is the driver's.

    Weights that were loaded stay in the host's memory. When room is short those go first whose
    arrival rate times the seconds that memory saves them, per byte, is least: the least recently
    loaded would let every rare large model push out a frequent one.

    `unit_s`: the seconds of the driver's clock that are one of the policies'. Other than 1 where an
    experiment multiplies all its times: the constants of policies are in seconds, too.

    `life` is part of the names of copies: books that take the place of others must not use theirs.
    Within `settle_s` of their first card they order no load: what is loaded has not been told yet.

    `tell` passes an event to the line of a model.
    """

    def __init__(
        self,
        eviction: EvictionPolicy,
        order: DispatchOrder,
        tell: Callable[[ModelName, Event], None],
        unit_s: float = 1.0,
        life: str = "",
        settle_s: float = 0.0,
    ) -> None:
        self._tell = tell
        self._unit_s = unit_s
        self._life = f"{life}-" if life else ""
        self._settle_s = settle_s
        self._eviction = eviction
        self._order = order
        self._models: dict[ModelName, _Model] = {}
        self._wanted: dict[ModelName, _Model] = {}  # those that calls wait for
        self._cards: dict[CardId, Card] = {}
        self._lent: dict[CardId, Card] = {}
        self._memory_bytes: dict[HostId, int] = {}
        self._in_memory: dict[HostId, set[ModelName]] = {}
        self._copies: dict[CopyId, _Copy] = {}
        self._on_card: dict[CardId, CopyId] = {}
        # Waiting invocations for whom a load was ordered: theirs is the miss.
        self._missed: set[InvocationId] = set()
        self._rates = ArrivalRates(unit_s)
        self._opened_at_s: float | None = None
        self._first_card_at_s: float | None = None
        self._loads = 0

    @property
    def in_order(self) -> bool:
        return self._order.in_order

    def open(self, now_s: float) -> None:
        """The first event comes at `now_s`."""
        if self._opened_at_s is None:
            self._opened_at_s = now_s
            self._rates.open(now_s)

    def handle(self, event: PlacementEvent) -> tuple[GiveUp, ...]:
        """Raise `UnknownNameError` for a model that is not known, and `InputError` for one that is
        in use when it is to be removed."""
        match event:
            case LoadFinished():
                self._loaded(event)
            case LoadFailed():
                return self._failed(event)
            case CopyFound():
                self._note_card(event.now_s)
                self._adopt(event)
            case CopyReported():
                copy = self._copies.get(event.copy_id)
                if copy is not None and copy.is_ready:
                    self._report(copy, event.now_s, event.held)
            case ClockTold():
                self._rates.tell_clock(event.now_s, event.local_s)
            case ArrivalsRemembered():
                self._rates.remember(event.slices)
            case CardAdded():
                self._note_card(event.now_s)
                self._lent.pop(event.card.id, None)
                self._cards.setdefault(event.card.id, event.card)
            case CardLost():
                self._lose(event)
            case CardLent():
                self._lend(event.card_id, event.now_s)
            case ModelPinned():
                self._model(event.model).pinned = event.pinned
            case ModelRemoved():
                self._remove_model(event.model, event.now_s)
            case HostMemorySized():
                self._memory_bytes[event.memory.id] = event.memory.weights_bytes
                self._trim(event.memory.id, event.now_s)
            case HostMemoryHeld():
                self._in_memory.get(event.host, set()).intersection_update(event.models)
            case CardPoliciesChanged():
                self._eviction, self._order = event.eviction, event.order
            case _:
                assert_never(event)
        return ()

    def arrived(self, model: ModelName, invocation: Invocation, now_s: float) -> None:
        """A call that was not known wants its model."""
        asked = self._model(model)
        self._rates.note(now_s, model, invocation.user)
        asked.arrivals += 1
        asked.mean_tokens += (invocation.expected_tokens - asked.mean_tokens) / asked.arrivals

    def started(self, model: ModelName, id: InvocationId, now_s: float) -> bool:
        """A copy took it: whether its model was there when its turn came."""
        if not self._order.in_order:
            self._use(self._models[model], now_s)
        is_hit = id not in self._missed
        self._missed.discard(id)
        return is_hit

    def see_queue(self, name: ModelName) -> None:
        """The line of the model was told something: does a call wait there?"""
        model = self._models[name]
        if model.line.unplaced:
            self._wanted[name] = model
        else:
            self._wanted.pop(name, None)

    def forget(self, id: InvocationId) -> None:
        """It waits no longer."""
        self._missed.discard(id)

    def _use(self, model: _Model, now_s: float) -> None:
        model.uses += 1
        model.last_use_s = now_s

    def copies(self) -> tuple[CopyPicture, ...]:
        return tuple(
            CopyPicture(
                c.id,
                c.model,
                c.host,
                c.cards,
                c.is_ready,
                c.is_prefetch,
                self._models[c.model].line.held_by(c.replica_id) if c.is_ready else (),
            )
            for c in self._copies.values()
        )

    def cards(self) -> Mapping[CardId, CopyPicture | None]:
        """What is loaded or loading on each card."""
        pictures = {c.id: c for c in self.copies()}
        return {
            card: pictures[self._on_card[card]] if card in self._on_card else None
            for card in self._cards
        }

    def easiest_card(self, now_s: float) -> CardId | None:
        """The card that can be lent (`CardLent`) at the least harm: an empty one, else that of the
        idle copy least worth keeping; None while all are busy or a model needs another copy."""
        for name, model in self._models.items():
            if model.waits and self._lacks_a_copy(name):
                return None
            if self._copies_of(name) < model.facts.min_copies:
                return None
        for card in sorted(self._cards):
            if card not in self._on_card:
                return card
        fleet = self.snapshot(now_s)
        hosts = sorted({c.host for c in self._cards.values()})
        candidates = [x for host in hosts for x in self._candidates(host, fleet)]
        if not candidates:
            return None
        _, copy, _ = min(candidates, key=lambda x: (x[0], x[1].id))
        return copy.cards[0]

    def models(self) -> tuple[ModelFacts, ...]:
        return tuple(m.facts for m in self._models.values())

    def in_host_memory(self) -> dict[HostId, tuple[ModelName, ...]]:
        """Whose weights are in which host's memory."""
        return {host: tuple(sorted(names)) for host, names in self._in_memory.items() if names}

    def waiting_by_model(self) -> dict[ModelName, int]:
        """How many wait for each model that anybody waits for."""
        return {name: m.waits for name, m in sorted(self._wanted.items())}

    def uses(self, name: ModelName) -> int:
        """How many wait for the model or run in a copy of it; raise `UnknownNameError`."""
        model = self._model(name)
        copies = [c for c in self._copies.values() if c.model == name and c.is_ready]
        return model.line.queued + sum(len(model.line.held_by(c.replica_id)) for c in copies)

    def learnt_arrivals(self) -> tuple[UsualArrivals, ...]:
        """What was learnt of the times of day since the last call."""
        return self._rates.learnt()

    def snapshot(self, now_s: float) -> FleetSnapshot:
        """What a policy sees."""
        positions: dict[ModelName, int] = {}
        queues = {name: model.queue() for name, model in self._wanted.items()}
        waiting = sorted((w for queue in queues.values() for w in queue), key=_BY_ARRIVAL)
        for i, wanted in enumerate(waiting, start=1):
            positions.setdefault(wanted.model, i)
        copies: dict[ModelName, int] = {}
        for copy in self._copies.values():
            copies[copy.model] = copies.get(copy.model, 0) + 1
        opened_at_s = now_s if self._opened_at_s is None else self._opened_at_s
        remembered = {m for names in self._in_memory.values() for m in names}
        states: dict[ModelName, ModelState] = {}
        for name, model in self._models.items():
            last_s = opened_at_s if model.last_use_s is None else model.last_use_s
            rate_per_s, evidence = self._rates.rate(now_s, name)
            states[name] = ModelState(
                facts=model.facts,
                load_s=model.facts.reload_s if name in remembered else model.facts.load_s,
                idle_s=max(0.0, now_s - last_s),
                uses=model.uses,
                rate_per_s=rate_per_s,
                evidence=evidence,
                expected_tokens=model.mean_tokens,
                queue_position=positions.get(name),
                waiting=queues.get(name, ()),
                copies=copies.get(name, 0),
            )
        seen = FleetSnapshot(now_s, states)
        return seen if self._unit_s == 1.0 else in_units(seen, self._unit_s)

    # Events

    def _model(self, name: ModelName) -> _Model:
        if name not in self._models:
            raise UnknownNameError("model", name, tuple(self._models))
        return self._models[name]

    def _loaded(self, event: LoadFinished) -> None:
        copy = self._copies.get(event.copy_id)
        if copy is None or copy.is_ready:
            return
        copy.is_ready, copy.ready_at_s = True, event.now_s
        copy.is_prefetch = False
        self._models[copy.model].failures = 0
        self._remember(copy.host, copy.model, event.now_s)
        self._report(copy, event.now_s)

    def _report(
        self, copy: _Copy, now_s: float, held: tuple[InvocationId, ...] | None = None
    ) -> None:
        """Its line hears that the copy is there; it holds what it held, or `held`."""
        served, line = self._models[copy.model].served, self._models[copy.model].line
        report = ReplicaReported(
            now_s=now_s,
            replica_id=copy.replica_id,
            deployment=served.deployment,
            profile=served.profile,
            max_running=served.facts.max_running,
            standby=0,
            accepting=not copy.is_closing,
            held=line.held_by(copy.replica_id) if held is None else held,
            prefix_caching=served.prefix_caching,
            step_tokens=served.step_tokens,
        )
        self._tell(copy.model, report)

    def _failed(self, event: LoadFailed) -> tuple[GiveUp, ...]:
        """Weights in memory that do not load are read from storage, at once; a model that does not
        load from there either waits longer after each try, and in the end its queue is given up."""
        copy = self._copies.get(event.copy_id)
        if copy is None:
            return ()
        self._remove(copy, event.now_s, event.problem)
        in_memory = self._in_memory.get(copy.host, set())
        if copy.from_host_memory and not copy.is_ready:
            in_memory.discard(copy.model)
            return ()
        model = self._models[copy.model]
        model.failures += 1
        delay_s = min(MAX_LOAD_RETRY_S, LOAD_RETRY_S * 2.0 ** (model.failures - 1))
        model.retry_at_s = event.now_s + delay_s
        if model.failures < LOAD_TRIES:
            return ()
        problem = f"{copy.model} did not load in {model.failures} tries: {event.problem}"
        given_up = tuple(model.line.waiting)
        for x in given_up:
            self._tell(copy.model, InvocationWithdrawn(event.now_s, x.id, x.attempt, problem))
        return tuple(GiveUp(x.id, copy.model, problem, delay_s) for x in given_up)

    def _note_card(self, now_s: float) -> None:
        if self._first_card_at_s is None:
            self._first_card_at_s = now_s

    def _is_settled(self, now_s: float) -> bool:
        """Whether every slot has had the time to say what it holds."""
        first_s = now_s if self._first_card_at_s is None else self._first_card_at_s
        return max(0.0, now_s - first_s) >= self._settle_s

    def _lose(self, event: CardLost) -> None:
        card_id = event.card_id
        if card_id in self._on_card:
            copy = self._copies[self._on_card[card_id]]
            self._remove(copy, event.now_s, f"{card_id} is gone")
        card = self._cards.pop(card_id, None) or self._lent.pop(card_id, None)
        left = (*self._cards.values(), *self._lent.values())
        if card is not None and all(c.host != card.host for c in left):
            # Perhaps the host is gone; what was in its memory is not counted on.
            self._in_memory.pop(card.host, None)

    def _lend(self, card_id: CardId, now_s: float) -> None:
        if card_id in self._on_card:
            copy = self._copies[self._on_card[card_id]]
            assert not self._held(copy), f"{copy.id} is busy and must not be unloaded"
            self._remove(copy, now_s, "its card is lent")
        if card_id in self._cards:
            self._lent[card_id] = self._cards.pop(card_id)

    def serve(self, served: Served, line: PoolOrchestrator) -> None:
        """The model can be asked for, and waits in `line`; of one that is known these are the facts
        from now on. Raise `InputError` when they are impossible."""
        facts = served.facts
        _check(facts)
        if facts.name in self._models:
            known = self._models[facts.name]
            known.served, known.facts = served, facts
            self._forget(facts.name)  # its weights may be others
            return
        self._models[facts.name] = _Model(served, facts, line)
        self._models = dict(sorted(self._models.items()))

    def _remove_model(self, name: ModelName, now_s: float) -> None:
        used = self.uses(name)
        if used:
            raise InputError(f"{used} invocations wait for {name!r} or run there; try again later")
        for copy in [c for c in self._copies.values() if c.model == name]:
            self._remove(copy, now_s, "its model is removed")
        self._forget(name)
        self._wanted.pop(name, None)
        del self._models[name]

    def _forget(self, name: ModelName) -> None:
        for names in self._in_memory.values():
            names.discard(name)

    def _remember(self, host: HostId, model: ModelName, now_s: float) -> None:
        """Keep the weights in the host's memory, if nothing worthier needs the room."""
        self._in_memory.setdefault(host, set()).add(model)
        self._trim(host, now_s)

    def _trim(self, host: HostId, now_s: float) -> None:
        room_bytes = self._memory_bytes.get(host, 0)
        names = self._in_memory.get(host, set())

        def saved_per_byte(name: ModelName) -> tuple[float, ModelName]:
            facts = self._models[name].facts
            saved_s = self._rates.rate(now_s, name)[0] * (facts.load_s - facts.reload_s)
            return saved_s / max(1, facts.weights_bytes), name

        for name in sorted(names, key=saved_per_byte):
            if sum(self._models[m].facts.weights_bytes for m in names) <= room_bytes:
                return
            names.remove(name)

    def _adopt(self, event: CopyFound) -> None:
        self._model(event.model)
        if event.host is not None:
            for card in event.cards:
                self._lent.pop(card, None)
                self._cards.setdefault(card, Card(card, event.host))
        hosts = {self._cards[c].host for c in event.cards if c in self._cards}
        is_whole = all(c in self._cards and c not in self._on_card for c in event.cards)
        if event.copy_id in self._copies or not is_whole or len(hosts) != 1:
            return  # a late report: what these books ordered meanwhile counts
        copy = _Copy(event.copy_id, event.model, hosts.pop(), event.cards, is_ready=True)
        copy.ready_at_s = event.now_s
        self._place(copy)
        self._remember(copy.host, copy.model, event.now_s)
        self._report(copy, event.now_s, event.held)

    def _place(self, copy: _Copy) -> None:
        for card in copy.cards:
            assert card not in self._on_card, f"{card} holds {self._on_card[card]}"
            self._on_card[card] = copy.id
        self._copies[copy.id] = copy

    def _remove(self, copy: _Copy, now_s: float, reason: str) -> None:
        """Take the copy off its cards; leases there end."""
        for card in copy.cards:
            del self._on_card[card]
        del self._copies[copy.id]
        if copy.is_ready:
            self._tell(copy.model, ReplicaLost(now_s, copy.replica_id, reason))
        if self._order.in_order and self._models[copy.model].line.in_turn:
            self._tell(copy.model, TurnsEnded(now_s))

    # Decisions

    def decide(self, now_s: float, order: Callable[[Load], None]) -> None:
        """Something has changed: who has its turn, and what is to be loaded?"""
        starved = self._starved(now_s)
        opened = [
            copy
            for copy in self._copies.values()
            if copy.is_closing and not (starved and self._may_leave(copy))
        ]
        for copy in opened:
            copy.is_closing = False
            self._report(copy, now_s)
        if not self._is_settled(now_s):
            return
        for load in self._fill_minimum(now_s):
            order(load)
        if self._order.in_order:
            self._take_turns(now_s, order)
        else:
            for load in self._load_wanted(now_s, starved):
                order(load)
        prefetch = self._prefetch(now_s)
        if prefetch is not None:
            order(prefetch)

    def _fill_minimum(self, now_s: float) -> list[Load]:
        commands: list[Load] = []
        for name, model in self._models.items():
            while 0 < model.facts.min_copies > self._copies_of(name):
                reason = f"{model.facts.min_copies} copies must be loaded"
                load = self._load(name, reason, self.snapshot(now_s), now_s)
                if load is None:
                    break
                commands.append(load)
        return commands

    def _take_turns(self, now_s: float, order: Callable[[Load], None]) -> None:
        """The first of all has its turn when a copy of its model has room, be it one that loads:
        it is bound to that model's line. Those behind it wait for that."""
        while (found := self._head(now_s)) is not None:
            name, head = found
            model = self._models[name]
            if not self._room(model):
                if self._copies_of(name) >= model.facts.max_copies or not self._can_make_room():
                    return
                load = self._load(name, "head of the queue", self.snapshot(now_s), now_s)
                if load is None:
                    return
                order(load)
            loading = [c for c in self._copies.values() if c.model == name and not c.is_ready]
            if loading and self._ready_room(model) <= 0:
                self._missed.add(head.id)
                for copy in loading:
                    copy.is_prefetch = False
            self._use(model, now_s)
            self._tell(name, TurnCame(now_s, head.id))

    def _head(self, now_s: float) -> tuple[ModelName, Invocation] | None:
        """The oldest call whose turn has not come. A model that failed to load a moment ago holds
        up nobody else."""
        heads = [
            (first.arrived_at_s, first.id, name, first)
            for name, model in self._wanted.items()
            if (first := model.line.first_parked) is not None
            and not (now_s < model.retry_at_s and self._copies_of(name) == 0)
        ]
        return min(heads)[2:] if heads else None

    def _ready_room(self, model: _Model) -> int:
        """Places of ready copies that nobody has or was given a turn for."""
        return model.line.room - model.line.in_turn

    def _room(self, model: _Model) -> bool:
        name, places = model.facts.name, model.facts.max_running
        loading = sum(c.model == name and not c.is_ready for c in self._copies.values())
        return self._ready_room(model) + loading * places > 0

    def _load_wanted(self, now_s: float, starved: Collection[ModelName]) -> list[Load]:
        for copy in self._copies.values():
            if copy.is_prefetch and copy.model in self._wanted:
                copy.is_prefetch = False  # somebody waits for it now
                self._blame(self._wanted[copy.model])
        if not self._wanted or not (starved or self._can_make_room()):
            return []
        loads: list[Load] = []
        fleet = self.snapshot(now_s)
        # Room that was made for a model is not another's.
        for want in sorted(self._order.wants(fleet), key=lambda w: w.model not in starved):
            if not self._lacks_a_copy(want.model):
                continue
            load = self._load(want.model, want.reason, fleet, now_s)
            if load is not None:
                loads.append(load)
                self._blame(self._models[want.model])
            elif want.model in starved:
                self._close_one(self._models[want.model].facts, fleet, now_s)
        return loads

    def _starved(self, now_s: float) -> set[ModelName]:
        """Models that are not loaded and for which somebody has waited for too long; none where
        all are served in order, which starves nobody."""
        found: set[ModelName] = set()
        if self._order.in_order:
            return found
        loaded = {c.model for c in self._copies.values()}
        for name, model in self._wanted.items():
            if name not in loaded and now_s >= model.retry_at_s:
                first = next(iter(model.line.unplaced.values()))
                waited_s = now_s - first.invocation.arrived_at_s
                if waited_s > model.facts.slo_s + STARVED_AFTER_S * self._unit_s:
                    found.add(name)
        return found

    def _close_one(self, facts: ModelFacts, fleet: FleetSnapshot, now_s: float) -> None:
        """Nobody joins the busy copy least worth keeping any more; one at a time, all on one host,
        and none that has not served for as long as another may have to wait."""
        closing = [c for c in self._copies.values() if c.is_closing]
        if any(self._held(c) for c in closing):
            return
        cards_of = Counter(c.host for c in self._cards.values())
        hosts = {c.host for c in closing} or {h for h, n in cards_of.items() if n >= facts.cards}
        busy = [
            (self._eviction.keep(copy.model, fleet).worth, copy.id, copy)
            for copy in self._copies.values()
            if copy.is_ready and self._held(copy) and copy.host in hosts and self._may_leave(copy)
            if now_s - copy.ready_at_s >= self._tenure_s(copy)
        ]
        if busy:
            closed = min(busy)[2]
            closed.is_closing = True
            self._report(closed, now_s)

    def _tenure_s(self, copy: _Copy) -> float:
        return max(STARVED_AFTER_S * self._unit_s, self._models[copy.model].facts.load_s)

    def _blame(self, model: _Model) -> None:
        """Count a miss: the first in the queue for whom no load was ordered yet."""
        cause = next((w.id for w in model.queue() if w.id not in self._missed), None)
        if cause is not None:
            self._missed.add(cause)

    def _lacks_a_copy(self, name: ModelName) -> bool:
        """More wait than the copies on their way have room for, and another is allowed; none in
        place of its own that closes."""
        model = self._models[name]
        if any(c.model == name and c.is_closing for c in self._copies.values()):
            return False
        loading = sum(c.model == name and not c.is_ready for c in self._copies.values())
        room = loading * model.facts.max_running
        return model.waits > room and self._copies_of(name) < model.facts.max_copies

    def _prefetch(self, now_s: float) -> Load | None:
        """One at a time, and only when nobody waits: a load ahead of demand must delay none."""
        if self._wanted or any(c.is_prefetch for c in self._copies.values()):
            return None
        if not self._can_make_room():
            return None
        fleet = self.snapshot(now_s)
        prefetch = self._eviction.prefetch(fleet)
        if prefetch is None:
            return None
        model = self._model(prefetch.model)
        if self._copies_of(prefetch.model) >= model.facts.max_copies:
            return None
        return self._load(prefetch.model, prefetch.reason, fleet, now_s, below=prefetch.above)

    def _held(self, copy: _Copy) -> int:
        """How many run there."""
        return len(self._models[copy.model].line.held_by(copy.replica_id)) if copy.is_ready else 0

    def _copies_of(self, name: ModelName) -> int:
        return sum(c.model == name for c in self._copies.values())

    def _load(
        self,
        name: ModelName,
        reason: str,
        fleet: FleetSnapshot,
        now_s: float,
        below: float | None = None,
    ) -> Load | None:
        """Order a load; None when no host can make room. `below` marks a prefetch."""
        model = self._models[name]
        if now_s < model.retry_at_s:
            return None
        is_prefetch = below is not None
        place = self._best_place(model.facts, fleet, inf if below is None else below, is_prefetch)
        if place is None:
            return None
        for victim in place.victims:
            assert not self._held(victim), f"{victim.id} is busy and must not be evicted"
            self._remove(victim, now_s, f"{name} takes its place")
        self._loads += 1
        while (id := CopyId(f"copy-{self._life}{self._loads}")) in self._copies:
            self._loads += 1
        copy = _Copy(id, name, place.host, place.cards, False, is_prefetch)
        self._place(copy)
        from_memory = name in self._in_memory.get(place.host, ())
        copy.from_host_memory = from_memory
        for victim, why in zip(place.victims, place.reasons, strict=True):
            reason += f"; evicts {victim.model} ({why})"
        return Load(
            copy_id=copy.id,
            model=name,
            host=place.host,
            cards=place.cards,
            evicted=tuple(Evicted(v.id, v.model) for v in place.victims),
            from_host_memory=from_memory,
            is_prefetch=is_prefetch,
            expected_s=model.facts.reload_s if from_memory else model.facts.load_s,
            reason=reason,
        )

    def _best_place(
        self, facts: ModelFacts, fleet: FleetSnapshot, below: float, is_prefetch: bool
    ) -> _Place | None:
        """The host whose worthiest victim is worth least; then the one with the faster load."""
        hosts: dict[HostId, list[CardId]] = {}
        for card in self._cards.values():
            hosts.setdefault(card.host, []).append(card.id)
        best: tuple[tuple[float, bool, int, HostId], _Place] | None = None
        for host, cards in hosts.items():
            found = self._place_on(host, cards, facts, fleet, below, is_prefetch)
            if found is not None:
                worst, place = found
                is_cold = facts.name not in self._in_memory.get(host, ())
                key = (worst, is_cold, len(place.victims), host)
                if best is None or key < best[0]:
                    best = key, place
        return None if best is None else best[1]

    def _place_on(
        self,
        host: HostId,
        cards: Sequence[CardId],
        facts: ModelFacts,
        fleet: FleetSnapshot,
        below: float,
        is_prefetch: bool,
    ) -> tuple[float, _Place] | None:
        """Empty cards first, then those of the copies least worth keeping."""
        free = sorted(c for c in cards if c not in self._on_card)
        victims: list[tuple[float, _Copy, str]] = []
        if len(free) < facts.cards:
            for worth, copy, why in self._candidates(host, fleet):
                if worth >= below or (is_prefetch and not copy.is_ready):
                    continue
                if not self._may_go(copy, [v for _, v, _ in victims]):
                    continue
                victims.append((worth, copy, why))
                if _freed(free, victims) >= facts.cards:
                    break
            else:
                return None
            for victim in reversed(victims[:-1]):  # an early small one may not be needed
                others = [v for v in victims if v is not victim]
                if _freed(free, others) >= facts.cards:
                    victims = others
        taken = sorted(card for _, copy, _ in victims for card in copy.cards)
        place = _Place(
            host,
            tuple((taken + free)[: facts.cards]),
            tuple(copy for _, copy, _ in victims),
            tuple(why for _, _, why in victims),
        )
        return (victims[-1][0] if victims else -inf), place

    def _candidates(self, host: HostId, fleet: FleetSnapshot) -> list[tuple[float, _Copy, str]]:
        candidates = []
        for copy in self._copies.values():
            if copy.host == host and self._may_go(copy):
                keep = self._eviction.keep(copy.model, fleet)
                candidates.append((keep.worth, copy, keep.reason))
        candidates.sort(key=lambda x: (x[0], x[1].id))
        return candidates

    def _may_go(self, copy: _Copy, gone: Sequence[_Copy] = ()) -> bool:
        """Not busy, and not needed; a load that someone waits for is busy."""
        is_busy = self._held(copy) or not (copy.is_ready or copy.is_prefetch)
        return not is_busy and self._may_leave(copy, gone)

    def _may_leave(self, copy: _Copy, gone: Sequence[_Copy] = ()) -> bool:
        """Not pinned, and not one of the last copies."""
        model = self._models[copy.model]
        if model.pinned:
            return False
        left = sum(
            c.model == copy.model and c.is_ready and c is not copy and c not in gone
            for c in self._copies.values()
        )
        return left >= model.facts.min_copies

    def _can_make_room(self) -> bool:
        """Cheap: most events of a busy fleet free nothing, and need no snapshot."""
        return len(self._on_card) < len(self._cards) or any(
            self._may_go(c) for c in self._copies.values()
        )


def _check(facts: ModelFacts) -> None:
    if facts.cards < 1 or facts.max_running < 1:
        raise InputError(f"model {facts.name!r} needs cards and max_running of at least 1")
    if facts.min_copies > facts.max_copies:
        raise InputError(f"model {facts.name!r}: raise max_copies to min_copies or more")


def _wanted(served: Served, invocation: Invocation) -> Wanted:
    """The first token must come so early that the rest of the way meets the SLO."""
    profile = served.profile
    after_first_s = invocation.own_s(profile) - profile.first_token_s(invocation.prompt_tokens)
    return Wanted(
        id=invocation.id,
        model=served.facts.name,
        arrived_at_s=invocation.arrived_at_s,
        deadline_s=invocation.deadline_s - invocation.downstream_s - after_first_s,
        expected_tokens=float(invocation.expected_tokens),
        value=invocation.weight,
        user=invocation.user,
    )


def _freed(free: Sequence[CardId], victims: Sequence[tuple[float, _Copy, str]]) -> int:
    return len(free) + sum(len(copy.cards) for _, copy, _ in victims)
