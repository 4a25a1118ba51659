"""Placement for shared pools: which model is loaded on which accelerators.

The lines know what is queued and running: each model has its own pool state
(`cato.core.orchestrator`), whose replicas are the model's loaded copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import assert_never

from cato.core.arrival_rates import ArrivalRates, UsualArrivals
from cato.core.errors import InputError
from cato.core.events import Event, InvocationWithdrawn
from cato.core.eviction import Card, CardId, CardPolicies, ModelFacts
from cato.core.ids import DeploymentName, HostId, InvocationId, ModelName
from cato.core.orchestrator import PoolOrchestrator
from cato.core.pool.card_fleet import CardFleet
from cato.core.pool.hosted import Copy, HostedState
from cato.core.pool.loading import Loading
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
# After this many failures in a row the model's waiting calls are given up: 1 + 2 + 4 s passed.
LOAD_TRIES = 4
MOST_DOUBLINGS = 10  # more than enough for the longest wait; 2.0**1024 overflows


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
        policies: CardPolicies,
        tell: Callable[[ModelName, Event], None],
        unit_s: float = 1.0,
        life: str = "",
        settle_s: float = 0.0,
    ) -> None:
        self._tell = tell
        self._settle_s = settle_s
        self._rates = ArrivalRates(unit_s)
        self._fleet = CardFleet(self._rates, unit_s, tell)
        self._loading = Loading(self._fleet, policies, tell, unit_s, life)
        self._first_card_at_s: float | None = None

    @property
    def in_order(self) -> bool:
        return self._loading.policies.order.in_order

    def open(self, now_s: float) -> None:
        """Set the start time, that of the first event."""
        if self._fleet.opened_at_s is None:
            self._fleet.opened_at_s = now_s
            self._rates.open(now_s)

    def handle(self, event: PlacementEvent) -> tuple[GiveUp, ...]:
        """Raise `UnknownNameError` for an unknown model.

        Raise `InputError` if a model to be removed is in use.
        """
        self._fleet.note_time(event.now_s)
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
                    self._fleet.report(copy, event.now_s, event.held)
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
                self._loading.policies = event.policies
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
        if not self.in_order:
            self._fleet.models[model].use(now_s)
        is_hit = id not in self._loading.missed
        self._loading.missed.discard(id)
        return is_hit

    def answered(self, model: ModelName, id: InvocationId) -> None:
        """A copy has answered the call; its line does not know of that yet."""
        self._fleet.note_answer(model, id)

    def see_queue(self, name: ModelName) -> None:
        """The model's line has handled an event: update whether calls wait there."""
        model = self._fleet.models[name]
        if model.line.unplaced:
            self._fleet.wanted[name] = model
        else:
            self._fleet.wanted.pop(name, None)

    def forget(self, id: InvocationId) -> None:
        """The call no longer waits."""
        self._loading.missed.discard(id)

    def decide(self, now_s: float, order: Callable[[Load], None]) -> None:
        """Something has changed: give turns to calls and order loads."""
        self._fleet.note_time(now_s)
        self._loading.decide(now_s, order, may_load=self._is_settled(now_s))

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

    def easiest_card(self, now_s: float, deployment: DeploymentName) -> CardId | None:
        """The accelerator of `deployment` that can be lent (`CardLent`) with the least harm.

        An empty one, best one where no load has failed, else that of the least valuable idle copy.
        None while all are busy or a model that fits there needs another copy.
        """
        for name, model in self._fleet.models.items():
            if deployment not in model.shapes:
                continue
            if model.waits and self._fleet.lacks_a_copy(name):
                return None
            if self._fleet.copies_of(name) < model.facts.min_copies:
                return None
        cards = [c for c in self._fleet.cards.values() if c.deployment == deployment]
        failing = self.failing()
        empty = [c.id for c in cards if c.id not in self._fleet.on_card]
        if empty:
            return min(empty, key=lambda card: (card in failing, card))
        fleet = self._fleet.snapshot(now_s).on(deployment)
        eviction = self._loading.policies.eviction
        candidates = [
            x
            for host in sorted({c.host for c in cards})
            for x in self._fleet.candidates(host, deployment, fleet, eviction)
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

    def failing(self) -> frozenset[CardId]:
        """Accelerators where the latest load failed, or its copy died before it was steady."""
        return frozenset(self._fleet.failing)

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

    def check_invariants(self) -> None:
        """Assert that failures are noted of known accelerators without a steady copy; for tests."""
        failing = self.failing()
        assert failing <= self._fleet.cards.keys() | self._fleet.lent.keys(), sorted(failing)
        working = {card for c in self._fleet.copies.values() if c.is_steady for card in c.cards}
        assert not failing & working, sorted(failing & working)

    # Events

    def _loaded(self, event: LoadFinished) -> None:
        copy = self._fleet.copies.get(event.copy_id)
        if copy is None or copy.is_ready:
            return
        copy.is_ready, copy.ready_at_s = True, event.now_s
        copy.is_prefetch = False
        self._fleet.remember(copy.host, copy.model, event.now_s)
        self._fleet.report(copy, event.now_s)

    def _failed(self, event: LoadFailed) -> tuple[GiveUp, ...]:
        """Handle a failed load, or the death of a copy.

        Weights in host memory that do not load are read from storage at once. If loading from
        storage fails too, the wait grows with each try, and in the end the model's queue is given
        up, unless another copy of the model serves it or is loading. The next try is on other
        accelerators if there are any. A copy that dies before it is steady counts as a failed load.
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
        if copy.is_steady:
            model.failures = 0
        else:
            self._fleet.note_failure(copy, event.now_s)
        model.failures += 1
        doubled = min(model.failures - 1, MOST_DOUBLINGS)
        delay_s = min(MAX_LOAD_RETRY_S, LOAD_RETRY_S * 2.0**doubled)
        model.retry_at_s = event.now_s + delay_s
        if model.failures < LOAD_TRIES or self._fleet.copies_of(copy.model):
            return ()
        problem = (
            f"{copy.model} did not load, or died at once, in {model.failures} tries: "
            f"{event.problem}"
        )
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
        self._fleet.failing.cleared([card_id])
        for model in self._fleet.models.values():
            model.failed_on.discard(card_id)
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

    def serve(self, served: tuple[Served, ...], line: PoolOrchestrator, now_s: float) -> None:
        """Add a model, whose calls wait in `line`, or update a known one with these facts.

        `served`: for each shape where it fits. Raise `InputError` when facts are impossible, or
        while calls run on a shape where it no longer fits.
        """
        name = served[0].facts.name
        for one in served:
            _check(one.facts)
        shapes = {one.deployment: one for one in served}
        if name in self._fleet.models:
            known = self._fleet.models[name]
            self._leave_shapes(name, known.shapes.keys() - shapes.keys(), now_s)
            known.serve(shapes)
            self._fleet.forget(name)  # its weights may have changed
            return
        self._fleet.models[name] = HostedState(shapes, line)
        self._fleet.models = dict(sorted(self._fleet.models.items()))

    def _leave_shapes(
        self, name: ModelName, shapes: Collection[DeploymentName], now_s: float
    ) -> None:
        there = [
            c for c in self._fleet.copies.values() if c.model == name and c.deployment in shapes
        ]
        if any(self._fleet.held(copy) for copy in there):
            raise InputError(f"calls of {name!r} run where it no longer fits; try again later")
        for copy in there:
            self._remove(copy, now_s, "it no longer fits there")

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
        model = self._fleet.model(event.model)
        if event.host is not None:
            for card in event.cards:
                self._fleet.lent.pop(card, None)
                assert event.deployment is not None, "a host comes with its deployment"
                found = Card(card, event.host, event.deployment)
                self._fleet.cards.setdefault(card, found)
        known = [self._fleet.cards[c] for c in event.cards if c in self._fleet.cards]
        sites = {(card.host, card.deployment) for card in known}
        is_whole = all(c in self._fleet.cards and c not in self._fleet.on_card for c in event.cards)
        if event.copy_id in self._fleet.copies or not is_whole or len(sites) != 1:
            return  # a late report: loads ordered since then take precedence
        host, deployment = sites.pop()
        if deployment not in model.shapes:
            return
        copy = Copy(event.copy_id, event.model, host, deployment, event.cards, is_ready=True)
        copy.ready_at_s = event.now_s
        self._fleet.place(copy)
        self._fleet.remember(copy.host, copy.model, event.now_s)
        self._fleet.report(copy, event.now_s, event.held)

    def _remove(self, copy: Copy, now_s: float, reason: str) -> None:
        self._fleet.remove(copy, now_s, reason, in_order=self.in_order)


def _check(facts: ModelFacts) -> None:
    if facts.cards < 1 or facts.max_running < 1:
        raise InputError(f"model {facts.name!r} needs cards and max_running of at least 1")
    if facts.min_copies > facts.max_copies:
        raise InputError(f"model {facts.name!r}: raise max_copies to min_copies or more")
