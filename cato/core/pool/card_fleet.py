"""State of a shared pool's accelerators: loaded copies of models, and the memory of hosts."""

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
    """A model on its accelerators, loaded or loading."""

    id: CopyId
    model: ModelName
    host: HostId
    cards: tuple[CardId, ...]
    is_ready: bool
    is_prefetch: bool = False
    from_host_memory: bool = False
    ready_at_s: float = -inf
    # Accepts no new calls, so that it empties and a long-waiting model can take its place.
    is_closing: bool = False

    @property
    def replica_id(self) -> ReplicaId:
        """Its replica id in the model's line."""
        return ReplicaId(self.cards[0])


@dataclass(slots=True)
class HostedState:
    """A model of the pool: how it is served, its line, and what was learned about it."""

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
        """Number of calls waiting for a copy."""
        return len(self.line.unplaced)

    def queue(self) -> tuple[Wanted, ...]:
        """Waiting calls by arrival."""
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
    """Where a copy could go: accelerators of one host, and the copies to evict from them."""

    host: HostId
    cards: tuple[CardId, ...]
    victims: tuple[Copy, ...]
    reasons: tuple[str, ...]


class CardFleet:
    """Which model is loaded where, and which copies may be evicted. `Placement` decides."""

    def __init__(self, rates: ArrivalRates, unit_s: float) -> None:
        """`unit_s` as for `Placement`."""
        self._rates, self._unit_s = rates, unit_s
        self.opened_at_s: float | None = None
        self.wanted: dict[ModelName, HostedState] = {}  # models that calls wait for
        self.models: dict[ModelName, HostedState] = {}
        self.cards: dict[CardId, Card] = {}
        self.lent: dict[CardId, Card] = {}
        self.memory_bytes: dict[HostId, int] = {}
        self.in_memory: dict[HostId, set[ModelName]] = {}
        self.copies: dict[CopyId, Copy] = {}
        self.on_card: dict[CardId, CopyId] = {}

    def snapshot(self, now_s: float) -> FleetSnapshot:
        """The state that policies see."""
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
        """Number of invocations that run there."""
        return len(self.models[copy.model].line.held_by(copy.replica_id)) if copy.is_ready else 0

    def copies_of(self, name: ModelName) -> int:
        return sum(c.model == name for c in self.copies.values())

    def lacks_a_copy(self, name: ModelName) -> bool:
        """Whether another copy is needed and allowed.

        More calls wait than loading copies have room for, and no copy of the model is closing.
        """
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
        """The best host for a load.

        The most valuable victim decides (least is best), then the load time.
        """
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
        """Choose empty accelerators first, then those of the least valuable copies."""
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
            for victim in reversed(victims[:-1]):  # a small one chosen early may not be needed
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
        """Whether it is neither busy nor needed; a load that calls wait for counts as busy."""
        is_busy = self.held(copy) or not (copy.is_ready or copy.is_prefetch)
        return not is_busy and self.may_leave(copy, gone)

    def may_leave(self, copy: Copy, gone: Sequence[Copy] = ()) -> bool:
        """Not pinned, and not one of the last `min_copies`."""
        model = self.models[copy.model]
        if model.pinned:
            return False
        left = sum(
            c.model == copy.model and c.is_ready and c is not copy and c not in gone
            for c in self.copies.values()
        )
        return left >= model.facts.min_copies

    def can_make_room(self) -> bool:
        """Cheap check: most events of a busy pool free nothing and need no snapshot."""
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
        """Keep the weights in the host's memory, unless more valuable ones need the room."""
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
    """The latest first token with which the rest of the answer still meets the SLO."""
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
