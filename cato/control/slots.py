"""The slots of a shared pool: their reports, and orders for what they should hold."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cato.control.load_book import LoadBook
from cato.control.staged import Staged
from cato.core.errors import CapacityError, CatoError, ReplicaLostError
from cato.core.eviction import Card, CardId, CopyId, HostMemory
from cato.core.ids import DeploymentName, HostId, InvocationId, ModelName, ReplicaId
from cato.core.pool.placement import Placement
from cato.core.pool.placement_events import (
    CardAdded,
    CardLent,
    CardLost,
    CopyFound,
    CopyReported,
    HostMemoryHeld,
    HostMemorySized,
    LoadFailed,
    LoadFinished,
    PlacementEvent,
)
from cato.core.profile import Profile
from cato.core.residency import Resident
from cato.core.slots import SlotOrder, SlotPicture, SlotReport, SlotState
from cato.core.topology import HostedModel, SharedPoolPolicies, SharedPoolSpec
from cato.telemetry.decisions import LOAD, Decided, DecisionBook

log = logging.getLogger("cato.shared_pool")

# Two loads of the largest model from slow storage take minutes; a measurement that hangs must end.
MEASURE_LIMIT_S = 1800.0
FULL_RETRY_AFTER_S = 1.0
# Reports of a slot that has left are ignored this long. A draining slot sends `Left` in place of
# reports, so it does not come back; one that Serve unlists for a moment, to reconfigure it, does.
# Longer than Serve takes to stop an unlisted replica (`DRAIN_POLL_S` in `cato.serve.app`).
LEFT_S = 3.0
NOTHING = CopyId("")
_MEASURE = "measure-"


class SharedPoolState(Protocol):
    """The parts of the pool that its slots use."""

    spec: SharedPoolSpec
    hosted: dict[ModelName, HostedModel]
    profiles: dict[ModelName, Mapping[DeploymentName, Profile]]
    decisions: DecisionBook
    loads: LoadBook

    @property
    def placement(self) -> Placement: ...

    @property
    def policies(self) -> SharedPoolPolicies: ...

    def handle(self, event: PlacementEvent) -> None: ...


@dataclass(frozen=True, slots=True)
class _Loan:
    """A measurement in a lent slot, and the future of its result."""

    order: SlotOrder
    found: asyncio.Future[Staged]


@dataclass(slots=True)
class _Slot:
    id: ReplicaId
    report: SlotReport
    must_clear: bool = False
    loan: _Loan | None = None

    @property
    def card(self) -> CardId:
        return CardId(self.id)

    @property
    def deployment(self) -> DeploymentName:
        return self.report.deployment


class Slots:
    """The latest report of each slot. Each report is answered with orders until the slot obeys."""

    def __init__(
        self, state: SharedPoolState, hold: Callable[[ReplicaId, SlotOrder], None]
    ) -> None:
        """`hold` sends an order to a slot."""
        self._state, self._hold = state, hold
        self._slots: dict[ReplicaId, _Slot] = {}
        # Until when reports of slots that left are ignored.
        self.have_left: dict[ReplicaId, float] = {}

    def __contains__(self, slot: ReplicaId) -> bool:
        return slot in self._slots

    def count(self, deployments: Collection[DeploymentName]) -> int:
        """Slots of `deployments` that can hold a model; a lent slot counts, as it is back in a
        minute."""
        cards = self._state.placement.cards()
        return sum(
            slot.loan is not None or slot.card in cards
            for slot in self._slots.values()
            if slot.deployment in deployments
        )

    @property
    def is_measuring(self) -> bool:
        return any(s.loan is not None for s in self._slots.values())

    def model_on(self, slot: ReplicaId) -> ModelName | None:
        """The model that the slot reports as held or loading."""
        return self._slots[slot].report.model if slot in self._slots else None

    def pictures(self) -> tuple[SlotPicture, ...]:
        failing = self._state.placement.failing()
        return tuple(
            SlotPicture(
                slot=r.slot,
                host=r.host,
                deployment=r.deployment,
                state=r.state,
                model=r.model,
                running=len(r.held),
                pid=r.pid,
                is_failing=CardId(r.slot) in failing and r.state is not SlotState.READY,
            )
            for r in (s.report for s in self._slots.values())
        )

    def in_host_memory(self) -> Mapping[HostId, tuple[ModelName, ...]]:
        hosts = {self._place_of(s): s.report.host for s in self._slots.values()}
        found: dict[HostId, set[ModelName]] = {}
        for place, models in self._state.placement.in_host_memory().items():
            found.setdefault(hosts.get(place, place), set()).update(models)
        return {host: tuple(sorted(models)) for host, models in found.items()}

    def residents(self) -> tuple[Resident, ...]:
        """What the slots hold, by their latest reports."""
        pool = self._state.spec
        return tuple(
            Resident(
                replica_id=r.slot,
                pool=pool.name,
                deployment=r.deployment,
                model=r.model,
                host=r.host,
                accelerator=pool.deployment(r.deployment).accelerator,
                cards=pool.deployment(r.deployment).cards,
                state=r.state.value,
                load_s=r.load_s,
                pid=r.pid,
            )
            for r in (s.report for s in self._slots.values())
            if r.model is not None and r.state is not SlotState.EMPTY
        )

    # Reports

    def report(self, report: SlotReport) -> None:
        """Take a slot's current state, and tell it what to hold instead."""
        if _now_s() < self.have_left.get(report.slot, 0.0):
            return
        if all(report.deployment != d.name for d in self._state.spec.deployments):
            return  # a former deployment's, which drains
        slot = self._slots.get(report.slot)
        if slot is None:
            slot = self._slots[report.slot] = _Slot(report.slot, report)
            self.size_memories()
        if report.number < slot.report.number:
            return
        slot.report = report
        self._look_at(slot)
        self.tell(slot.id)

    def _look_at(self, slot: _Slot) -> None:
        report, now_s = slot.report, _now_s()
        if slot.loan is not None:
            self._check_loan(slot, slot.loan)
            return
        if report.state is SlotState.LOADING and (report.copy_id or "").startswith(_MEASURE):
            slot.must_clear = True  # ordered before a restart: no caller waits for it
        if slot.must_clear:
            slot.must_clear = report.state is not SlotState.EMPTY
        if not slot.must_clear:
            self._reconcile(slot, now_s)
            self._check_memory(slot, now_s)

    def _reconcile(self, slot: _Slot, now_s: float) -> None:
        """Bring the pool's state in line with the slot's report."""
        report, cards = slot.report, self._state.placement.cards()
        loads, handle = self._state.loads, self._state.handle
        on_card = cards.get(slot.card)
        if on_card is not None and on_card.id == report.copy_id:
            if report.state is SlotState.EMPTY:
                log.warning("slot %s lost %s: %s", slot.id, report.model, report.problem)
                loads.end(on_card.id, now_s, has_failed=True)
                handle(LoadFailed(now_s, on_card.id, report.problem))
            elif report.state is SlotState.READY:
                loads.end(on_card.id, now_s)
                handle(LoadFinished(now_s, on_card.id))
                handle(CopyReported(now_s, on_card.id, _held(report)))
        elif (
            on_card is None
            and report.state is SlotState.READY
            and report.model in self._state.hosted
        ):
            # An unknown model is loaded: this process restarted, or the slot was lost for a while.
            assert report.copy_id is not None
            card, place, shape = (slot.card,), self._place_of(slot), slot.deployment
            held = _held(report)
            handle(CopyFound(now_s, report.copy_id, report.model, card, held, place, shape))
        elif slot.card not in cards and not _is_busy_elsewhere(report):
            handle(CardAdded(now_s, Card(slot.card, self._place_of(slot), slot.deployment)))

    def _check_memory(self, slot: _Slot, now_s: float) -> None:
        """Report models in host memory: sleepers may die; a loaded one sleeps if evicted."""
        report = slot.report
        if self._sleeps(slot) and report.state is not SlotState.LOADING:
            loaded = {report.model} if report.model and report.state is SlotState.READY else set()
            models = frozenset(loaded | set(report.asleep))
            self._state.handle(HostMemoryHeld(now_s, self._place_of(slot), models))

    # Orders

    def tell(self, slot_id: ReplicaId) -> None:
        """Send the slot its order, unless it already holds or loads that."""
        slot = self._slots.get(slot_id)
        order = None if slot is None else self._order_for(slot)
        if order is not None:
            self._hold(slot_id, order)

    def _order_for(self, slot: _Slot) -> SlotOrder | None:
        report = slot.report
        if slot.loan is not None:
            return None if report.copy_id == slot.loan.order.copy_id else slot.loan.order
        if slot.must_clear:
            return None if report.copy_id == NOTHING else SlotOrder(NOTHING)
        on_card = self._state.placement.cards().get(slot.card)
        remembered = self._state.placement.in_host_memory().get(self._place_of(slot), ())
        load = None
        if on_card is not None and on_card.id != report.copy_id:
            load = self._state.loads.ordered(on_card.id)
        if load is None:
            is_right = set(report.asleep) <= set(remembered)
            if is_right or report.copy_id is None or report.state is SlotState.LOADING:
                return None
            return SlotOrder(report.copy_id, remembered=remembered)
        return SlotOrder(
            load.copy_id,
            self._state.hosted[load.model],
            self._state.profiles[load.model][load.deployment],
            load.from_host_memory,
            load.expected_s,
            remembered=remembered,
        )

    def clear(self, model: ModelName | None = None) -> None:
        """Empty all slots, or those that hold `model`."""
        for slot in self._slots.values():
            if model is None or (slot.report.model == model and slot.loan is None):
                slot.must_clear = True
                self.tell(slot.id)

    # Measuring

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        """See `SharedPool.measure`."""
        now_s = _now_s()
        spec = self._state.spec
        deployment = hosted.measured_on or spec.deployments[0].name
        card = self._state.placement.easiest_card(now_s, deployment)
        if card is None:
            where = f" in {deployment}" if len(spec.deployments) > 1 else ""
            problem = f"none of its slots is idle{where}"
            raise CapacityError(spec.name, problem, FULL_RETRY_AFTER_S)
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
            slot.loan = None  # its next report makes it usable again
            slot.must_clear = loan.found.cancelled()  # cancelled, but the slot still measures
            self.size_memories()
            self.tell(slot.id)

    def _lend(self, slot: _Slot, name: ModelName, now_s: float) -> None:
        state = self._state
        copy = state.placement.cards()[slot.card]
        reason = f"lent to measure {name}"
        if copy is not None:
            reason += f"; evicts {copy.model}"
            state.loads.lend(copy.id, now_s)
        log.info("slot %s: %s", slot.id, reason)
        decided = Decided(time.time(), state.spec.name, LOAD, reason, slot.id)
        state.decisions.add(decided, "lent to measure a model")
        state.handle(CardLent(now_s, slot.card))
        if self._sleeps(slot):  # sleeping models make room
            state.handle(HostMemorySized(now_s, HostMemory(self._place_of(slot), 0)))
        self.tell(slot.id)

    def measured(self, slot_id: ReplicaId, copy_id: CopyId, found: Staged | CatoError) -> None:
        """Result of the measurement that the slot was lent for."""
        slot = self._slots.get(slot_id)
        if slot is None or slot.loan is None or slot.loan.order.copy_id != copy_id:
            return  # no caller waits for it any more
        if slot.loan.found.done():
            return
        if isinstance(found, Staged):
            slot.loan.found.set_result(found)
        else:
            slot.loan.found.set_exception(found)

    def _check_loan(self, slot: _Slot, loan: _Loan) -> None:
        """A slot that is done has already sent its result, unless the result was lost."""
        is_done = slot.report.copy_id == loan.order.copy_id
        if is_done and slot.report.state is SlotState.EMPTY:
            self._end_loan(slot, slot.report.problem or "the result of the measurement was lost")

    def end_loans(self, problem: str) -> None:
        for slot in self._slots.values():
            self._end_loan(slot, problem)

    def _end_loan(self, slot: _Slot, problem: str) -> None:
        if slot.loan is not None and not slot.loan.found.done():
            slot.loan.found.set_exception(ReplicaLostError(slot.id, problem, was_reached=True))

    # Slots that leave

    def leave(self, slots: Iterable[ReplicaId]) -> None:
        """These slots finish running calls, and get no new work for `LEFT_S`, whatever they
        report."""
        now_s = _now_s()
        self.have_left = {s: until_s for s, until_s in self.have_left.items() if now_s < until_s}
        for slot_id in sorted(slots):
            self.have_left[slot_id] = now_s + LEFT_S
            self.lose(slot_id, "it left its deployment")

    def lose(self, slot_id: ReplicaId, why: str) -> None:
        """End the slot's leases; the ingresses offer again and keep their queue position. If the
        slot is alive, its next report brings it back."""
        slot = self._slots.pop(slot_id, None)
        if slot is None:
            return
        is_planned = _now_s() < self.have_left.get(slot_id, 0.0)
        level = logging.INFO if is_planned else logging.WARNING
        log.log(level, "slot %s is lost: %s", slot_id, why)
        self._end_loan(slot, f"{why} while it measured a model")
        now_s, copy = _now_s(), self._state.placement.cards().get(slot.card)
        if copy is not None:
            self._state.loads.end(copy.id, now_s)
        self._state.handle(CardLost(now_s, slot.card))
        self.size_memories()

    # Host memory

    def _sleeps(self, slot: _Slot) -> bool:
        return self._state.spec.deployment(slot.deployment).engine.sleep

    def _place_of(self, slot: _Slot) -> HostId:
        """Where weights are kept: the host, or the slot if engines sleep (only it wakes them)."""
        host = slot.report.host
        return HostId(f"{host}/{slot.id}") if self._sleeps(slot) else host

    def size_memories(self) -> None:
        """Divide each host's memory equally among its slots whose engines sleep."""
        places: dict[HostId, set[HostId]] = {}
        for slot in self._slots.values():
            places.setdefault(slot.report.host, set()).add(self._place_of(slot))
        for of_host in places.values():
            each_bytes = self._state.policies.host_memory_bytes // len(of_host)
            for place in sorted(of_host):
                self._state.handle(HostMemorySized(_now_s(), HostMemory(place, each_bytes)))


def _held(report: SlotReport) -> tuple[InvocationId, ...]:
    return tuple(id for id, _ in report.held)


def _is_busy_elsewhere(report: SlotReport) -> bool:
    """The slot loads, or runs calls of a model that the pool does not know (yet)."""
    return report.state is SlotState.LOADING or bool(report.held)


def _now_s() -> float:
    return time.monotonic()
