"""State of a shared pool's accelerators: which copy is where, and the memory of hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf

from cato.core.arrival_rates import ArrivalRates
from cato.core.errors import UnknownNameError
from cato.core.events import Event, ReplicaLost, ReplicaReported, TurnsEnded
from cato.core.eviction import (
    Card,
    CardId,
    CardPolicies,
    CopyId,
    EvictionPolicy,
    Fit,
    FleetSnapshot,
    ModelState,
    Site,
    SiteRank,
    in_units,
)
from cato.core.ids import DeploymentName, HostId, InvocationId, ModelName
from cato.core.pool.failing_cards import FailingCards
from cato.core.pool.hosted import BY_ARRIVAL, STEADY_AFTER_S, Copy, HostedState
from cato.core.pool.placement_events import Served


@dataclass(frozen=True, slots=True)
class Room:
    """Accelerators for a copy at a site, the copies to evict from them, and why this site."""

    site: Site
    cards: tuple[CardId, ...]
    victims: tuple[Copy, ...]
    reasons: tuple[str, ...]
    why_here: str = ""


class CardFleet:
    """Which model is loaded where, and which copies may be evicted. `Loading` decides."""

    def __init__(
        self, rates: ArrivalRates, unit_s: float, tell: Callable[[ModelName, Event], None]
    ) -> None:
        """`unit_s` and `tell` as for `Placement`."""
        self._rates, self._unit_s, self._tell = rates, unit_s, tell
        self.opened_at_s: float | None = None
        self.wanted: dict[ModelName, HostedState] = {}  # models that calls wait for
        self.models: dict[ModelName, HostedState] = {}
        self.cards: dict[CardId, Card] = {}
        self.lent: dict[CardId, Card] = {}
        self.memory_bytes: dict[HostId, int] = {}
        self.in_memory: dict[HostId, set[ModelName]] = {}
        self.copies: dict[CopyId, Copy] = {}
        self.on_card: dict[CardId, CopyId] = {}
        self.failing = FailingCards()

    def snapshot(self, now_s: float) -> FleetSnapshot:
        """The state that policies see."""
        positions: dict[ModelName, int] = {}
        queues = {name: model.queue() for name, model in self.wanted.items()}
        waiting = sorted((w for queue in queues.values() for w in queue), key=BY_ARRIVAL)
        for i, wanted in enumerate(waiting, start=1):
            positions.setdefault(wanted.model, i)
        copies = Counter(c.model for c in self.copies.values())
        opened_at_s = now_s if self.opened_at_s is None else self.opened_at_s
        remembered = {m for names in self.in_memory.values() for m in names}
        states: dict[ModelName, ModelState] = {}
        for name, model in self.models.items():
            last_s = opened_at_s if model.last_use_s is None else model.last_use_s
            rate_per_s, evidence = self._rates.rate(now_s, name)
            fits = {
                shape: Fit(f, f.reload_s if name in remembered else f.load_s)
                for shape, served in model.shapes.items()
                for f in (served.facts,)
            }
            fit = fits[model.served.deployment]
            states[name] = ModelState(
                facts=fit.facts,
                load_s=fit.load_s,
                idle_s=max(0.0, now_s - last_s),
                uses=model.uses,
                rate_per_s=rate_per_s,
                evidence=evidence,
                expected_tokens=model.mean_tokens,
                queue_position=positions.get(name),
                waiting=queues.get(name, ()),
                copies=copies[name],
                fits=fits,
            )
        seen = FleetSnapshot(now_s, states, Counter(c.deployment for c in self.cards.values()))
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
        return model.waits > self.loading_places(name) and (
            self.copies_of(name) < model.facts.max_copies
        )

    def loading_places(self, name: ModelName) -> int:
        """Batch slots of the model's copies that are loading."""
        shapes = self.models[name].shapes
        return sum(
            shapes[c.deployment].facts.max_running
            for c in self.copies.values()
            if c.model == name and not c.is_ready
        )

    def best_room(
        self,
        model: HostedState,
        fleet: FleetSnapshot,
        policies: CardPolicies,
        below: float,
        is_prefetch: bool,
        now_s: float,
    ) -> Room | None:
        """The best site for a load, of those where the model fits.

        Accelerators where loads failed are the last choice, and none for a prefetch.
        """
        avoided = self._avoided(model, now_s)
        cards = [c for c in self.cards.values() if c.id not in avoided]
        room = self._best_of(cards, model, fleet, policies, below, is_prefetch)
        if room is not None or not avoided or is_prefetch:
            return room
        return self._best_of(self.cards.values(), model, fleet, policies, below, is_prefetch)

    def _avoided(self, model: HostedState, now_s: float) -> frozenset[CardId]:
        """Accelerators where a load of the model would probably fail.

        A model that fails everywhere avoids none: it would only evict others.
        """
        if model.is_suspect:
            return frozenset()
        return self.failing.resting(now_s) | model.failed_on

    def _best_of(
        self,
        among: Collection[Card],
        model: HostedState,
        fleet: FleetSnapshot,
        policies: CardPolicies,
        below: float,
        is_prefetch: bool,
    ) -> Room | None:
        sites: dict[tuple[HostId, DeploymentName], list[CardId]] = {}
        for card in among:
            sites.setdefault((card.host, card.deployment), []).append(card.id)
        best: tuple[SiteRank, Room] | None = None
        for (host, deployment), cards in sites.items():
            served = model.shapes.get(deployment)
            if served is None:
                continue
            room = self._room_on(
                host, served, cards, fleet.on(deployment), policies.eviction, below, is_prefetch
            )
            if room is not None:
                rank = policies.sites.rank(served.facts.name, room.site, fleet)
                if best is None or _order(rank, room) < _order(*best):
                    best = rank, room
        return None if best is None else replace(best[1], why_here=best[0].reason)

    def _room_on(
        self,
        host: HostId,
        served: Served,
        cards: Sequence[CardId],
        fleet: FleetSnapshot,
        eviction: EvictionPolicy,
        below: float,
        is_prefetch: bool,
    ) -> Room | None:
        """Choose empty ones of `cards` first, then those of the least valuable copies."""
        facts, deployment = served.facts, served.deployment
        free = sorted(c for c in cards if c not in self.on_card)
        victims: list[tuple[float, Copy, str]] = []
        if len(free) < facts.cards:
            for worth, copy, why in self.candidates(host, deployment, fleet, eviction):
                if worth >= below or (is_prefetch and not copy.is_ready):
                    continue
                if not set(copy.cards).issubset(cards):
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
        is_cold = facts.name not in self.in_memory.get(host, ())
        worth = victims[-1][0] if victims else -inf
        return Room(
            Site(host, deployment, worth, len(victims), is_cold),
            tuple((taken + free)[: facts.cards]),
            tuple(copy for _, copy, _ in victims),
            tuple(why for _, _, why in victims),
        )

    def candidates(
        self,
        host: HostId,
        deployment: DeploymentName,
        fleet: FleetSnapshot,
        eviction: EvictionPolicy,
    ) -> list[tuple[float, Copy, str]]:
        """Copies that may be evicted there, the least valuable first; `fleet` as seen there."""
        candidates = []
        for copy in self.copies.values():
            if (copy.host, copy.deployment) == (host, deployment) and self.may_go(copy):
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

    def report(
        self, copy: Copy, now_s: float, held: tuple[InvocationId, ...] | None = None
    ) -> None:
        """Tell its line that the copy is ready; it holds what it held before, or `held`."""
        model = self.models[copy.model]
        served, line = model.shapes[copy.deployment], model.line
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
            mixes_prompts=served.mixes_prompts,
        )
        self._tell(copy.model, report)

    def remove(self, copy: Copy, now_s: float, reason: str, *, in_order: bool) -> None:
        """Take the copy off its accelerators; its leases end, and so do turns given `in_order`."""
        for card in copy.cards:
            del self.on_card[card]
        del self.copies[copy.id]
        if copy.is_ready:
            self._tell(copy.model, ReplicaLost(now_s, copy.replica_id, reason))
        if in_order and self.models[copy.model].line.in_turn:
            self._tell(copy.model, TurnsEnded(now_s))

    def note_failure(self, copy: Copy, now_s: float) -> None:
        """`copy` did not become steady: the model or one of the accelerators is the cause.

        A model that fails everywhere, or again at the same place, says nothing about them.
        """
        model = self.models[copy.model]
        if not model.is_suspect:
            self.failing.failed([c for c in copy.cards if c not in model.failed_on], now_s)
        model.failed_on.update(copy.cards)

    def note_answer(self, name: ModelName, id: InvocationId) -> None:
        """A copy of the model, which still holds the invocation, has answered it."""
        line = self.models[name].line
        for copy in self.copies.values():
            is_new = copy.model == name and copy.is_ready and not copy.is_steady
            if is_new and id in line.held_by(copy.replica_id):
                self._note_steady(copy)

    def note_time(self, now_s: float) -> None:
        """Note which copies have been ready for long enough."""
        for copy in self.copies.values():
            if copy.is_ready and now_s - copy.ready_at_s >= STEADY_AFTER_S:
                self._note_steady(copy)

    def _note_steady(self, copy: Copy) -> None:
        """`copy` can serve: neither its model nor its accelerators are broken.

        Only once for each copy: else one that serves would hide that another one dies again and
        again.
        """
        if copy.is_steady:
            return
        copy.is_steady = True
        model = self.models[copy.model]
        model.failures = 0
        model.failed_on.clear()
        self.failing.cleared(copy.cards)

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


def _order(rank: SiteRank, room: Room) -> tuple[tuple[float, ...], HostId, DeploymentName]:
    return rank.key, room.site.host, room.site.deployment


def _freed(free: Sequence[CardId], victims: Sequence[tuple[float, Copy, str]]) -> int:
    return len(free) + sum(len(copy.cards) for _, copy, _ in victims)
