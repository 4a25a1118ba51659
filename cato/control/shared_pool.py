"""One shared pool, live: a thin driver of `SharedOrchestrator`.

Slots ask for orders and report; ingresses ask for leases. The actor that keeps this object may be
restarted: what is loaded and what runs comes back with the next reports of the slots.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from cato.control.leases import Leases
from cato.control.links import Told
from cato.control.staged import Staged
from cato.core.arrival_rates import UsualArrivals
from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.errors import (
    CapacityError,
    CatoError,
    InputError,
    NotLoadedError,
    PoolClosedError,
    ReplicaLostError,
    UnknownNameError,
)
from cato.core.events import Event
from cato.core.eviction import Card, CardId, CopyId, HostMemory, ModelFacts
from cato.core.ids import HostId, InvocationId, ModelName, ReplicaId
from cato.core.pool.placement import (
    ArrivalsRemembered,
    CardAdded,
    CardLent,
    CardLost,
    CardPoliciesChanged,
    ClockTold,
    CopyFound,
    CopyReported,
    GiveUp,
    HostMemoryHeld,
    HostMemorySized,
    Load,
    LoadFailed,
    LoadFinished,
    ModelRemoved,
    Placement,
    Served,
)
from cato.core.profile import Profile
from cato.core.residency import Resident
from cato.core.shared import Looked, ModelAdded, OfLine, SharedEvent, SharedOrchestrator
from cato.core.shared import Told as LineTold
from cato.core.slots import (
    HostedPart,
    LoadCounts,
    SharedPoolPicture,
    SlotOrder,
    SlotPicture,
    SlotReport,
    SlotState,
    StopCalls,
)
from cato.core.snapshot import Invocation
from cato.core.topology import HostedModel, SharedPoolPolicies, SharedPoolSpec, TemplateFacts
from cato.policies.eviction.registry import card_policies
from cato.policies.registry import policies_of
from cato.telemetry.decisions import LOAD, Decided, DecisionBook
from cato.telemetry.event_log import EventLog, opened_log

log = logging.getLogger("cato.shared_pool")

# A slot asks again at once when it got no order for so long; its questions are its heartbeats.
ATTEND_S = 0.5
# Ten questions long: a busy host may be late.
SILENCE_S = 5.0
FULL_RETRY_AFTER_S = 1.0
# Two loads of the largest model from slow storage take minutes; what hangs must end some time.
MEASURE_LIMIT_S = 1800.0
# New books order no load until every slot has had the time to say what it holds: some are told of
# the end of the actor that they asked a second or two later than others.
SETTLE_S = 2.0
# How long a model that is to be removed may take to end what it has, and how often that is asked.
REMOVE_WITHIN_S, REMOVE_POLL_S = 60.0, 0.1
NOTHING = CopyId("")
_MEASURE = "measure-"


@dataclass(frozen=True, slots=True)
class _Loan:
    """A slot that measures a model, and those who wait for what it finds."""

    order: SlotOrder
    found: asyncio.Future[Staged]


@dataclass(slots=True)
class _Slot:
    id: ReplicaId
    report: SlotReport
    seen_at_s: float
    must_clear: bool = False
    loan: _Loan | None = None
    stops: list[tuple[InvocationId, int]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def card(self) -> CardId:
        return CardId(self.id)


class SharedPool:
    """Leases slots to invocations, and orders what slots load. Belongs to one asyncio loop."""

    def __init__(
        self,
        spec: SharedPoolSpec,
        profiles: Mapping[ModelName, Profile],
        settle_s: float = SETTLE_S,
        log_folder: str | None = None,
    ) -> None:
        self.spec = spec
        self.profiles = dict(profiles)
        self._policies = spec.policies
        self._hosted: dict[ModelName, HostedModel] = {m.model.name: m for m in spec.models}
        self._leaving: set[ModelName] = set()  # to be removed when those who have asked are served
        self._slots: dict[ReplicaId, _Slot] = {}
        # Serve does not list these any more; they report for as long as they drain.
        self._left: set[ReplicaId] = set()
        self._leases: dict[ModelName, Leases] = {}
        self._log_folder = log_folder
        self._logs: dict[ModelName, EventLog | None] = {}
        self._orders: dict[CopyId, tuple[float, Load]] = {}
        self._counts = LoadCounts()
        self._templates: dict[ModelName, TemplateFacts] = {}
        self.decisions = DecisionBook(spec.name)
        self._core = self._new_core(settle_s=settle_s)

    def _new_core(self, unit_s: float = 1.0, settle_s: float = 0.0) -> SharedOrchestrator:
        eviction, order = card_policies(self._policies)
        life = uuid.uuid4().hex[:6]
        core = SharedOrchestrator(
            lambda tell: Placement(eviction, order, tell, unit_s, life, settle_s)
        )
        in_order = core.placement.in_order
        for name, hosted in self._hosted.items():
            core.handle(self._added(hosted, _now_s()))
            self._open_line(name, in_order=in_order)
        return core

    def _open_line(self, name: ModelName, *, in_order: bool) -> None:
        """Offers to the model are taken, and a log of its line begins."""
        self._leases.setdefault(name, self._leases_of(name))
        if (former := self._logs.get(name)) is not None:
            former.close()
        names = replace(self._policies.of_models, by_turns=in_order)
        part = self.spec.part_of(name)
        self._logs[name] = opened_log(self._log_folder, part, names, self.profiles[name])

    def _leases_of(self, name: ModelName) -> Leases:
        def handle(event: Event) -> None:
            self._handle(OfLine(name, event))

        return Leases(self.spec.part_of(name), handle)

    def _added(self, hosted: HostedModel, now_s: float) -> ModelAdded:
        engine, profile = self.spec.slots.engine, self.profiles[hosted.model.name]
        served = Served(
            self._facts(hosted),
            profile,
            self.spec.slots.name,
            prefix_caching=engine.prefix_caching,
            step_tokens=engine.max_num_batched_tokens or 0,
        )
        line = self.spec.part_of(hosted.model.name)
        return ModelAdded(now_s, line, served, policies_of(self._policies.of_models, profile))

    def _facts(self, hosted: HostedModel) -> ModelFacts:
        profile = self.profiles[hosted.model.name]
        load_s = profile.load_s if hosted.load_s is None else hosted.load_s
        return ModelFacts(
            name=hosted.model.name,
            load_s=load_s,
            reload_s=load_s if hosted.reload_s is None else hosted.reload_s,
            weights_bytes=hosted.weights_bytes,
            slo_s=hosted.slo_s,
            max_running=min(self.spec.slots.engine.max_num_seqs, profile.max_running),
            min_copies=hosted.min_copies,
            max_copies=hosted.max_copies,
        )

    # Models and policies

    @property
    def policies(self) -> SharedPoolPolicies:
        return self._policies

    def configure(self, policies: SharedPoolPolicies) -> None:
        """Change how the pool decides; raise `UnknownNameError` for a name that is none."""
        if policies == self._policies:
            return
        eviction, order = card_policies(policies)
        former, self._policies = self._policies.of_models, policies
        self._handle(CardPoliciesChanged(_now_s(), eviction, order))
        if policies.of_models != former:
            for hosted in self._hosted.values():
                self._handle(self._added(hosted, _now_s()))
        self._size_memories()

    def why_not_add(self, hosted: HostedModel) -> str | None:
        """Why the model cannot be added, or measured again; None when it can."""
        model = hosted.model
        if any(m.model.name == model.name for m in self.spec.models):
            return f"{model.name!r} is a model of the deployment file: change it there"
        if self.spec.slots.engine.sleep and not hosted.weights_bytes:
            return f"say the --weights of {model.name!r}: its engine may sleep in the host's memory"
        others = [h.model for n, h in self._hosted.items() if n != model.name]
        taken = {name for other in others for name in other.names}
        for name in model.names:
            if name in taken:
                return f"{name!r} is the name of another model of {self.spec.name}"
        return None

    def add_model(self, hosted: HostedModel, profile: Profile) -> None:
        """The model can be asked for from now on; a known one has these facts from now on."""
        self._hosted[hosted.model.name] = hosted
        self.profiles[hosted.model.name] = profile
        if hosted.model.name not in self._leases:
            in_order = self._core.placement.in_order
            self._open_line(hosted.model.name, in_order=in_order)
        self._handle(self._added(hosted, _now_s()))

    async def remove_model(self, name: ModelName) -> None:
        """New calls are refused at once; those that the pool has may end first, for a minute.

        Raise `UnknownNameError`, or `InputError` when the model is one of the deployment file or
        when some did not end: then it is served as before.
        """
        if any(m.model.name == name for m in self.spec.models):
            raise InputError(f"{name!r} is a model of the deployment file: remove it there")
        self._leaving.add(name)
        try:
            for _ in range(int(REMOVE_WITHIN_S / REMOVE_POLL_S)):
                if not self._core.placement.uses(name):
                    break
                await asyncio.sleep(REMOVE_POLL_S)
            self._remove_model(name)
        finally:
            self._leaving.discard(name)

    def _remove_model(self, name: ModelName) -> None:
        now_s = _now_s()
        loaded = [c.id for c in self._core.placement.copies() if c.model == name]
        self._handle(ModelRemoved(now_s, name))
        for copy_id in loaded:
            self._load_ended(copy_id, now_s)
        del self._hosted[name], self.profiles[name], self._leases[name]
        if (log_ := self._logs.pop(name)) is not None:
            log_.close()
        for slot in self._slots.values():  # one that is added again may have other weights
            if slot.report.model == name and slot.loan is None:
                slot.must_clear = True
                slot.news.set()

    def remember_arrivals(self, slices: tuple[UsualArrivals, ...]) -> None:
        """What was learnt of the times of day before this pool's books were opened."""
        self._handle(ArrivalsRemembered(_now_s(), slices))

    def learnt_arrivals(self) -> tuple[UsualArrivals, ...]:
        """What was learnt of them since the last call."""
        return self._core.placement.learnt_arrivals()

    def reset(self, unit_s: float = 1.0) -> None:
        """Begin again with empty slots and no memory of what was asked for; for measurements.

        `unit_s`: what policies take for a second, see `Placement`. Raise `InputError` while
        anything waits, runs or is measured.
        """
        known = sum(line.queued + len(line.leased) for line in self._core.lines.values())
        if known:
            raise InputError(f"{known} invocations wait or run in {self.spec.name}")
        if any(s.loan is not None for s in self._slots.values()):
            raise InputError(f"a model is measured in {self.spec.name}")
        self._core = self._new_core(unit_s)
        self._counts = LoadCounts()
        self._orders.clear()
        self._size_memories()
        for slot in self._slots.values():
            slot.must_clear = True
            slot.news.set()

    def parts(self) -> tuple[HostedPart, ...]:
        cards = self._core.placement.cards()
        # One that is lent comes back in a minute.
        slots = len(cards.keys() | {s.card for s in self._slots.values() if s.loan is not None})
        return tuple(
            HostedPart(
                name=self.spec.part_of(name),
                pool=self.spec.name,
                deployment=self.spec.slots.name,
                model=hosted.model,
                profile=self.profiles[name],
                simulated=self.spec.slots.engine.is_simulated,
                slots=slots,
                template=self._templates.get(name),
            )
            for name, hosted in sorted(self._hosted.items())
        )

    def picture(self) -> SharedPoolPicture:
        waiting = self._core.placement.waiting_by_model()
        slots = (s.report for s in self._slots.values())
        return SharedPoolPicture(
            name=self.spec.name,
            queued=sum(waiting.values()),
            waiting=tuple(sorted(waiting.items())),
            slots=tuple(
                SlotPicture(r.slot, r.host, r.state, r.model, len(r.held), r.pid) for r in slots
            ),
            in_host_memory=tuple(sorted(self._in_host_memory().items())),
            counts=self._counts,
        )

    def _in_host_memory(self) -> dict[HostId, tuple[ModelName, ...]]:
        hosts = {self._place_of(s): s.report.host for s in self._slots.values()}
        found: dict[HostId, set[ModelName]] = {}
        for place, models in self._core.placement.in_host_memory().items():
            found.setdefault(hosts.get(place, place), set()).update(models)
        return {host: tuple(sorted(models)) for host, models in found.items()}

    def residents(self) -> tuple[Resident, ...]:
        """What the slots hold, as they last said."""
        spec, reports = self.spec.slots, (s.report for s in self._slots.values())
        return tuple(
            Resident(
                replica_id=r.slot,
                pool=self.spec.name,
                deployment=spec.name,
                model=r.model,
                host=r.host,
                accelerator=spec.accelerator,
                cards=spec.cards,
                state=r.state.value,
                load_s=r.load_s,
                pid=r.pid,
            )
            for r in reports
            if r.model is not None and r.state is not SlotState.EMPTY
        )

    # Ingresses

    async def offer(self, model: ModelName, invocation: Invocation) -> Dispatch:
        """Wait for a slot that holds `model`; raise as `Leases.offer`, and `NotLoadedError` when it
        does not load, `UnknownNameError` when the pool does not host it, and `PoolClosedError` when
        other books take the place of these meanwhile.
        """
        known = self._core.lines[model].invocation(invocation.id) if model in self._hosted else None
        is_new = known is None and invocation.attempt == 1 and not invocation.was_taken
        if model not in self._hosted or (is_new and model in self._leaving):
            served = sorted(self._hosted.keys() - self._leaving)
            raise UnknownNameError("model", model, tuple(served))
        return await self._leases[model].offer(invocation)

    def withdraw(self, id: InvocationId, attempt: int) -> None:
        """The client gave up `attempt`, whether it waits or runs.

        Nothing happens when a newer one was offered: calls of one ingress may overtake each other.
        """
        lines = self._core.lines
        mine = [name for name in lines if lines[name].invocation(id) is not None]
        for name in mine or list(lines):  # what ran before these books were there is in no line
            self._leases[name].withdraw(id, attempt, "its client left")

    def lost(self, slot_id: ReplicaId, why: str) -> None:
        """A stream to the slot broke; if it lives, its next report brings it back."""
        log.warning("slot %s lost: %s", slot_id, why)
        if slot_id in self._slots:
            self._lose(slot_id)

    # Measuring

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        """Load and measure a model in a slot that nobody needs now; its own model is unloaded.

        The slot serves nobody for so long. Raise `CapacityError` while none is idle,
        `ReplicaLostError` when the slot is lost or takes too long, and what the measuring raises.
        """
        now_s = _now_s()
        card = self._core.placement.easiest_card(now_s)
        if card is None:
            raise CapacityError(self.spec.name, "none of its slots is idle", FULL_RETRY_AFTER_S)
        slot = self._slots[ReplicaId(card)]
        copy_id = CopyId(f"{_MEASURE}{uuid.uuid4().hex}")
        order = SlotOrder(copy_id, hosted, profile, measure=True)
        loan = slot.loan = _Loan(order, asyncio.get_running_loop().create_future())
        self._lend(slot, hosted.model.name, now_s)
        try:
            async with asyncio.timeout(MEASURE_LIMIT_S):
                return await loan.found
        except TimeoutError:
            problem = f"{hosted.model.name} was not measured in {MEASURE_LIMIT_S:.0f} s"
            raise ReplicaLostError(slot.id, problem) from None
        finally:
            slot.loan = None  # its next report brings it back
            slot.must_clear = loan.found.cancelled()  # nobody waits, but it still measures
            self._size_memories()
            slot.news.set()

    def _lend(self, slot: _Slot, name: ModelName, now_s: float) -> None:
        copy = self._core.placement.cards()[slot.card]
        reason = f"lent to measure {name}"
        if copy is not None:
            reason += f"; {copy.model} goes"
            self._load_ended(copy.id, now_s)
            self._counts = replace(self._counts, evictions=self._counts.evictions + 1)
        log.info("slot %s: %s", slot.id, reason)
        decided = Decided(time.time(), self.spec.name, LOAD, reason, slot.id)
        self.decisions.add(decided, "lent to measure a model")
        self._handle(CardLent(now_s, slot.card))
        if self.spec.slots.engine.sleep:  # what sleeps there makes room
            self._handle(HostMemorySized(now_s, HostMemory(self._place_of(slot), 0)))
        slot.news.set()

    def measured(self, slot_id: ReplicaId, copy_id: CopyId, found: Staged | CatoError) -> None:
        """What the slot was lent for is done."""
        slot = self._slots.get(slot_id)
        if slot is None or slot.loan is None or slot.loan.order.copy_id != copy_id:
            return  # nobody waits for it any more
        if slot.loan.found.done():
            return
        if isinstance(found, Staged):
            slot.loan.found.set_result(found)
        else:
            slot.loan.found.set_exception(found)

    # Slots

    async def attend(self, report: SlotReport) -> SlotOrder | StopCalls | None:
        """What the slot is to hold, when that is something else; None after a while without."""
        self.report(report)
        slot = self._slots.get(report.slot)
        if slot is None:
            await asyncio.sleep(ATTEND_S)
            return None
        order = self._news_for(slot)
        if order is None:
            slot.news.clear()
            try:
                # Not `wait_for`, which may lose a cancellation that comes with the news.
                async with asyncio.timeout(ATTEND_S):
                    await slot.news.wait()
            except TimeoutError:
                return None
            order = self._news_for(slot)
        return order

    def report(self, report: SlotReport) -> None:
        """A slot as it is now."""
        if report.slot in self._left:
            return
        now_s = _now_s()
        slot = self._slots.get(report.slot)
        if slot is None:
            slot = self._slots[report.slot] = _Slot(report.slot, report, now_s)
            self._size_memories()
        slot.seen_at_s = now_s
        if report.number < slot.report.number:
            return
        slot.report = report
        if report.model is not None and report.template is not None:
            self._templates[report.model] = report.template
        if slot.loan is not None:
            self._check_loan(slot, slot.loan)
            return
        if report.state is SlotState.LOADING and (report.copy_id or "").startswith(_MEASURE):
            slot.must_clear = True  # nobody waits for what it measures: these books are new
        if slot.must_clear:
            slot.must_clear = report.state is not SlotState.EMPTY
        if not slot.must_clear:
            self._reconcile(slot, now_s)
            self._check_memory(slot, now_s)

    def tell(self, slot_id: ReplicaId, model: ModelName, told: Iterable[Told]) -> None:
        """What became of calls of `model` in the slot; `now_s` becomes this clock's."""
        for event in told:
            if model in self._core.lines:
                self._handle(OfLine(model, replace(event, now_s=_now_s())))

    def close(self) -> None:
        """Other books take the place of these; those who wait ask them."""
        for slot in self._slots.values():
            self._end_loan(slot, "its pool was redeployed")
        for log_ in self._logs.values():
            if log_ is not None:
                log_.close()
        for leases in self._leases.values():
            leases.close(PoolClosedError(self.spec.name))

    def _end_loan(self, slot: _Slot, problem: str) -> None:
        if slot.loan is not None and not slot.loan.found.done():
            slot.loan.found.set_exception(ReplicaLostError(slot.id, problem, was_reached=True))

    def _check_loan(self, slot: _Slot, loan: _Loan) -> None:
        """A slot that is done has said what it found, unless that was lost."""
        is_done = slot.report.copy_id == loan.order.copy_id
        if is_done and slot.report.state is SlotState.EMPTY:
            self._end_loan(slot, slot.report.problem or "what it measured did not arrive")

    def left(self, slots: Iterable[ReplicaId]) -> None:
        """Serve lists these slots no longer: they get no work, and end what they have."""
        for slot_id in sorted(set(slots) - self._left):
            self._left.add(slot_id)
            self._leave(slot_id, "it left its deployment")

    @property
    def have_left(self) -> frozenset[ReplicaId]:
        return frozenset(self._left)

    def leave(self, slot_id: ReplicaId, why: str = "it ended") -> None:
        """The slot ends; it does not come back under this name."""
        self._left.discard(slot_id)
        self._leave(slot_id, why)

    def _leave(self, slot_id: ReplicaId, why: str) -> None:
        slot = self._slots.pop(slot_id, None)
        if slot is None:
            return
        self._end_loan(slot, f"{why} while it measured a model")
        self._lose(slot_id)
        self._size_memories()

    def tick(self) -> None:
        """Call it every second or so: silent slots are lost, failed loads are tried again."""
        now_s = _now_s()
        for slot in list(self._slots.values()):
            if now_s - slot.seen_at_s > SILENCE_S:
                log.warning("slot %s is silent", slot.id)
                self.leave(slot.id, "it fell silent")
        self._handle(ClockTold(now_s, _local_s()))
        self._handle(Looked(now_s))
        for log_ in self._logs.values():
            if log_ is not None:
                log_.flush()

    def _lose(self, slot_id: ReplicaId) -> None:
        """Leases there end; the ingresses come again, and what waited first is served first."""
        now_s, copy = _now_s(), self._core.placement.cards().get(CardId(slot_id))
        if copy is not None:
            self._load_ended(copy.id, now_s)
        self._handle(CardLost(now_s, CardId(slot_id)))

    def _place_of(self, slot: _Slot) -> HostId:
        """Where weights are kept: the host, or the slot if engines sleep: none wakes elsewhere."""
        host = slot.report.host
        return HostId(f"{host}/{slot.id}") if self.spec.slots.engine.sleep else host

    def _size_memories(self) -> None:
        """Slots whose engines sleep share their host's memory in equal parts."""
        places: dict[HostId, set[HostId]] = {}
        for slot in self._slots.values():
            places.setdefault(slot.report.host, set()).add(self._place_of(slot))
        for of_host in places.values():
            each_bytes = self._policies.host_memory_bytes // len(of_host)
            for place in sorted(of_host):
                self._handle(HostMemorySized(_now_s(), HostMemory(place, each_bytes)))

    def _check_memory(self, slot: _Slot, now_s: float) -> None:
        """Engines may end in their sleep; what is loaded sleeps when it has to leave."""
        report = slot.report
        if self.spec.slots.engine.sleep and report.state is not SlotState.LOADING:
            loaded = {report.model} if report.model and report.state is SlotState.READY else set()
            models = frozenset(loaded | set(report.asleep))
            self._handle(HostMemoryHeld(now_s, self._place_of(slot), models))

    def _reconcile(self, slot: _Slot, now_s: float) -> None:
        """Bring the books to what the slot says of itself."""
        report, cards = slot.report, self._core.placement.cards()
        on_card = cards.get(slot.card)
        if on_card is not None and on_card.id == report.copy_id:
            if report.state is SlotState.EMPTY:
                log.warning("slot %s lost %s: %s", slot.id, report.model, report.problem)
                self._load_ended(on_card.id, now_s, has_failed=True)
                self._handle(LoadFailed(now_s, on_card.id, report.problem))
            elif report.state is SlotState.READY:
                self._load_ended(on_card.id, now_s)
                self._handle(LoadFinished(now_s, on_card.id))
                held = tuple(id for id, _ in report.held)
                self._handle(CopyReported(now_s, on_card.id, held))
        elif on_card is None and report.state is SlotState.READY and report.model in self._hosted:
            self._adopt(slot, now_s)
        elif slot.card not in cards and not self._is_busy_elsewhere(report):
            self._handle(CardAdded(now_s, Card(slot.card, self._place_of(slot))))

    def _is_busy_elsewhere(self, report: SlotReport) -> bool:
        """It loads, or runs calls of a model that these books do not know (yet)."""
        return report.state is SlotState.LOADING or bool(report.held)

    def _adopt(self, slot: _Slot, now_s: float) -> None:
        """A model is loaded that these books know nothing of: they were lost, or the slot was."""
        report = slot.report
        assert report.copy_id is not None
        assert report.model is not None
        held = tuple(id for id, _ in report.held)
        card = (slot.card,)
        place = self._place_of(slot)
        self._handle(CopyFound(now_s, report.copy_id, report.model, card, held, place))

    def _news_for(self, slot: _Slot) -> SlotOrder | StopCalls | None:
        """What the slot does not know yet."""
        stops, slot.stops = tuple(slot.stops), []
        return StopCalls(stops) if stops else self._order_for(slot)

    def _order_for(self, slot: _Slot) -> SlotOrder | None:
        """What the slot has to hold, when it does not hold or load that already."""
        report = slot.report
        if slot.loan is not None:
            return None if report.copy_id == slot.loan.order.copy_id else slot.loan.order
        if slot.must_clear:
            return None if report.copy_id == NOTHING else SlotOrder(NOTHING)
        on_card = self._core.placement.cards().get(slot.card)
        remembered = self._core.placement.in_host_memory().get(self._place_of(slot), ())
        if on_card is None or on_card.id == report.copy_id or on_card.id not in self._orders:
            is_right = set(report.asleep) <= set(remembered)
            if is_right or report.copy_id is None or report.state is SlotState.LOADING:
                return None
            return SlotOrder(report.copy_id, remembered=remembered)
        _, load = self._orders[on_card.id]
        return SlotOrder(
            load.copy_id,
            self._hosted[load.model],
            self.profiles[load.model],
            load.from_host_memory,
            load.expected_s,
            remembered=remembered,
        )

    # Commands

    def _handle(self, event: SharedEvent) -> None:
        for step in self._core.handle(event):
            match step:
                case LineTold():
                    self._carry_out(step)
                case Load():
                    self._order(step, event.now_s)
                case GiveUp():
                    part = self.spec.part_of(step.model)
                    error = NotLoadedError(part, step.problem, step.retry_after_s)
                    self._leases[step.model].fail(step.id, error)
                case _:
                    assert_never(step)

    def _carry_out(self, told: LineTold) -> None:
        """What a model's line has decided."""
        if (log_ := self._logs.get(told.model)) is not None:
            in_order = self._core.placement.in_order
            names = replace(self._policies.of_models, by_turns=in_order)
            log_.write(told.event, told.commands, names, self.profiles[told.model])
        if not told.commands:
            return
        c, line = self._counts, self._core.lines[told.model]
        served, hits = c.served + len(told.started), c.hits + len(told.hits)
        self._counts = replace(c, served=served, hits=hits)
        commands = tuple(_with_hit(command, told) for command in told.commands)
        self.decisions.note_commands(time.time(), told.event, commands, line)
        for command in commands:
            match command:
                case Dispatch():
                    self._leases[told.model].answer(command)
                case Refuse():
                    self._leases[told.model].answer(command)
                case Preempt():
                    slot = self._slots.get(command.replica_id)
                    if slot is not None:  # the ingress is told by the slot
                        slot.stops.append((command.invocation_id, command.attempt))
                        slot.news.set()
                case _:
                    assert_never(command)

    def _order(self, load: Load, now_s: float) -> None:
        log.info("load %s on %s: %s", load.model, ", ".join(load.cards), load.reason)
        gone = "".join(f"; {victim.model} goes" for victim in load.evicted)
        reason = f"{load.model}: {load.reason}{gone}"
        decided = Decided(time.time(), self.spec.name, LOAD, reason, ", ".join(load.cards))
        self.decisions.add(decided, load.reason)
        for victim in load.evicted:
            self._load_ended(victim.copy_id, now_s)
        self._orders[load.copy_id] = (now_s, load)
        c = self._counts
        self._counts = replace(
            c,
            loads=c.loads + 1,
            from_host_memory=c.from_host_memory + load.from_host_memory,
            prefetches=c.prefetches + load.is_prefetch,
            evictions=c.evictions + len(load.evicted),
        )
        for card in load.cards:
            self._slots[ReplicaId(card)].news.set()

    def _load_ended(self, copy_id: CopyId, now_s: float, *, has_failed: bool = False) -> None:
        ordered = self._orders.pop(copy_id, None)
        if ordered is not None:
            load_s = self._counts.load_s + now_s - ordered[0]
            self._counts = replace(self._counts, load_s=load_s)
        if has_failed:
            self._counts = replace(self._counts, failures=self._counts.failures + 1)


def _with_hit(command: Command, told: LineTold) -> Command:
    """The reason of a lease says whether the model was there; not when it is only said again."""
    if not isinstance(command, Dispatch) or command.invocation_id not in told.started:
        return command
    found = "hit" if command.invocation_id in told.hits else "miss"
    return replace(command, reason=f"{found}: {command.reason}")


def _now_s() -> float:
    return time.monotonic()


def _local_s() -> float:
    """Seconds since 1970 of a clock that shows local time."""
    now_s = time.time()
    return now_s + time.localtime(now_s).tm_gmtoff
