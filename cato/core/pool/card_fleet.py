"""The cards of a shared pool, the copies on them, and the memories of their hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from cato.core.arrival_rates import ArrivalRates
from cato.core.errors import UnknownNameError
from cato.core.eviction import (
    Card,
    CardId,
    CopyId,
    EvictionPolicy,
    FleetSnapshot,
    ModelFacts,
    ModelState,
    Wanted,
    in_units,
)
from cato.core.ids import HostId, InvocationId, ModelName, ReplicaId
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.placement_events import Served
from cato.core.snapshot import Invocation

BY_ARRIVAL: Callable[[Wanted], tuple[float, str]] = attrgetter("arrived_at_s", "id")


@dataclass(slots=True)
class Copy:
    """A model on its cards, loaded or loading."""

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
class HostedState:
    """A model of the pool: how it is served, its line, and what was learnt of it."""

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
                made = invocation, wanted_of(self.served, invocation)
            self._made[invocation.id] = made
        return tuple(sorted((w for _, w in self._made.values()), key=BY_ARRIVAL))


@dataclass(frozen=True, slots=True)
class Site:
    """Where a copy could go: cards of one host, and the copies that must leave them."""

    host: HostId
    cards: tuple[CardId, ...]
    victims: tuple[Copy, ...]
    reasons: tuple[str, ...]


class CardFleet:
    """What is where, and what may go for something else. `Placement` decides."""

    def __init__(self, rates: ArrivalRates, unit_s: float) -> None:
        """`unit_s` as for `Placement`."""
        self._rates, self._unit_s = rates, unit_s
        self.opened_at_s: float | None = None
        self.wanted: dict[ModelName, HostedState] = {}  # those that calls wait for
        self.models: dict[ModelName, HostedState] = {}
        self.cards: dict[CardId, Card] = {}
        self.lent: dict[CardId, Card] = {}
        self.memory_bytes: dict[HostId, int] = {}
        self.in_memory: dict[HostId, set[ModelName]] = {}
        self.copies: dict[CopyId, Copy] = {}
        self.on_card: dict[CardId, CopyId] = {}

    def snapshot(self, now_s: float) -> FleetSnapshot:
        """What a policy sees."""
        positions: dict[ModelName, int] = {}
        queues = {name: model.queue() for name, model in self.wanted.items()}
        waiting = sorted((w for queue in queues.values() for w in queue), key=BY_ARRIVAL)
        for i, wanted in enumerate(waiting, start=1):
            positions.setdefault(wanted.model, i)
        copies: dict[ModelName, int] = {}
        for copy in self.copies.values():
            copies[copy.model] = copies.get(copy.model, 0) + 1
        opened_at_s = now_s if self.opened_at_s is None else self.opened_at_s
        remembered = {m for names in self.in_memory.values() for m in names}
        states: dict[ModelName, ModelState] = {}
        for name, model in self.models.items():
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

    def held(self, copy: Copy) -> int:
        """How many run there."""
        return len(self.models[copy.model].line.held_by(copy.replica_id)) if copy.is_ready else 0

    def copies_of(self, name: ModelName) -> int:
        return sum(c.model == name for c in self.copies.values())

    def lacks_a_copy(self, name: ModelName) -> bool:
        """More wait than the copies on their way have room for, and another is allowed; none in
        place of its own that closes."""
        model = self.models[name]
        if any(c.model == name and c.is_closing for c in self.copies.values()):
            return False
        loading = sum(c.model == name and not c.is_ready for c in self.copies.values())
        room = loading * model.facts.max_running
        return model.waits > room and self.copies_of(name) < model.facts.max_copies

    def best_place(
        self,
        facts: ModelFacts,
        fleet: FleetSnapshot,
        eviction: EvictionPolicy,
        below: float,
        is_prefetch: bool,
    ) -> Site | None:
        """The host whose worthiest victim is worth least; then the one with the faster load."""
        hosts: dict[HostId, list[CardId]] = {}
        for card in self.cards.values():
            hosts.setdefault(card.host, []).append(card.id)
        best: tuple[tuple[float, bool, int, HostId], Site] | None = None
        for host, cards in hosts.items():
            found = self._place_on(host, cards, facts, fleet, eviction, below, is_prefetch)
            if found is not None:
                worst, place = found
                is_cold = facts.name not in self.in_memory.get(host, ())
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
        eviction: EvictionPolicy,
        below: float,
        is_prefetch: bool,
    ) -> tuple[float, Site] | None:
        """Empty cards first, then those of the copies least worth keeping."""
        free = sorted(c for c in cards if c not in self.on_card)
        victims: list[tuple[float, Copy, str]] = []
        if len(free) < facts.cards:
            for worth, copy, why in self.candidates(host, fleet, eviction):
                if worth >= below or (is_prefetch and not copy.is_ready):
                    continue
                if not self.may_go(copy, [v for _, v, _ in victims]):
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
        place = Site(
            host,
            tuple((taken + free)[: facts.cards]),
            tuple(copy for _, copy, _ in victims),
            tuple(why for _, _, why in victims),
        )
        return (victims[-1][0] if victims else -inf), place

    def candidates(
        self, host: HostId, fleet: FleetSnapshot, eviction: EvictionPolicy
    ) -> list[tuple[float, Copy, str]]:
        candidates = []
        for copy in self.copies.values():
            if copy.host == host and self.may_go(copy):
                keep = eviction.keep(copy.model, fleet)
                candidates.append((keep.worth, copy, keep.reason))
        candidates.sort(key=lambda x: (x[0], x[1].id))
        return candidates

    def may_go(self, copy: Copy, gone: Sequence[Copy] = ()) -> bool:
        """Not busy, and not needed; a load that someone waits for is busy."""
        is_busy = self.held(copy) or not (copy.is_ready or copy.is_prefetch)
        return not is_busy and self.may_leave(copy, gone)

    def may_leave(self, copy: Copy, gone: Sequence[Copy] = ()) -> bool:
        """Not pinned, and not one of the last copies."""
        model = self.models[copy.model]
        if model.pinned:
            return False
        left = sum(
            c.model == copy.model and c.is_ready and c is not copy and c not in gone
            for c in self.copies.values()
        )
        return left >= model.facts.min_copies

    def can_make_room(self) -> bool:
        """Cheap: most events of a busy fleet free nothing, and need no snapshot."""
        return len(self.on_card) < len(self.cards) or any(
            self.may_go(c) for c in self.copies.values()
        )

    def place(self, copy: Copy) -> None:
        for card in copy.cards:
            assert card not in self.on_card, f"{card} holds {self.on_card[card]}"
            self.on_card[card] = copy.id
        self.copies[copy.id] = copy

    def forget(self, name: ModelName) -> None:
        for names in self.in_memory.values():
            names.discard(name)

    def remember(self, host: HostId, model: ModelName, now_s: float) -> None:
        """Keep the weights in the host's memory, if nothing worthier needs the room."""
        self.in_memory.setdefault(host, set()).add(model)
        self.trim(host, now_s)

    def trim(self, host: HostId, now_s: float) -> None:
        room_bytes = self.memory_bytes.get(host, 0)
        names = self.in_memory.get(host, set())

        def saved_per_byte(name: ModelName) -> tuple[float, ModelName]:
            facts = self.models[name].facts
            saved_s = self._rates.rate(now_s, name)[0] * (facts.load_s - facts.reload_s)
            return saved_s / max(1, facts.weights_bytes), name

        for name in sorted(names, key=saved_per_byte):
            if sum(self.models[m].facts.weights_bytes for m in names) <= room_bytes:
                return
            names.remove(name)

    def model(self, name: ModelName) -> HostedState:
        if name not in self.models:
            raise UnknownNameError("model", name, tuple(self.models))
        return self.models[name]


def wanted_of(served: Served, invocation: Invocation) -> Wanted:
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


def _freed(free: Sequence[CardId], victims: Sequence[tuple[float, Copy, str]]) -> int:
    return len(free) + sum(len(copy.cards) for _, copy, _ in victims)
