"""One shared pool, live: a thin driver of `CardOrchestrator`.

Slots ask for orders and report; ingresses ask for leases. Whoever keeps this object may be
restarted: what is loaded and what runs comes back with the next reports of the slots.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from cato.control.staged import Staged
from cato.core.arrival_rates import UsualArrivals
from cato.core.buffers import MAX_BUFFERS, LatestRun, replaced_by
from cato.core.cards import (
    ArrivalsRemembered,
    CardAdded,
    CardEvent,
    CardLent,
    CardLost,
    CardOrchestrator,
    CardPoliciesChanged,
    ClockTold,
    CopyFound,
    GiveUp,
    HostMemoryHeld,
    HostMemorySized,
    InvocationFinished,
    InvocationQueued,
    InvocationWithdrawn,
    Load,
    LoadFailed,
    LoadFinished,
    ModelAdded,
    ModelRemoved,
    Serve,
    Ticked,
)
from cato.core.commands import Dispatch
from cato.core.errors import (
    CapacityError,
    CatoError,
    InputError,
    NotLoadedError,
    PoolClosedError,
    ReplicaLostError,
    SupersededError,
    UnknownNameError,
)
from cato.core.eviction import Card, CardId, CopyId, HostMemory, ModelFacts, Wanted
from cato.core.ids import HostId, InvocationId, ModelName, ReplicaId
from cato.core.profile import Profile
from cato.core.residency import Resident
from cato.core.slots import (
    HostedPart,
    LoadCounts,
    SharedPoolPicture,
    SlotOrder,
    SlotPicture,
    SlotReport,
    SlotState,
)
from cato.core.snapshot import Invocation
from cato.core.topology import HostedModel, SharedPoolPolicies, SharedPoolSpec, TemplateFacts
from cato.policies.eviction.registry import card_policies
from cato.telemetry.decisions import LOAD, Decided, DecisionBook, dispatched

log = logging.getLogger("cato.shared_pool")

# A slot asks again at once when it got no order for so long; its questions are its heartbeats.
ATTEND_S = 0.5
# Ten questions long: a busy host may be late.
SILENCE_S = 5.0
# A lease that its slot does not hold this long after it was given was never taken up: longer than
# an ingress looks for a slot that it does not know yet.
LEASE_GRACE_S = 6.0
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

Ended = tuple[InvocationId, int]
"""An invocation that has left its slot, with its attempt."""


@dataclass(frozen=True, slots=True)
class _Loan:
    """A slot that measures a model, and whoever waits for what it finds."""

    order: SlotOrder
    found: asyncio.Future[Staged]


@dataclass(slots=True)
class _Slot:
    id: ReplicaId
    report: SlotReport
    seen_at_s: float
    must_clear: bool = False
    loan: _Loan | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def card(self) -> CardId:
        return CardId(self.id)


@dataclass(slots=True)
class _Lease:
    """`is_asked`: an ingress has it. What ran on a lost slot gets a new one before anybody asks."""

    dispatch: Dispatch
    copy_id: CopyId
    at_s: float
    is_asked: bool


class SharedPool:
    """Leases slots to invocations, and orders what slots load. Belongs to one asyncio loop."""

    def __init__(
        self,
        spec: SharedPoolSpec,
        profiles: Mapping[ModelName, Profile],
        settle_s: float = SETTLE_S,
    ) -> None:
        self.spec = spec
        self.profiles = dict(profiles)
        self._policies = spec.policies
        self._hosted: dict[ModelName, HostedModel] = {m.model.name: m for m in spec.models}
        self._leaving: set[ModelName] = set()  # to be removed when those who have asked are served
        self._slots: dict[ReplicaId, _Slot] = {}
        # Serve does not list these any more; they report for as long as they drain.
        self._left: set[ReplicaId] = set()
        self._offers: dict[InvocationId, Invocation] = {}
        self._answers: dict[InvocationId, asyncio.Future[Dispatch]] = {}
        self._buffers: OrderedDict[str, LatestRun] = OrderedDict()
        self._leases: dict[InvocationId, _Lease] = {}
        self._orders: dict[CopyId, tuple[float, Load]] = {}
        self._counts = LoadCounts()
        self._templates: dict[ModelName, TemplateFacts] = {}
        self.decisions = DecisionBook(spec.name)
        self._core = self._new_core(settle_s=settle_s)

    def _new_core(self, unit_s: float = 1.0, settle_s: float = 0.0) -> CardOrchestrator:
        facts = [self._facts(m) for m in self._hosted.values()]
        life = uuid.uuid4().hex[:6]
        return CardOrchestrator(
            *card_policies(self._policies), facts, unit_s=unit_s, life=life, settle_s=settle_s
        )

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
        self._policies = policies
        self._handle(CardPoliciesChanged(_now_s(), eviction, order))
        self._size_memories()

    def why_not_add(self, hosted: HostedModel) -> str | None:
        """Why the model cannot be added, or measured anew; None when it can."""
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
        self._handle(ModelAdded(_now_s(), self._facts(hosted)))

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
                if not self._core.uses(name):
                    break
                await asyncio.sleep(REMOVE_POLL_S)
            self._remove_model(name)
        finally:
            self._leaving.discard(name)

    def _remove_model(self, name: ModelName) -> None:
        now_s = _now_s()
        loaded = [c.id for c in self._core.copies() if c.model == name]
        self._handle(ModelRemoved(now_s, name))
        for copy_id in loaded:
            self._load_ended(copy_id, now_s)
        del self._hosted[name], self.profiles[name]
        for slot in self._slots.values():  # one that is added again may have other weights
            if slot.report.model == name and slot.loan is None:
                slot.must_clear = True
                slot.news.set()

    def remember_arrivals(self, slices: tuple[UsualArrivals, ...]) -> None:
        """What was learnt of the times of day before this pool's books were opened."""
        self._handle(ArrivalsRemembered(_now_s(), slices))

    def learnt_arrivals(self) -> tuple[UsualArrivals, ...]:
        """What was learnt of them since the last call."""
        return self._core.learnt_arrivals()

    def reset(self, unit_s: float = 1.0) -> None:
        """Begin anew with empty slots and no memory of what was asked for; for measurements.

        `unit_s`: what policies take for a second, see `CardOrchestrator`. Raise `InputError` while
        anything waits, runs or is measured.
        """
        if self._offers:
            raise InputError(f"{len(self._offers)} invocations wait or run in {self.spec.name}")
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
        cards = self._core.cards()
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
        waiting = self._core.waiting_by_model()
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
        for place, models in self._core.in_host_memory().items():
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
        """Wait for a slot that holds `model`; raise `CapacityError` when the queue is full or the
        model does not load, `UnknownNameError` when the pool does not host it, `SupersededError`
        when a newer run of its buffer takes its place, and `PoolClosedError` when other books take
        the place of these meanwhile.

        Times of `invocation` count from the moment of the call. The same offer again is harmless.
        """
        now_s, id = _now_s(), invocation.id
        is_new = id not in self._offers and invocation.attempt == 1 and not invocation.was_taken
        if model not in self._hosted or (is_new and model in self._leaving):
            served = sorted(self._hosted.keys() - self._leaving)
            raise UnknownNameError("model", model, tuple(served))
        lease = self._leases.get(id)
        if lease is not None and self._is_still_good(lease, invocation):
            lease.dispatch = replace(lease.dispatch, attempt=invocation.attempt)
            lease.at_s, lease.is_asked = now_s, True
            self._offers[id] = invocation.on_clock(now_s)
            return lease.dispatch
        mine = invocation.on_clock(now_s)
        if mine.buffer:
            self._supersede(mine)  # first: the queue may be full because of the older one
        is_waiting = lease is None and id in self._offers
        if not is_waiting:
            self._end(id)
            is_full = len(self._core.waiting()) >= self._policies.max_queued
            if is_full and is_new:
                problem = f"its queue of {self._policies.max_queued} is full"
                raise CapacityError(self.spec.part_of(model), problem, FULL_RETRY_AFTER_S)
        self._offers[id] = mine
        answer = self._answers.get(id)
        if answer is None or answer.done():
            answer = self._answers[id] = asyncio.get_running_loop().create_future()
        self._handle(InvocationQueued(now_s, self._wanted(model, mine)))
        return await asyncio.shield(answer)

    def _supersede(self, newcomer: Invocation) -> None:
        """What waits of an older run of the same buffer waits for nobody; raise `SupersededError`
        when the newcomer is that. What runs already is ended by its own ingress, or runs on."""
        latest = self._buffers.get(newcomer.buffer)
        if latest is not None and latest.is_later_than(newcomer):
            raise SupersededError(replaced_by(latest.run_id))
        if latest is None or latest.run_id != newcomer.run_id:
            for id in latest.ids if latest is not None else ():
                answer = self._answers.get(id)
                if answer is not None and not answer.done():
                    answer.set_exception(SupersededError(replaced_by(newcomer.run_id)))
                    del self._answers[id]
                    self._end(id)
            latest = self._buffers[newcomer.buffer] = LatestRun(
                newcomer.run_id, newcomer.began_at_s
            )
        self._buffers.move_to_end(newcomer.buffer)
        if len(self._buffers) > MAX_BUFFERS:
            self._buffers.popitem(last=False)
        latest.ids.add(newcomer.id)

    def withdraw(self, id: InvocationId, attempt: int) -> None:
        """The client gave up `attempt`, whether it waits or runs.

        Nothing happens when a newer one was offered: calls of one ingress may overtake each other.
        """
        offer, lease = self._offers.get(id), self._leases.get(id)
        known = offer.attempt if offer is not None else lease.dispatch.attempt if lease else 0
        if attempt < known:
            return
        answer = self._answers.pop(id, None)
        if answer is not None:
            answer.cancel()
        self._end(id)

    def lost(self, slot_id: ReplicaId, why: str) -> None:
        """A stream to the slot broke; if it lives, its next report brings it back."""
        log.warning("slot %s lost: %s", slot_id, why)
        if slot_id in self._slots:
            self._lose(slot_id)

    def _is_still_good(self, lease: _Lease, invocation: Invocation) -> bool:
        """The answer to this very offer went astray, or the lease was given to nobody so far."""
        return not lease.is_asked or lease.dispatch.attempt == invocation.attempt

    def _wanted(self, model: ModelName, invocation: Invocation) -> Wanted:
        """The first token must come so early that the rest of the way meets the SLO."""
        profile = self.profiles[model]
        after_first_s = invocation.own_s(profile) - profile.first_token_s(invocation.prompt_tokens)
        return Wanted(
            id=invocation.id,
            model=model,
            arrived_at_s=invocation.arrived_at_s,
            deadline_s=invocation.deadline_s - invocation.downstream_s - after_first_s,
            expected_tokens=float(invocation.expected_tokens),
            value=invocation.weight,
            user=invocation.user,
        )

    def _end(self, id: InvocationId) -> None:
        """Off all books; harmless when it is on none."""
        self._leases.pop(id, None)
        self._offers.pop(id, None)
        if self._core.knows(id):  # of what ran before these books were there nothing was offered
            self._handle(InvocationWithdrawn(_now_s(), id))

    # Measuring

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        """Load and measure a model in a slot that nobody needs now; its own model is unloaded.

        The slot serves nobody for so long. Raise `CapacityError` while none is idle,
        `ReplicaLostError` when the slot is lost or takes too long, and what the measuring raises.
        """
        now_s = _now_s()
        card = self._core.easiest_card(now_s)
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
        copy = self._core.cards()[slot.card]
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

    async def attend(self, report: SlotReport) -> SlotOrder | None:
        """What the slot is to hold, when that is something else; None after a while without."""
        self.report(report)
        slot = self._slots.get(report.slot)
        if slot is None:
            await asyncio.sleep(ATTEND_S)
            return None
        order = self._order_for(slot)
        if order is None:
            slot.news.clear()
            try:
                # Not `wait_for`, which may lose a cancellation that comes with the news.
                async with asyncio.timeout(ATTEND_S):
                    await slot.news.wait()
            except TimeoutError:
                return None
            order = self._order_for(slot)
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

    def ended(self, slot_id: ReplicaId, ended: Iterable[Ended]) -> None:
        """Invocations that have left the slot, done or not."""
        for id, attempt in ended:
            lease = self._leases.get(id)
            if lease is not None and lease.dispatch.attempt != attempt:
                continue  # a newer attempt has a lease already
            if lease is None or lease.dispatch.replica_id != slot_id:
                if id not in self._answers:  # lost with its slot, which lives after all
                    self._end(id)
                continue
            del self._leases[id]
            self._offers.pop(id, None)
            self._handle(InvocationFinished(_now_s(), id, lease.copy_id))

    def close(self) -> None:
        """Other books take the place of these; whoever waits asks them."""
        for slot in self._slots.values():
            self._end_loan(slot, "its pool was deployed anew")
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(PoolClosedError(self.spec.name))
        self._answers.clear()

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
            runs = [i for i, x in self._leases.items() if x.dispatch.replica_id == slot_id]
            for id in runs:
                del self._leases[id]
                self._offers.pop(id, None)
            self._leave(slot_id, "it left its deployment", frozenset(runs))

    @property
    def have_left(self) -> frozenset[ReplicaId]:
        return frozenset(self._left)

    def leave(self, slot_id: ReplicaId, why: str = "it ended") -> None:
        """The slot ends; it does not come back under this name."""
        self._left.discard(slot_id)
        self._leave(slot_id, why)

    def _leave(
        self, slot_id: ReplicaId, why: str, ended: frozenset[InvocationId] = frozenset()
    ) -> None:
        slot = self._slots.pop(slot_id, None)
        if slot is None:
            return
        self._end_loan(slot, f"{why} while it measured a model")
        self._lose(slot_id, ended)
        self._size_memories()

    def tick(self) -> None:
        """Call it every second or so: silent slots are lost, failed loads are tried again, leases
        that nobody took up end."""
        now_s = _now_s()
        for slot in list(self._slots.values()):
            if now_s - slot.seen_at_s > SILENCE_S:
                log.warning("slot %s is silent", slot.id)
                self.leave(slot.id, "it fell silent")
        for id, lease in list(self._leases.items()):
            if not lease.is_asked and now_s - lease.at_s > LEASE_GRACE_S:
                self._end(id)
        self._handle(ClockTold(now_s, _local_s()))
        self._handle(Ticked(now_s))

    def _lose(self, slot_id: ReplicaId, ended: frozenset[InvocationId] = frozenset()) -> None:
        self._forget_leases(slot_id)
        now_s, copy = _now_s(), self._core.cards().get(CardId(slot_id))
        if copy is not None:
            self._load_ended(copy.id, now_s)
        self._handle(CardLost(now_s, CardId(slot_id), ended))

    def _forget_leases(self, slot_id: ReplicaId) -> None:
        """What ran there waits again, in its old place, and keeps it when its ingress asks."""
        for id, lease in list(self._leases.items()):
            if lease.dispatch.replica_id == slot_id:
                del self._leases[id]

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
        report, cards = slot.report, self._core.cards()
        on_card = cards.get(slot.card)
        if on_card is not None and on_card.id == report.copy_id:
            if report.state is SlotState.EMPTY:
                log.warning("slot %s lost %s: %s", slot.id, report.model, report.problem)
                self._load_ended(on_card.id, now_s, has_failed=True)
                self._forget_leases(slot.id)
                self._handle(LoadFailed(now_s, on_card.id, report.problem))
            elif report.state is SlotState.READY:
                self._load_ended(on_card.id, now_s)
                self._handle(LoadFinished(now_s, on_card.id))
                self._end_what_is_not_held(slot, now_s)
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
        for id, attempt in report.held:
            dispatch = Dispatch(
                invocation_id=id,
                attempt=attempt,
                replica_id=slot.id,
                deployment=self.spec.slots.name,
                priority=0,
                queue_s=0.0,
                slack_s=0.0,
                remaining_s=0.0,
                reason="ran there already",
            )
            self._leases[id] = _Lease(dispatch, report.copy_id, now_s, is_asked=True)
        held = tuple(id for id, _ in report.held)
        card = (slot.card,)
        place = self._place_of(slot)
        self._handle(CopyFound(now_s, report.copy_id, report.model, card, held, place))

    def _end_what_is_not_held(self, slot: _Slot, now_s: float) -> None:
        held = {id for id, _ in slot.report.held}
        for id, lease in list(self._leases.items()):
            is_here = lease.dispatch.replica_id == slot.id and lease.is_asked
            if is_here and id not in held and now_s - lease.at_s > LEASE_GRACE_S:
                log.warning("invocation %s never came to slot %s, or its end was lost", id, slot.id)
                self.ended(slot.id, ((id, lease.dispatch.attempt),))

    def _order_for(self, slot: _Slot) -> SlotOrder | None:
        """What the slot has to hold, when it does not hold or load that already."""
        report = slot.report
        if slot.loan is not None:
            return None if report.copy_id == slot.loan.order.copy_id else slot.loan.order
        if slot.must_clear:
            return None if report.copy_id == NOTHING else SlotOrder(NOTHING)
        on_card = self._core.cards().get(slot.card)
        remembered = self._core.in_host_memory().get(self._place_of(slot), ())
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

    def _handle(self, event: CardEvent) -> None:
        for command in self._core.handle(event):
            match command:
                case Load():
                    self._order(command, event.now_s)
                case Serve():
                    self._grant(command, event.now_s)
                case GiveUp():
                    self._give_up(command)
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

    def _grant(self, serve: Serve, now_s: float) -> None:
        c = self._counts
        self._counts = replace(c, served=c.served + 1, hits=c.hits + serve.is_hit)
        offer = self._offers.get(serve.id)
        profile = self.profiles[serve.model]
        dispatch = Dispatch(
            invocation_id=serve.id,
            attempt=1 if offer is None else offer.attempt,
            replica_id=ReplicaId(serve.cards[0]),
            deployment=self.spec.slots.name,
            priority=0,
            queue_s=0.0 if offer is None else now_s - offer.arrived_at_s,
            slack_s=0.0 if offer is None else offer.deadline_s - now_s,
            remaining_s=0.0 if offer is None else offer.remaining_s(profile),
            reason=f"{'hit' if serve.is_hit else 'miss'}: {serve.reason}",
            service_s=0.0
            if offer is None
            else profile.service_s(offer.prompt_tokens, offer.expected_tokens),
        )
        decided = dispatched(time.time(), self.spec.name, dispatch, offer)
        self.decisions.add(decided, dispatch.reason)
        answer = self._answers.pop(serve.id, None)
        is_asked = answer is not None and not answer.done()
        self._leases[serve.id] = _Lease(dispatch, serve.copy_id, now_s, is_asked)
        if answer is not None and is_asked:
            answer.set_result(dispatch)

    def _give_up(self, command: GiveUp) -> None:
        self._offers.pop(command.id, None)
        answer = self._answers.pop(command.id, None)
        if answer is not None and not answer.done():
            part = self.spec.part_of(command.model)
            answer.set_exception(NotLoadedError(part, command.problem, command.retry_after_s))


def _now_s() -> float:
    return time.monotonic()


def _local_s() -> float:
    """Seconds since 1970 of a clock that shows local time."""
    now_s = time.time()
    return now_s + time.localtime(now_s).tm_gmtoff
