"""Placement for shared pools: which model is loaded on which accelerators.

The lines know what is queued and running: each model has its own pool state
(`cato.core.orchestrator`), whose replicas are the model's loaded copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import assert_never

from cato.core.arrival_rates import ArrivalRates, UsualArrivals
from cato.core.errors import InputError
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
    ModelFacts,
)
from cato.core.ids import HostId, InvocationId, ModelName
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.card_fleet import CardFleet, Copy, HostedState
from cato.core.pool.placement_events import (
    ArrivalsRemembered,
    CardAdded,
    CardLent,
    CardLost,
    CardPoliciesChanged,
    ClockTold,
    CopyFound,
    CopyPicture,
    CopyReported,
    Evicted,
    GiveUp,
    HostMemoryHeld,
    HostMemorySized,
    Load,
    LoadFailed,
    LoadFinished,
    ModelPinned,
    ModelRemoved,
    PlacementEvent,
    Served,
)
from cato.core.snapshot import Invocation

# Wait before a failed load is retried: the cause rarely goes away in a second. Each further failure
# in a row doubles the wait, up to the second value.
LOAD_RETRY_S = 1.0
MAX_LOAD_RETRY_S = 60.0
# If a call waits for longer than this past its model's SLO because all loaded copies are busy, one
# copy accepts no new calls. It empties within one answer; under enough traffic it never would
# otherwise.
STARVED_AFTER_S = 30.0
# After this many failures in a row the model's waiting calls are given up: 1 + 2 + 4 s passed.
LOAD_TRIES = 4


class Placement:
    """The copies of models on a pool's accelerators, and the weights in its hosts' memory.

    Whatever the policies say: an accelerator holds one model; a copy that is busy, pinned, or one
    of the last `min_copies` is not evicted. The driver provides the time.

    Loaded weights stay in the host's memory. When room is short, the weights with the least value
    per byte go first: arrival rate times the seconds that memory saves in a load.
    Least-recently-loaded would let every rare large model push out a frequent one.

    `unit_s`: the driver's seconds per second of the policies. It differs from 1 where an experiment
    scales all its times, because constants of policies are in seconds.

    `life` names the incarnation and is part of the ids of copies, so that a successor does not
    reuse them. No load is ordered within `settle_s` of the first accelerator: loaded copies may not
    have reported yet.

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
        # Waiting invocations for which a load was ordered: each counts as a miss.
        self._missed: set[InvocationId] = set()
        self._rates = ArrivalRates(unit_s)
        self._fleet = CardFleet(self._rates, unit_s)
        self._first_card_at_s: float | None = None
        self._loads = 0

    @property
    def in_order(self) -> bool:
        return self._order.in_order

    def open(self, now_s: float) -> None:
        """Set the start time, that of the first event."""
        if self._fleet.opened_at_s is None:
            self._fleet.opened_at_s = now_s
            self._rates.open(now_s)

    def handle(self, event: PlacementEvent) -> tuple[GiveUp, ...]:
        """Raise `UnknownNameError` for an unknown model.

        Raise `InputError` if a model to be removed is in use.
        """
        match event:
            case LoadFinished():
                self._loaded(event)
            case LoadFailed():
                return self._failed(event)
            case CopyFound():
                self._note_card(event.now_s)
                self._adopt(event)
            case CopyReported():
                copy = self._fleet.copies.get(event.copy_id)
                if copy is not None and copy.is_ready:
                    self._report(copy, event.now_s, event.held)
            case ClockTold():
                self._rates.tell_clock(event.now_s, event.local_s)
            case ArrivalsRemembered():
                self._rates.remember(event.slices)
            case CardAdded():
                self._note_card(event.now_s)
                self._fleet.lent.pop(event.card.id, None)
                self._fleet.cards.setdefault(event.card.id, event.card)
            case CardLost():
                self._lose(event)
            case CardLent():
                self._lend(event.card_id, event.now_s)
            case ModelPinned():
                self._fleet.model(event.model).pinned = event.pinned
            case ModelRemoved():
                self._remove_model(event.model, event.now_s)
            case HostMemorySized():
                self._fleet.memory_bytes[event.memory.id] = event.memory.weights_bytes
                self._fleet.trim(event.memory.id, event.now_s)
            case HostMemoryHeld():
                self._fleet.in_memory.get(event.host, set()).intersection_update(event.models)
            case CardPoliciesChanged():
                self._eviction, self._order = event.eviction, event.order
            case _:
                assert_never(event)
        return ()

    def arrived(self, model: ModelName, invocation: Invocation, now_s: float) -> None:
        """A new call asks for its model."""
        asked = self._fleet.model(model)
        self._rates.note(now_s, model, invocation.user)
        asked.arrivals += 1
        asked.mean_tokens += (invocation.expected_tokens - asked.mean_tokens) / asked.arrivals

    def started(self, model: ModelName, id: InvocationId, now_s: float) -> bool:
        """A copy started the call; counts a hit if its model was loaded when its turn came."""
        if not self._order.in_order:
            self._use(self._fleet.models[model], now_s)
        is_hit = id not in self._missed
        self._missed.discard(id)
        return is_hit

    def see_queue(self, name: ModelName) -> None:
        """The model's line has handled an event: update whether calls wait there."""
        model = self._fleet.models[name]
        if model.line.unplaced:
            self._fleet.wanted[name] = model
        else:
            self._fleet.wanted.pop(name, None)

    def forget(self, id: InvocationId) -> None:
        """The call no longer waits."""
        self._missed.discard(id)

    def _use(self, model: HostedState, now_s: float) -> None:
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
                self._fleet.models[c.model].line.held_by(c.replica_id) if c.is_ready else (),
            )
            for c in self._fleet.copies.values()
        )

    def cards(self) -> Mapping[CardId, CopyPicture | None]:
        """The copy on each accelerator, loaded or loading."""
        pictures = {c.id: c for c in self.copies()}
        return {
            card: pictures[self._fleet.on_card[card]] if card in self._fleet.on_card else None
            for card in self._fleet.cards
        }

    def easiest_card(self, now_s: float) -> CardId | None:
        """The accelerator that can be lent (`CardLent`) with the least harm.

        An empty one, else that of the least valuable idle copy. None while all are busy or a model
        needs another copy.
        """
        for name, model in self._fleet.models.items():
            if model.waits and self._fleet.lacks_a_copy(name):
                return None
            if self._fleet.copies_of(name) < model.facts.min_copies:
                return None
        for card in sorted(self._fleet.cards):
            if card not in self._fleet.on_card:
                return card
        fleet = self._fleet.snapshot(now_s)
        hosts = sorted({c.host for c in self._fleet.cards.values()})
        candidates = [
            x for host in hosts for x in self._fleet.candidates(host, fleet, self._eviction)
        ]
        if not candidates:
            return None
        _, copy, _ = min(candidates, key=lambda x: (x[0], x[1].id))
        return copy.cards[0]

    def models(self) -> tuple[ModelFacts, ...]:
        return tuple(m.facts for m in self._fleet.models.values())

    def in_host_memory(self) -> dict[HostId, tuple[ModelName, ...]]:
        """Models whose weights are in each host's memory."""
        in_memory = self._fleet.in_memory.items()
        return {host: tuple(sorted(names)) for host, names in in_memory if names}

    def waiting_by_model(self) -> dict[ModelName, int]:
        """Number of waiting calls, for each model that has some."""
        return {name: m.waits for name, m in sorted(self._fleet.wanted.items())}

    def uses(self, name: ModelName) -> int:
        """Number of calls waiting for the model or running on it; raise `UnknownNameError`."""
        model = self._fleet.model(name)
        copies = [c for c in self._fleet.copies.values() if c.model == name and c.is_ready]
        return model.line.queued + sum(len(model.line.held_by(c.replica_id)) for c in copies)

    def learnt_arrivals(self) -> tuple[UsualArrivals, ...]:
        """Changes to the learned daily arrival pattern since the last call."""
        return self._rates.learnt()

    # Events

    def _loaded(self, event: LoadFinished) -> None:
        copy = self._fleet.copies.get(event.copy_id)
        if copy is None or copy.is_ready:
            return
        copy.is_ready, copy.ready_at_s = True, event.now_s
        copy.is_prefetch = False
        self._fleet.models[copy.model].failures = 0
        self._fleet.remember(copy.host, copy.model, event.now_s)
        self._report(copy, event.now_s)

    def _report(
        self, copy: Copy, now_s: float, held: tuple[InvocationId, ...] | None = None
    ) -> None:
        """Tell its line that the copy is ready; it holds what it held before, or `held`."""
        served, line = self._fleet.models[copy.model].served, self._fleet.models[copy.model].line
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

    def _failed(self, event: LoadFailed) -> tuple[GiveUp, ...]:
        """Handle a failed load.

        Weights in host memory that do not load are read from storage at once. If loading from
        storage fails too, the wait grows with each try, and in the end the model's queue is given
        up.
        """
        copy = self._fleet.copies.get(event.copy_id)
        if copy is None:
            return ()
        self._remove(copy, event.now_s, event.problem)
        in_memory = self._fleet.in_memory.get(copy.host, set())
        if copy.from_host_memory and not copy.is_ready:
            in_memory.discard(copy.model)
            return ()
        model = self._fleet.models[copy.model]
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
        """Whether every slot has had time to report what it holds."""
        first_s = now_s if self._first_card_at_s is None else self._first_card_at_s
        return max(0.0, now_s - first_s) >= self._settle_s

    def _lose(self, event: CardLost) -> None:
        card_id = event.card_id
        if card_id in self._fleet.on_card:
            copy = self._fleet.copies[self._fleet.on_card[card_id]]
            self._remove(copy, event.now_s, f"{card_id} is gone")
        card = self._fleet.cards.pop(card_id, None) or self._fleet.lent.pop(card_id, None)
        left = (*self._fleet.cards.values(), *self._fleet.lent.values())
        if card is not None and all(c.host != card.host for c in left):
            # The host may be gone: do not count on the contents of its memory.
            self._fleet.in_memory.pop(card.host, None)

    def _lend(self, card_id: CardId, now_s: float) -> None:
        if card_id in self._fleet.on_card:
            copy = self._fleet.copies[self._fleet.on_card[card_id]]
            assert not self._fleet.held(copy), f"{copy.id} is busy and must not be unloaded"
            self._remove(copy, now_s, "its card is lent")
        if card_id in self._fleet.cards:
            self._fleet.lent[card_id] = self._fleet.cards.pop(card_id)

    def serve(self, served: Served, line: PoolOrchestrator) -> None:
        """Add a model, whose calls wait in `line`, or update a known one with these facts.

        Raise `InputError` when they are impossible.
        """
        facts = served.facts
        _check(facts)
        if facts.name in self._fleet.models:
            known = self._fleet.models[facts.name]
            known.served, known.facts = served, facts
            self._fleet.forget(facts.name)  # its weights may have changed
            return
        self._fleet.models[facts.name] = HostedState(served, facts, line)
        self._fleet.models = dict(sorted(self._fleet.models.items()))

    def _remove_model(self, name: ModelName, now_s: float) -> None:
        used = self.uses(name)
        if used:
            raise InputError(f"{used} invocations wait for {name!r} or run there; try again later")
        for copy in [c for c in self._fleet.copies.values() if c.model == name]:
            self._remove(copy, now_s, "its model is removed")
        self._fleet.forget(name)
        self._fleet.wanted.pop(name, None)
        del self._fleet.models[name]

    def _adopt(self, event: CopyFound) -> None:
        self._fleet.model(event.model)
        if event.host is not None:
            for card in event.cards:
                self._fleet.lent.pop(card, None)
                self._fleet.cards.setdefault(card, Card(card, event.host))
        hosts = {self._fleet.cards[c].host for c in event.cards if c in self._fleet.cards}
        is_whole = all(c in self._fleet.cards and c not in self._fleet.on_card for c in event.cards)
        if event.copy_id in self._fleet.copies or not is_whole or len(hosts) != 1:
            return  # a late report: loads ordered since then take precedence
        copy = Copy(event.copy_id, event.model, hosts.pop(), event.cards, is_ready=True)
        copy.ready_at_s = event.now_s
        self._fleet.place(copy)
        self._fleet.remember(copy.host, copy.model, event.now_s)
        self._report(copy, event.now_s, event.held)

    def _remove(self, copy: Copy, now_s: float, reason: str) -> None:
        """Take the copy off its accelerators; its leases end."""
        for card in copy.cards:
            del self._fleet.on_card[card]
        del self._fleet.copies[copy.id]
        if copy.is_ready:
            self._tell(copy.model, ReplicaLost(now_s, copy.replica_id, reason))
        if self._order.in_order and self._fleet.models[copy.model].line.in_turn:
            self._tell(copy.model, TurnsEnded(now_s))

    # Decisions

    def decide(self, now_s: float, order: Callable[[Load], None]) -> None:
        """Something has changed: give turns to calls and order loads."""
        starved = self._starved(now_s)
        opened = [
            copy
            for copy in self._fleet.copies.values()
            if copy.is_closing and not (starved and self._fleet.may_leave(copy))
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
        for name, model in self._fleet.models.items():
            while 0 < model.facts.min_copies > self._fleet.copies_of(name):
                reason = f"{model.facts.min_copies} copies must be loaded"
                load = self._load(name, reason, self._fleet.snapshot(now_s), now_s)
                if load is None:
                    break
                commands.append(load)
        return commands

    def _take_turns(self, now_s: float, order: Callable[[Load], None]) -> None:
        """Give calls their turns in order of arrival.

        The first call has its turn when a copy of its model has room, even one that is loading; it
        is bound to that model's line. Calls behind it wait until then.
        """
        while (found := self._head(now_s)) is not None:
            name, head = found
            model = self._fleet.models[name]
            if not self._room(model):
                if self._fleet.copies_of(name) >= model.facts.max_copies:
                    return
                if not self._fleet.can_make_room():
                    return
                load = self._load(name, "head of the queue", self._fleet.snapshot(now_s), now_s)
                if load is None:
                    return
                order(load)
            loading = [c for c in self._fleet.copies.values() if c.model == name and not c.is_ready]
            if loading and self._ready_room(model) <= 0:
                self._missed.add(head.id)
                for copy in loading:
                    copy.is_prefetch = False
            self._use(model, now_s)
            self._tell(name, TurnCame(now_s, head.id))

    def _head(self, now_s: float) -> tuple[ModelName, Invocation] | None:
        """The oldest call whose turn has not come.

        A model whose load just failed does not block the others.
        """
        heads = [
            (first.arrived_at_s, first.id, name, first)
            for name, model in self._fleet.wanted.items()
            if (first := model.line.first_parked) is not None
            and not (now_s < model.retry_at_s and self._fleet.copies_of(name) == 0)
        ]
        return min(heads)[2:] if heads else None

    def _ready_room(self, model: HostedState) -> int:
        """Free batch slots of ready copies, less the turns already given for them."""
        return model.line.room - model.line.in_turn

    def _room(self, model: HostedState) -> bool:
        name, places = model.facts.name, model.facts.max_running
        loading = sum(c.model == name and not c.is_ready for c in self._fleet.copies.values())
        return self._ready_room(model) + loading * places > 0

    def _load_wanted(self, now_s: float, starved: Collection[ModelName]) -> list[Load]:
        for copy in self._fleet.copies.values():
            if copy.is_prefetch and copy.model in self._fleet.wanted:
                copy.is_prefetch = False  # a call waits for it now
                self._blame(self._fleet.wanted[copy.model])
        if not self._fleet.wanted or not (starved or self._fleet.can_make_room()):
            return []
        loads: list[Load] = []
        fleet = self._fleet.snapshot(now_s)
        # Do not use room that was made for another model.
        for want in sorted(self._order.wants(fleet), key=lambda w: w.model not in starved):
            if not self._fleet.lacks_a_copy(want.model):
                continue
            load = self._load(want.model, want.reason, fleet, now_s)
            if load is not None:
                loads.append(load)
                self._blame(self._fleet.models[want.model])
            elif want.model in starved:
                self._close_one(self._fleet.models[want.model].facts, fleet, now_s)
        return loads

    def _starved(self, now_s: float) -> set[ModelName]:
        """Unloaded models whose calls have waited for too long.

        None if all models are served in order: that starves nobody.
        """
        found: set[ModelName] = set()
        if self._order.in_order:
            return found
        loaded = {c.model for c in self._fleet.copies.values()}
        for name, model in self._fleet.wanted.items():
            if name not in loaded and now_s >= model.retry_at_s:
                first = next(iter(model.line.unplaced.values()))
                waited_s = now_s - first.invocation.arrived_at_s
                if waited_s > model.facts.slo_s + STARVED_AFTER_S * self._unit_s:
                    found.add(name)
        return found

    def _close_one(self, facts: ModelFacts, fleet: FleetSnapshot, now_s: float) -> None:
        """Close the least valuable busy copy to new calls, to make room.

        Only one at a time, all of its room on one host, and only a copy that has served for at
        least as long as another call may have to wait.
        """
        closing = [c for c in self._fleet.copies.values() if c.is_closing]
        if any(self._fleet.held(c) for c in closing):
            return
        cards_of = Counter(c.host for c in self._fleet.cards.values())
        hosts = {c.host for c in closing} or {h for h, n in cards_of.items() if n >= facts.cards}
        busy = [
            (self._eviction.keep(copy.model, fleet).worth, copy.id, copy)
            for copy in self._fleet.copies.values()
            if copy.is_ready and self._fleet.held(copy)
            if copy.host in hosts and self._fleet.may_leave(copy)
            if now_s - copy.ready_at_s >= self._tenure_s(copy)
        ]
        if busy:
            closed = min(busy)[2]
            closed.is_closing = True
            self._report(closed, now_s)

    def _tenure_s(self, copy: Copy) -> float:
        return max(STARVED_AFTER_S * self._unit_s, self._fleet.models[copy.model].facts.load_s)

    def _blame(self, model: HostedState) -> None:
        """Count a miss for the first queued call for which no load was ordered yet."""
        cause = next((w.id for w in model.queue() if w.id not in self._missed), None)
        if cause is not None:
            self._missed.add(cause)

    def _prefetch(self, now_s: float) -> Load | None:
        """Load one model ahead of demand.

        Only one at a time, and only while no call waits, so that it delays none.
        """
        if self._fleet.wanted or any(c.is_prefetch for c in self._fleet.copies.values()):
            return None
        if not self._fleet.can_make_room():
            return None
        fleet = self._fleet.snapshot(now_s)
        prefetch = self._eviction.prefetch(fleet)
        if prefetch is None:
            return None
        model = self._fleet.model(prefetch.model)
        if self._fleet.copies_of(prefetch.model) >= model.facts.max_copies:
            return None
        return self._load(prefetch.model, prefetch.reason, fleet, now_s, below=prefetch.above)

    def _load(
        self,
        name: ModelName,
        reason: str,
        fleet: FleetSnapshot,
        now_s: float,
        below: float | None = None,
    ) -> Load | None:
        """Order a load; None when no host can make room. `below` marks a prefetch."""
        model = self._fleet.models[name]
        if now_s < model.retry_at_s:
            return None
        is_prefetch = below is not None
        bound = inf if below is None else below
        place = self._fleet.best_place(model.facts, fleet, self._eviction, bound, is_prefetch)
        if place is None:
            return None
        for victim in place.victims:
            assert not self._fleet.held(victim), f"{victim.id} is busy and must not be evicted"
            self._remove(victim, now_s, f"{name} takes its place")
        self._loads += 1
        while (id := CopyId(f"copy-{self._life}{self._loads}")) in self._fleet.copies:
            self._loads += 1
        copy = Copy(id, name, place.host, place.cards, False, is_prefetch)
        self._fleet.place(copy)
        from_memory = name in self._fleet.in_memory.get(place.host, ())
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


def _check(facts: ModelFacts) -> None:
    if facts.cards < 1 or facts.max_running < 1:
        raise InputError(f"model {facts.name!r} needs cards and max_running of at least 1")
    if facts.min_copies > facts.max_copies:
        raise InputError(f"model {facts.name!r}: raise max_copies to min_copies or more")
