"""Which models a shared pool loads, and where: the decisions of `Placement`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from math import inf

from cato.core.events import Event, TurnCame
from cato.core.eviction import CardPolicies, CopyId, FleetSnapshot
from cato.core.ids import InvocationId, ModelName
from cato.core.pool.card_fleet import CardFleet
from cato.core.pool.hosted import Copy, HostedState
from cato.core.pool.placement_events import Evicted, Load
from cato.core.snapshot import Invocation

# If a call waits for longer than this past its model's SLO because all loaded copies are busy, one
# copy accepts no new calls. It empties within one answer; under enough traffic it never would
# otherwise.
STARVED_AFTER_S = 30.0


class Loading:
    """Orders loads, and gives turns to calls where all models are served in one order.

    `missed` are waiting invocations for which a load was ordered: each counts as a miss.
    `policies` may be replaced at any time.
    """

    def __init__(
        self,
        fleet: CardFleet,
        policies: CardPolicies,
        tell: Callable[[ModelName, Event], None],
        unit_s: float,
        life: str,
    ) -> None:
        """Arguments as for `Placement`."""
        self._fleet, self._tell, self._unit_s = fleet, tell, unit_s
        self._life = f"{life}-" if life else ""
        self.policies = policies
        self.missed: set[InvocationId] = set()
        self._loads = 0

    def decide(self, now_s: float, order: Callable[[Load], None], *, may_load: bool) -> None:
        """Something has changed: give turns to calls and order loads."""
        starved = self._starved(now_s)
        opened = [
            copy
            for copy in self._fleet.copies.values()
            if copy.is_closing and not (starved and self._fleet.may_leave(copy))
        ]
        for copy in opened:
            copy.is_closing = False
            self._fleet.report(copy, now_s)
        if not may_load:
            return
        for load in self._fill_minimum(now_s):
            order(load)
        if self.policies.order.in_order:
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
                self.missed.add(head.id)
                for copy in loading:
                    copy.is_prefetch = False
            model.use(now_s)
            self._tell(name, TurnCame(now_s, head.id))

    def _head(self, now_s: float) -> tuple[ModelName, Invocation] | None:
        """The oldest call whose turn has not come.

        A model that cannot be loaded now does not block the others: its load just failed, or there
        is no accelerator where it fits.
        """
        heads = [
            (first.arrived_at_s, first.id, name, first)
            for name, model in self._fleet.wanted.items()
            if (first := model.line.first_parked) is not None
            and (self._fleet.copies_of(name) or self._may_load(model, now_s))
        ]
        return min(heads)[2:] if heads else None

    def _may_load(self, model: HostedState, now_s: float) -> bool:
        cards = self._fleet.cards.values()
        return now_s >= model.retry_at_s and any(c.deployment in model.shapes for c in cards)

    def _ready_room(self, model: HostedState) -> int:
        """Free batch slots of ready copies, less the turns already given for them."""
        return model.line.room - model.line.in_turn

    def _room(self, model: HostedState) -> bool:
        return self._ready_room(model) + self._fleet.loading_places(model.facts.name) > 0

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
        for want in sorted(self.policies.order.wants(fleet), key=lambda w: w.model not in starved):
            if not self._fleet.lacks_a_copy(want.model):
                continue
            load = self._load(want.model, want.reason, fleet, now_s)
            if load is not None:
                loads.append(load)
                self._blame(self._fleet.models[want.model])
            elif want.model in starved:
                self._close_one(self._fleet.models[want.model], fleet, now_s)
        return loads

    def _starved(self, now_s: float) -> set[ModelName]:
        """Unloaded models whose calls have waited for too long.

        None if all models are served in order: that starves nobody.
        """
        found: set[ModelName] = set()
        if self.policies.order.in_order:
            return found
        loaded = {c.model for c in self._fleet.copies.values()}
        for name, model in self._fleet.wanted.items():
            if name not in loaded and now_s >= model.retry_at_s:
                first = next(iter(model.line.unplaced.values()))
                waited_s = now_s - first.invocation.arrived_at_s
                if waited_s > model.facts.slo_s + STARVED_AFTER_S * self._unit_s:
                    found.add(name)
        return found

    def _close_one(self, model: HostedState, fleet: FleetSnapshot, now_s: float) -> None:
        """Close the least valuable busy copy to new calls, to make room for `model`.

        Only one at a time, all of its room at one site where the model fits, and only a copy that
        has served for at least as long as another call may have to wait.
        """
        closing = [c for c in self._fleet.copies.values() if c.is_closing]
        if any(self._fleet.held(c) for c in closing):
            return
        cards_at = Counter((c.host, c.deployment) for c in self._fleet.cards.values())
        sites = {(c.host, c.deployment) for c in closing} or {
            (host, shape)
            for (host, shape), n in cards_at.items()
            if shape in model.shapes and n >= model.shapes[shape].facts.cards
        }
        keep = self.policies.eviction.keep
        busy = [
            (keep(copy.model, fleet.on(copy.deployment)).worth, copy.id, copy)
            for copy in self._fleet.copies.values()
            if copy.is_ready and self._fleet.held(copy)
            if (copy.host, copy.deployment) in sites and self._fleet.may_leave(copy)
            if now_s - copy.ready_at_s >= self._tenure_s(copy)
        ]
        if busy:
            closed = min(busy)[2]
            closed.is_closing = True
            self._fleet.report(closed, now_s)

    def _tenure_s(self, copy: Copy) -> float:
        load_s = self._fleet.models[copy.model].shapes[copy.deployment].facts.load_s
        return max(STARVED_AFTER_S * self._unit_s, load_s)

    def _blame(self, model: HostedState) -> None:
        """Count a miss for the first queued call for which no load was ordered yet."""
        cause = next((w.id for w in model.queue() if w.id not in self.missed), None)
        if cause is not None:
            self.missed.add(cause)

    def _prefetch(self, now_s: float) -> Load | None:
        """Load one model ahead of demand.

        Only one at a time, and only while no call waits, so that it delays none.
        """
        if self._fleet.wanted or any(c.is_prefetch for c in self._fleet.copies.values()):
            return None
        if not self._fleet.can_make_room():
            return None
        fleet = self._fleet.snapshot(now_s)
        prefetch = self.policies.eviction.prefetch(fleet)
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
        room = self._fleet.best_room(model, fleet, self.policies, bound, is_prefetch, now_s)
        if room is None:
            return None
        in_order = self.policies.order.in_order
        for victim in room.victims:
            assert not self._fleet.held(victim), f"{victim.id} is busy and must not be evicted"
            self._fleet.remove(victim, now_s, f"{name} takes its place", in_order=in_order)
        self._loads += 1
        while (id := CopyId(f"copy-{self._life}{self._loads}")) in self._fleet.copies:
            self._loads += 1
        site = room.site
        copy = Copy(id, name, site.host, site.deployment, room.cards, False, is_prefetch)
        copy.from_host_memory = not site.is_cold
        self._fleet.place(copy)
        facts = model.shapes[site.deployment].facts
        reason += f"; {room.why_here}" if room.why_here else ""
        for victim, why in zip(room.victims, room.reasons, strict=True):
            reason += f"; evicts {victim.model} ({why})"
        return Load(
            copy_id=copy.id,
            model=name,
            host=site.host,
            deployment=site.deployment,
            cards=room.cards,
            evicted=tuple(Evicted(v.id, v.model) for v in room.victims),
            from_host_memory=copy.from_host_memory,
            is_prefetch=is_prefetch,
            expected_s=facts.load_s if site.is_cold else facts.reload_s,
            reason=reason,
        )
