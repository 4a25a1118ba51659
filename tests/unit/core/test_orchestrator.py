"""The pool's books hold whatever happens, and its decisions follow the policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.builders import a_profile, a_report, an_invocation

from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.decision import Admit, Defer, Hold, Rank, Route
from cato.core.events import (
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    PoliciesChanged,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReported,
    StreamLost,
    Ticked,
)
from cato.core.fairness import TokenShares
from cato.core.ids import InvocationId, PoolName, ReplicaId, RunId
from cato.core.length import LengthBelief
from cato.core.orchestrator import REPLICAS_ASKED, SILENCE_S, PoolOrchestrator
from cato.core.policies import (
    ADMIT_ALWAYS,
    NO_LOAD,
    AdmissionPolicy,
    OrderingPolicy,
    Policies,
    PreemptionPolicy,
    QueueLoad,
    RoutingPolicy,
    Work,
)
from cato.core.pool.buffers import MAX_HEAD_START_S, replaced_by
from cato.core.pool.leases import LEASE_GRACE_S
from cato.core.pool.refusal import MIN_RETRY_AFTER_S
from cato.core.pool.replica import expected_wait_s
from cato.core.profile import Profile
from cato.core.snapshot import (
    PREFIX_BLOCK_TOKENS,
    READING_S,
    Invocation,
    PoolSnapshot,
    ReplicaSnapshot,
    ReplicaView,
)
from cato.estimators.usl import UslFit
from cato.policies import schedulers
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.ordering.slack_priority import LateLast
from cato.policies.registry import ORDERING, ROUTING
from cato.policies.routing.cato import CatoRouting
from cato.policies.routing.foresight import LEAVES_ROOM
from cato.policies.routing.lateness import LEAVES_ROOM as TURN_LEAVES_ROOM

FAST, SLOW = a_profile(prefill_s=0.1), a_profile(prefill_s=1.0, token_s=0.1)
# What a prompt costs depends on its length, and the cache holds three blocks of prompts.
SMALL = replace(
    a_profile(prefill_token_s=0.001, batch_token_s=0.001),
    kv_capacity_tokens=3 * PREFIX_BLOCK_TOKENS,
)


@dataclass(frozen=True, slots=True)
class HoldsSome:
    """Leaves every invocation with a draw of at least one half in the queue."""

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        if invocation.draw >= 0.5 or not pool.replicas:
            return Hold("not this one")
        return Route(pool.replicas[-1].id, "the last")


@dataclass(frozen=True, slots=True)
class DefersSome:
    """Lets an invocation join when its draw is below one half, whatever runs."""

    closes_from: float = 1.0

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        if invocation.draw < 0.5:
            return Admit("this one may")
        return Defer("this one may not", closes=invocation.draw >= self.closes_from)


@dataclass(frozen=True, slots=True)
class TakesBackSome:
    """Takes back what runs and has a draw of at least 0.3, as many as wait."""

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
        load: QueueLoad = NO_LOAD,
    ) -> Sequence[tuple[InvocationId, str]]:
        some = [r.invocation.id for r in replica.running if r.invocation.draw >= 0.3]
        return [(id, "gives way") for id in some[: len(waiting)]]


SHIPPED = tuple(
    Policies(routing, ordering, late_binding, max_queued)
    for routing, ordering, late_binding in product(
        ROUTING.values(), ORDERING.values(), (True, False)
    )
    for max_queued in (0, 2, 1000)
)
HOLDING = tuple(Policies(HoldsSome(), o, late) for o in ORDERING.values() for late in (True, False))
ASKING = tuple(
    Policies(
        routing,
        ordering,
        late_binding,
        max_queued,
        admission,
        preemption,
        window,
        *order,
        asks_at_once=window != 2,
    )
    for routing, ordering in product(
        (ROUTING["power-of-two"], HoldsSome()), (FirstComeFirstServed(), LateLast())
    )
    for late_binding, max_queued in ((True, 1000), (True, 3), (False, 1000))
    for admission in (ADMIT_ALWAYS, DefersSome(), DefersSome(closes_from=0.75))
    for preemption in (None, TakesBackSome())
    for window, *order in ((0, False, False), (2, False, False), (3, True, True), (0, False, True))
)
PLAIN = tuple(
    Policies(routing, ordering, max_queued=max_queued)
    for routing, ordering in product((ROUTING["power-of-two"], HoldsSome()), ORDERING.values())
    for max_queued in (2, 1000)
)
# Late binding, with a reserve and with bounds of the queue.
BOUNDED = tuple(
    replace(p, reserve=reserve, max_queued_tokens=tokens, refuse_late=refuse_late)
    for p in ASKING
    if p.late_binding
    for reserve, tokens, refuse_late in ((0.5, None, False), (0.0, 100, True), (0.4, 300, True))
)
IMPATIENT = tuple(replace(p, patience_s=4.0) for p in ASKING if p.max_queued == 1000)
BOUNDED_EARLY = tuple(
    replace(p, max_queued_tokens=100, refuse_late=True) for p in ASKING if not p.late_binding
)
SPEED = UslFit(lambda_tokens_per_s=50.0, sigma=0.2, kappa=0.01, r2=1.0)
WHOLE = (
    schedulers.foresight(),
    schedulers.saber(SPEED, window=3),
    schedulers.static_cap(1),
    schedulers.static_cap(2),
    schedulers.cato(),
    *(schedulers.early(name) for name in ("round-robin", "power-of-two", "least-wait")),
    *(schedulers.OF_PROFILE[name](SLOW, 2) for name in ("tempo", "plas", "sjf", "edf")),
    schedulers.mapped("annealing", 2),
    replace(schedulers.mapped("moore-smith", 1), late_binding=True),
)
LATE_CATO = Policies(CatoRouting(), LateLast())


def a_pool(policies: Policies = LATE_CATO) -> PoolOrchestrator:
    return PoolOrchestrator(PoolName("p"), policies)


def offer(
    id: str, now_s: float = 0.0, *, attempt: int = 1, deadline_s: float = 10.0
) -> InvocationOffered:
    return InvocationOffered(
        now_s, an_invocation(id, attempt=attempt, arrived_at_s=now_s, deadline_s=deadline_s)
    )


def ended(id: str, now_s: float = 0.0, *, attempt: int = 1) -> InvocationEnded:
    return InvocationEnded(now_s, InvocationId(id), attempt, 10, "done")


def dispatched(commands: tuple[Command, ...]) -> list[tuple[str, str]]:
    return [(c.invocation_id, c.replica_id) for c in commands if isinstance(c, Dispatch)]


# Any sequence of events, against books kept in the plainest way


def as_offered(invocation: Invocation | None) -> Invocation | None:
    """Without the pool's own finding about its run, which `check_invariants` checks."""
    return None if invocation is None else replace(invocation, stage=())


@dataclass(slots=True)
class BookReplica:
    report: ReplicaReported
    adopted: set[InvocationId]
    # Beginnings of prompts that its engine keeps, the latest last; None: it keeps none.
    prefixes: list[int] | None

    @property
    def accepts(self) -> bool:
        return self.report.accepting and self.report.max_running > 0

    def cached_tokens(self, invocation: Invocation) -> int:
        known = [prefix in (self.prefixes or ()) for prefix in invocation.prefix]
        blocks = [*known, False].index(False)
        return min(blocks * PREFIX_BLOCK_TOKENS, invocation.prompt_tokens - 1)

    def __post_init__(self) -> None:
        self._drop_oldest()  # a cache can come back smaller

    def remember(self, invocation: Invocation) -> None:
        if self.prefixes is not None:
            others = [p for p in self.prefixes if p not in invocation.prefix]
            self.prefixes = [*others, *reversed(invocation.prefix)]
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        if self.prefixes is not None:
            blocks = self.report.profile.kv_capacity_tokens // PREFIX_BLOCK_TOKENS
            self.prefixes = self.prefixes[-blocks:]


@dataclass(slots=True)
class BookBuffer:
    """The latest run of a buffer, and since when it counts as waiting."""

    run_id: RunId
    began_at_s: float
    place_s: float
    ids: set[InvocationId] = field(default_factory=set)

    def is_later_than(self, invocation: Invocation) -> bool:
        if self.run_id == invocation.run_id:
            return False
        return (invocation.began_at_s, invocation.run_id) < (self.began_at_s, self.run_id)


@dataclass(frozen=True, slots=True)
class Ranked:
    """The latest rank of an invocation, and what it was judged by."""

    invocation: Invocation
    work: Work
    rank: Rank
    at_s: float


@dataclass(slots=True)
class BookLease:
    command: Dispatch
    at_s: float
    invocation: Invocation
    tokens: int = 0
    began_at_s: float | None = None

    def has_tokens(self, tokens: int, now_s: float) -> None:
        if tokens and self.began_at_s is None:
            self.began_at_s = now_s
        self.tokens = max(tokens, self.tokens)


@dataclass(slots=True)
class Books:
    """What must be true, by definition; checks every answer of the orchestrator against it.

    `binds_late`: the pool does so all the time, so that its tenants share it.
    """

    policies: Policies
    binds_late: bool
    ranked: dict[InvocationId, Ranked] = field(default_factory=dict)
    waiting: dict[InvocationId, Invocation] = field(default_factory=dict)
    leases: dict[InvocationId, BookLease] = field(default_factory=dict)
    replicas: dict[ReplicaId, BookReplica] = field(default_factory=dict)
    # What engines keep whose replicas are silent; no history takes as long as that is remembered.
    silent: dict[ReplicaId, list[int] | None] = field(default_factory=dict)
    # Preempted attempts that were not offered again.
    taken_back: dict[InvocationId, int] = field(default_factory=dict)
    refused: int = 0
    # Who still waits although something of a larger rank went to the replica.
    passed_over: list[tuple[InvocationId, ReplicaId]] = field(default_factory=list)
    buffers: dict[str, BookBuffer] = field(default_factory=dict)
    # What the event ends of older runs, in the words of the orchestrator.
    superseded: list[Command] = field(default_factory=list)
    # Prompts of what waits, as they were when it began to wait.
    prompts: dict[InvocationId, int] = field(default_factory=dict)
    shares: TokenShares = field(default_factory=TokenShares)
    # Since when the client of each waits for a token, and for how long it does.
    since_s: dict[InvocationId, float] = field(default_factory=dict)
    patience_s: dict[InvocationId, float] = field(default_factory=dict)
    # What the event put into the queue.
    newcomer: InvocationId | None = None
    # Whether some replica accepted work before the event.
    was_open: bool = False
    # How much of a dispatch work without an SLO has saved, and whether the next is its own.
    saved: float = 0.0
    is_turn_of_unbound: bool = False
    # What the event took back; it is offered last, and the reserve has no turn meanwhile.
    gave_way: set[InvocationId] = field(default_factory=set)

    def leased(self, id: ReplicaId) -> list[BookLease]:
        return [lease for lease in self.leases.values() if lease.command.replica_id == id]

    def held(self, id: ReplicaId) -> int:
        return len(self.leased(id)) + len(self.replicas[id].adopted)

    def has_room(self, id: ReplicaId) -> bool:
        r = self.replicas[id]
        return r.accepts and self.held(id) < r.report.max_running + r.report.standby

    def invocation(self, id: InvocationId) -> Invocation | None:
        lease = self.leases.get(id)
        return self.waiting.get(id) if lease is None else lease.invocation

    def aimed(self, event: Event) -> Event:
        """An attempt of 0 stands for one that is known; offered, for the one after it."""
        match event:
            case InvocationOffered(_, invocation) if invocation.attempt == 0:
                known = self._attempt(invocation.id)
                return replace(event, invocation=replace(invocation, attempt=known + 1))
            case InvocationEnded(_, id, 0) if self.leases and id not in self.taken_back:
                id = list(self.leases)[IDS.index(id) % len(self.leases)]
                return replace(event, invocation_id=id, attempt=self._attempt(id))
            case InvocationEnded(_, id, 0) | InvocationWithdrawn(_, id, 0):
                return replace(event, attempt=self.taken_back.get(id, self._attempt(id)))
            case ReplicaProgressed(_, _, tokens):
                for id, _ in tokens:
                    if id in self.leases:
                        return replace(event, replica_id=self.leases[id].command.replica_id)
        return event

    def _attempt(self, id: InvocationId) -> int:
        known = self.invocation(id)
        return 0 if known is None else known.attempt

    def note(self, event: Event) -> Dispatch | None:
        """Keep the fact; returns the lease that must be said again, if any."""
        self.superseded, self.newcomer = [], None
        self.was_open = bool(self.profiles)
        match event:
            case InvocationOffered(_, invocation):
                if invocation.buffer:
                    latest = self.buffers.get(invocation.buffer)
                    if latest is not None and latest.is_later_than(invocation):
                        self.taken_back.pop(invocation.id, None)
                        why = replaced_by(latest.run_id)
                        self.superseded = [Refuse(invocation.id, why, 0.0, superseded=True)]
                        return None
                    invocation = self._placed(invocation)
                return self._offer(invocation)
            case InvocationEnded(_, id, attempt, tokens, outcome):
                # Its end and the order to take it back have crossed.
                has_crossed = self.taken_back.get(id) == attempt and outcome == "done"
                if id in self.leases and (
                    has_crossed or self.leases[id].command.attempt == attempt
                ):
                    self._free(id, tokens)
                elif has_crossed and id in self.waiting:
                    self._leave(id)
                # After another end its ingress withdraws it, or offers the next attempt.
                if outcome == "done" and id not in self.leases:
                    self.taken_back.pop(id, None)
                self._unadopt(id)
            case InvocationWithdrawn(_, id, attempt):
                known = self.invocation(id)
                is_late = known is not None and attempt < known.attempt
                if is_late and id not in self.taken_back:
                    return None
                self.taken_back.pop(id, None)
                if id in self.waiting:
                    self._leave(id)
                if id in self.leases:
                    self._free(id)
                self._unadopt(id)
            case ReplicaReported(now_s, replica_id):
                for lease in self.leased(replica_id):
                    id = lease.command.invocation_id
                    if id not in event.held and now_s - lease.at_s > LEASE_GRACE_S:
                        self._free(id)
                adopted = set(event.held) - set(self.leases) - set(self.waiting)
                before = self.replicas.get(replica_id)
                silent = self.silent.pop(replica_id, None)
                prefixes = (before.prefixes if before else silent) or []
                self.replicas[replica_id] = BookReplica(
                    event, adopted, prefixes if event.prefix_caching else None
                )
            case ReplicaLost(_, replica_id):
                self.silent.pop(replica_id, None)
                self._lose(replica_id)
            case StreamLost(_, replica_id, id, attempt) if replica_id in self.replicas:
                lease = self.leases.get(id)
                held = None if lease is None else (lease.command.replica_id, lease.command.attempt)
                if held == (replica_id, attempt):
                    self._free(id)
                known = self.replicas[replica_id]
                known.report = replace(known.report, accepting=False)
            case PoliciesChanged(_, policies):
                self.policies = policies
                if not policies.reserve:
                    self.saved = 0.0
            case Ticked(now_s):
                for replica in list(self.replicas.values()):
                    if now_s - replica.report.now_s > SILENCE_S:
                        self.silent[replica.report.replica_id] = replica.prefixes
                        self._lose(replica.report.replica_id)
            case FirstTokenSent(now_s, id):
                if id in self.leases:
                    self.leases[id].has_tokens(1, now_s)
            case ReplicaProgressed(now_s, replica_id, tokens):
                for id, n in tokens:
                    if id in self.leases and self.leases[id].command.replica_id == replica_id:
                        self.leases[id].has_tokens(n, now_s)
        return None

    def _offer(self, invocation: Invocation) -> Dispatch | None:
        id, attempt = invocation.id, invocation.attempt
        if self.taken_back.get(id, attempt) < attempt:
            del self.taken_back[id]
        if id in self.leases:
            if attempt <= self.leases[id].command.attempt:
                return self.leases[id].command
            self._free(id)
        old = self.waiting.get(id)
        if old is None:
            self._join(invocation, invocation.arrived_at_s)
            self._unadopt(id)
            self.newcomer = id
        elif attempt >= old.attempt:
            self.waiting[id] = invocation
        return None

    def _placed(self, invocation: Invocation) -> Invocation:
        """End what there is of other runs of its buffer: it takes their place, within reason."""
        latest = self.buffers.get(invocation.buffer)
        place_s = invocation.arrived_at_s
        if latest is None or latest.run_id != invocation.run_id:
            why, ended_any = replaced_by(invocation.run_id), False
            for id in IDS:
                other = self.invocation(id)
                if other is None or other.buffer != invocation.buffer:
                    continue
                assert other.run_id != invocation.run_id
                ended_any = True
                if id in self.waiting:
                    self._leave(id)
                    self.superseded.append(Refuse(id, why, 0.0, superseded=True))
                else:
                    lease = self._free(id).command
                    self.superseded.append(
                        Preempt(id, lease.attempt, lease.replica_id, why, superseded=True)
                    )
            if latest is not None and ended_any:
                earliest_s = invocation.began_at_s - MAX_HEAD_START_S
                place_s = min(place_s, max(latest.place_s, earliest_s))
            latest = BookBuffer(invocation.run_id, invocation.began_at_s, place_s)
            self.buffers[invocation.buffer] = latest
        elif invocation.id in latest.ids:
            place_s = min(place_s, latest.place_s)
        latest.ids.add(invocation.id)
        return replace(invocation, arrived_at_s=place_s)

    def take(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Check that `commands` keep every promise, and keep them."""
        now_s = event.now_s
        ended = [c for c in commands if not isinstance(c, Dispatch) and c.superseded]
        assert ended == self.superseded, "what is superseded is told so once"
        assert list(commands[: len(ended)]) == ended, "before anything takes its place"
        self.is_turn_of_unbound, is_first = False, True
        self.gave_way = {c.invocation_id for c in commands[len(ended) :] if isinstance(c, Preempt)}
        ahead: set[str] = set()
        for command in commands[len(ended) :]:
            id = command.invocation_id
            if isinstance(command, Preempt):
                self._take_back(event, command)
                continue
            assert id in self.waiting, f"{id} does not wait"
            assert id not in self.leases
            if isinstance(command, Refuse):
                self._check_refusal(event, command)
                self._leave(id)
                self.refused += 1
                continue
            if is_first:
                self._note_turn()
                ahead = self._tenants_ahead()
                self._check_its_tenant_is_not_ahead(command)
            is_reserved = "are for work without an SLO" in command.reason
            invocation = self.waiting[id]
            if is_reserved:
                assert is_first
                assert self.is_turn_of_unbound, "nothing was saved for it"
                assert invocation.deadline_s == inf
                self.saved -= 1
            is_first = False
            assert command.attempt == invocation.attempt
            assert command.replica_id in self.replicas, "dispatched to an unknown replica"
            assert self.has_room(command.replica_id), "dispatched to a full or closed replica"
            self._check_rank(command, invocation, now_s)
            assert command.queue_s == now_s - invocation.arrived_at_s
            assert command.slack_s == invocation.deadline_s - now_s
            self._check_service(command, invocation)
            self._dispatch(command, now_s)
        if is_first:
            self._note_turn()
        if self.is_plain:
            for command in commands:
                if isinstance(command, Dispatch) and not self.is_turn_of_unbound:
                    self._check_nobody_was_passed_over(command, ahead, now_s)

    def check_newcomer(self, event: Event) -> None:
        """A newcomer that waits is within the bounds."""
        invocation = self.waiting.get(self.newcomer) if self.newcomer else None
        if invocation is None or not self._may_be_refused(invocation):
            return
        # Bound early, what waits is not counted by tenant.
        if self.binds_late or len({i.tenant for i in self.waiting.values()}) == 1:
            assert not self._is_too_much(invocation)
        assert not self._are_too_many_tokens()
        if self.may_be_shed(invocation):
            assert not self.is_hopeless(invocation, event.now_s)

    def _dispatch(self, command: Dispatch, now_s: float) -> None:
        invocation = self._leave(command.invocation_id)
        self.replicas[command.replica_id].remember(invocation)
        self.leases[invocation.id] = BookLease(command, now_s, invocation)
        self._charge(invocation, invocation.prompt_tokens, invocation.expected_tokens)
        if self.unbound and invocation.deadline_s < inf:
            share = self.policies.reserve
            self.saved = min(1.0, self.saved + share / (1 - share))

    def _charge(self, invocation: Invocation, prompt: int, output: int) -> None:
        self.shares.charge(invocation.tenant, invocation.weight, prompt, output)

    def _join(self, invocation: Invocation, since_s: float) -> None:
        self.since_s[invocation.id] = since_s
        slo_s = invocation.deadline_s - invocation.arrived_at_s
        self.patience_s[invocation.id] = max(self.policies.patience_s, slo_s)
        self.waiting[invocation.id] = invocation
        self.prompts[invocation.id] = invocation.prompt_tokens
        self.shares.joined(invocation.tenant)

    def _leave(self, id: InvocationId) -> Invocation:
        invocation = self.waiting.pop(id)
        del self.prompts[id]
        self.shares.left(invocation.tenant)
        return invocation

    def _free(self, id: InvocationId, output_tokens: int = 0) -> BookLease:
        """A lease ends; its tenant pays for what was generated."""
        lease = self.leases.pop(id)
        got = max(output_tokens, lease.tokens)
        self._charge(lease.invocation, 0, got - lease.invocation.expected_tokens)
        return lease

    @property
    def unbound(self) -> set[InvocationId]:
        return {i.id for i in self.waiting.values() if i.deadline_s == inf}

    def _note_turn(self) -> None:
        has_turn = self.saved >= 1 and bool(self.unbound)
        self.is_turn_of_unbound = has_turn and not self.gave_way

    def _check_refusal(self, event: Event, refusal: Refuse) -> None:
        invocation = self.waiting[refusal.invocation_id]
        assert refusal.retry_after_s >= MIN_RETRY_AFTER_S
        if "its client" in refusal.reason:
            self._check_client_would_leave(event, invocation, refusal.reason)
            return
        if isinstance(event, Ticked):
            assert self.policies.refuse_late
            assert self.may_be_shed(invocation)
            assert self.is_hopeless(invocation, event.now_s)
            return
        assert isinstance(event, InvocationOffered)
        assert invocation.id == self.newcomer
        assert self._may_be_refused(invocation)
        if refusal.reason.startswith("it would miss its SLO"):
            assert self.may_be_shed(invocation)
            earlier = [
                i
                for i in self.waiting.values()
                if i is not invocation and i.deadline_s <= invocation.deadline_s
            ]
            has_idle = any(r.accepts and not self.held(id) for id, r in self.replicas.items())
            assert self.is_hopeless(invocation, event.now_s) or earlier or not has_idle
        else:
            assert self._is_too_much(invocation) or self._are_too_many_tokens()

    def _check_client_would_leave(self, event: Event, invocation: Invocation, reason: str) -> None:
        """It has waited for so long, or has not begun and is predicted to."""
        patience_s = self.patience_s[invocation.id]
        assert patience_s < inf
        if reason.startswith("the patience of its client"):
            assert not isinstance(event, InvocationOffered)
            # What its prompt takes is left, of half of its patience at most.
            assert event.now_s >= self.since_s[invocation.id] + patience_s / 2
        else:
            assert self._may_be_refused(invocation)
            assert invocation.served_s == 0
            assert self.was_open

    def _may_be_refused(self, invocation: Invocation) -> bool:
        """What goes on after a lost replica or router was admitted before."""
        return invocation.attempt == 1 and not invocation.was_taken

    def may_be_shed(self, invocation: Invocation) -> bool:
        is_new = invocation.attempt == 1 and invocation.served_s == 0
        has_slo = invocation.deadline_s < inf
        return self.policies.refuse_late and is_new and has_slo and bool(self.profiles)

    def is_hopeless(self, invocation: Invocation, now_s: float) -> bool:
        """Late even if it ran at once, alone."""
        return now_s + min(invocation.remaining_s(p) for p in self.profiles) > invocation.deadline_s

    @property
    def _bounded(self) -> dict[InvocationId, Invocation]:
        """What waited when the bounds were asked: before anything gave way to the newcomer."""
        return {id: i for id, i in self.waiting.items() if id not in self.gave_way}

    def _is_too_much(self, invocation: Invocation) -> bool:
        """The queue is full, and its tenant has its part of it."""
        bound, queue = self.policies.max_queued, self._bounded
        tenants = Counter(i.tenant for i in queue.values())
        if len(queue) <= bound or len(tenants) < 2 or not self.binds_late:
            return len(queue) > bound
        return tenants[invocation.tenant] > bound / len(tenants)

    def _are_too_many_tokens(self) -> bool:
        bound, queue = self.policies.max_queued_tokens, self._bounded
        return (
            bound is not None and sum(self.prompts[id] for id in queue) > bound and len(queue) > 1
        )

    @property
    def is_plain(self) -> bool:
        """Only the routing policy may leave anything in the queue."""
        p = self.policies
        by_call = not (p.preemption or p.window or p.strict or p.mapping)
        return by_call and p.admission is ADMIT_ALWAYS

    @property
    def asks_all(self) -> bool:
        """Whatever waits is offered to every replica with room, and the answer never changes."""
        p = self.policies
        if not p.late_binding or p.window or p.strict or p.mapping:
            return False
        return p.admission in (ADMIT_ALWAYS, DefersSome())

    def _take_back(self, event: Event, command: Preempt) -> None:
        """It waits again, with what it has generated as a part of its prompt."""
        if isinstance(event, InvocationOffered):
            assert self.newcomer == event.invocation.id, "only new calls ask for room"
            assert event.invocation.deadline_s < inf
            assert self.policies.late_binding
            assert self.policies.asks_at_once
        else:
            assert isinstance(event, ReplicaProgressed)
            assert event.replica_id == command.replica_id
        lease = self._free(command.invocation_id)
        assert (lease.command.replica_id, lease.command.attempt) == (
            command.replica_id,
            command.attempt,
        )
        before = lease.invocation
        assert before.resumable
        self.taken_back[before.id] = before.attempt
        rest = replace(
            before,
            attempt=before.attempt + 1,
            prompt_tokens=before.prompt_tokens + lease.tokens,
            expected_tokens=max(1, before.expected_tokens - lease.tokens),
            generated=before.generated + lease.tokens,
        )
        began_s, due_s = lease.began_at_s, before.deadline_s
        if before.until_first_token and began_s is not None:
            in_time = began_s <= due_s < inf
            if in_time:  # from now on it must keep its pace
                pace_s = min(before.tpot_target_s, READING_S)
                due_s = began_s + pace_s * (rest.generated + rest.left_tokens() - 1)
            rest = replace(rest, until_first_token=False, deadline_s=due_s, begun_in_time=in_time)
        self._join(rest, event.now_s if rest.generated else before.arrived_at_s)

    def _check_service(self, command: Dispatch, invocation: Invocation) -> None:
        """It takes as long as its profile says, less what is cached of its prompt."""
        replica = self.replicas[command.replica_id]
        profile, tokens = replica.report.profile, invocation.prompt_tokens
        batch = min(self.held(command.replica_id) + 1, replica.report.max_running)
        uncached = tokens - replica.cached_tokens(invocation)
        saved_s = profile.prefill_s(tokens) - profile.prefill_s(uncached)
        service_s = profile.service_s(tokens, invocation.expected_tokens, batch)
        assert command.service_s == pytest.approx(service_s - saved_s)
        assert command.remaining_s == pytest.approx(
            invocation.remaining_s(profile, batch) - saved_s
        )

    def _check_its_tenant_is_not_ahead(self, command: Dispatch) -> None:
        """Who is ahead of its share goes first only when nobody else may go."""
        p = self.policies
        if not self.binds_late or not self.asks_all or not self.is_plain or p.reserve:
            return
        ahead = self._tenants_ahead()
        if self.waiting[command.invocation_id].tenant in ahead:
            for i in self.waiting.values():
                if i.tenant not in ahead:
                    self.passed_over.append((i.id, command.replica_id))

    def _check_rank(self, command: Dispatch, invocation: Invocation, now_s: float) -> None:
        """What goes has a rank that holds, by the replicas that there are."""
        ranked = self.ranked[invocation.id]
        rank = ranked.rank
        assert as_offered(ranked.invocation) == invocation
        assert ranked.at_s == now_s or rank.until_s > now_s, "the rank has run out"
        assert (command.priority, command.reason.split("; ")[0]) == (rank.priority, rank.reason)
        assert ranked.work.remaining_s == min(invocation.remaining_s(p) for p in self.profiles)
        if self.is_plain:
            assert rank.value in self._ranks(invocation, ranked.work, now_s)

    def _tenants_ahead(self) -> set[str]:
        """Of those that wait, who is ahead of its share."""
        bound = self.shares.bound()
        return {i.tenant for i in self.waiting.values() if self.shares.served(i.tenant) > bound}

    def _check_nobody_was_passed_over(
        self, command: Dispatch, ahead: set[str], now_s: float
    ) -> None:
        """`ahead`: tenants that were so when the queue was looked at."""
        ranked = self.ranked[command.invocation_id]
        tenant = self.leases[command.invocation_id].invocation.tenant
        for i in self.waiting.values():
            if i.tenant != tenant and i.tenant in ahead:
                continue
            if i.tenant != tenant and not self.binds_late:
                continue
            own = replace(ranked.work, remaining_s=min(i.remaining_s(p) for p in self.profiles))
            if max(self._ranks(i, own, now_s)) < ranked.rank.value:
                self.passed_over.append((i.id, command.replica_id))

    def _ranks(self, invocation: Invocation, work: Work, now_s: float) -> set[int]:
        """Its rank by definition; two where it changes at this very moment, but for rounding."""
        around = (now_s - 1e-6, now_s, now_s + 1e-6)
        return {self.policies.ordering.rank(invocation, work, t).value for t in around}

    @property
    def profiles(self) -> set[Profile]:
        """Of what accepts work: an invocation is judged by the fastest of them."""
        return {r.report.profile for r in self.replicas.values() if r.accepts}

    def _unadopt(self, id: InvocationId) -> None:
        for replica in self.replicas.values():
            replica.adopted.discard(id)

    def _lose(self, id: ReplicaId) -> None:
        if self.replicas.pop(id, None) is not None:
            for lease in self.leased(id):
                self._free(lease.command.invocation_id)


IDS = [InvocationId(f"i{n}") for n in range(7)]
MANY = 1000  # attempts: more than any history has
REPLICAS = [ReplicaId(f"r{n}") for n in range(3)]
ids, replica_ids = st.sampled_from(IDS), st.sampled_from(REPLICAS)
offers = st.builds(
    an_invocation,
    ids,
    prompt=st.integers(1, 3),
    tokens=st.integers(1, 400),
    deadline_s=st.floats(-2, 40),
    downstream_s=st.sampled_from([0.0, 1.0]),
    until_first_token=st.booleans(),
    draw=st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8]),
    attempt=st.sampled_from([1, 1, 1, 2, 3, 0]),
)


def a_call(
    *,
    tenant: str = "",
    weight: float = 1.0,
    run: str = "",
    buffer: str = "",
    began_at_s: float = 0.0,
    has_slo: bool = True,
    resumable: bool = True,
) -> dict[str, object]:
    """What stays the same in all offers of a call."""
    fixed: dict[str, object] = {"tenant": tenant, "weight": weight, "resumable": resumable}
    fixed |= {"buffer": buffer, "began_at_s": began_at_s}
    if run:
        fixed["run_id"] = RunId(run)
    return fixed if has_slo else {**fixed, "deadline_s": inf}


# Three runs of a buffer, one of them of two calls, two that began at the same moment, and one that
# began long after them; one of another buffer, and others of no buffer.
CALLS = dict(
    zip(
        IDS,
        (
            a_call(tenant="a", run="x1", buffer="x", began_at_s=1.0),
            a_call(tenant="a", run="x1", buffer="x", began_at_s=1.0, resumable=False),
            a_call(tenant="a", run="x2", buffer="x", began_at_s=1.0),
            a_call(tenant="b", weight=4.0, run="x3", buffer="x", began_at_s=30.0, has_slo=False),
            a_call(tenant="b", weight=4.0, run="y", buffer="y"),
            a_call(tenant="a", has_slo=False),
            a_call(resumable=False),
        ),
        strict=True,
    )
)
# With what only some policies look at: tenants, buffers, prompts that begin alike, a belief of the
# length, a pace, no SLO at all.
rich_offers = st.builds(
    lambda invocation, tokens, length, tpot_s, served_s, prefix, was_taken: replace(
        invocation,
        prompt_tokens=max(1, PREFIX_BLOCK_TOKENS * len(prefix) - 1 + invocation.prompt_tokens),
        expected_tokens=tokens or invocation.expected_tokens,
        length=length,
        tpot_target_s=tpot_s,
        served_s=served_s,
        prefix=prefix,
        was_taken=was_taken,
        **CALLS[invocation.id],
    ),
    offers,
    st.sampled_from([0, 0, 15_000]),
    st.sampled_from([None, LengthBelief((5.0, 40.0, 300.0))]),
    st.sampled_from([inf, 0.05]),
    st.sampled_from([0.0, 0.0, 5.0]),
    st.sampled_from([(), (1,), (1, 2), (1, 2, 3), (4, 5), (6,)]),
    st.sampled_from([False, False, False, True]),
)
held = st.lists(st.sampled_from([*IDS, "stranger"]), max_size=3, unique=True)
reports = st.builds(
    lambda report, prefix_caching: replace(report, prefix_caching=prefix_caching),
    st.builds(
        a_report,
        replica_ids,
        slots=st.sampled_from([1, 1, 2, 2, 0]),
        standby=st.integers(0, 1),
        accepting=st.sampled_from([True, True, True, False]),
        held=st.one_of(st.just(()), st.just(()), held),
        profile=st.sampled_from([FAST, SLOW, SMALL]),
    ),
    st.sampled_from([True, True, False]),
)
lost = st.builds(ReplicaLost, st.just(0.0), replica_ids, st.just("gone"))
broken = st.builds(
    StreamLost, st.just(0.0), replica_ids, ids, st.sampled_from([1, 1, 2]), st.just("broke")
)
ends = st.builds(
    InvocationEnded,
    st.just(0.0),
    ids,
    st.sampled_from([0, 0, 1, 2, 3]),
    st.sampled_from([1, 9, 15_000]),
    st.sampled_from(["done", "done", "stopped"]),
)
withdrawals = st.builds(
    InvocationWithdrawn, st.just(0.0), ids, st.sampled_from([0, 1, 2, 3]), st.just("left")
)
first_tokens = st.builds(FirstTokenSent, st.just(0.0), ids)
ticks = st.just(Ticked(0.0))
progress = st.builds(
    ReplicaProgressed,
    st.just(0.0),
    replica_ids,
    st.lists(st.tuples(ids, st.integers(0, 30)), max_size=4).map(tuple),
)
steps_s = st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5, 1.0, 2.0, 6.0])
ALONE = replace(a_report(REPLICAS[0], profile=SMALL), prefix_caching=True)
# Replicas that are there before anything else happens.
openings = st.sampled_from(
    [
        [],
        [a_report(REPLICAS[0])],
        [a_report(REPLICAS[1], standby=1, profile=SLOW)],
        [a_report(REPLICAS[0], slots=2), a_report(REPLICAS[2], profile=SMALL)],
    ]
)


def histories(
    policies: tuple[Policies, ...],
    offers: st.SearchStrategy[Invocation] = offers,
    *,
    is_busy: bool = False,
) -> st.SearchStrategy[list[Event]]:
    """`is_busy`: one replica stays there, and nothing but calls comes and goes."""
    offered = offers.map(lambda invocation: InvocationOffered(0.0, invocation))
    changes = st.builds(PoliciesChanged, st.just(0.0), st.sampled_from(policies))
    events = (*(offered,) * 5, *(ends,) * 3, *(reports,) * 2, *(progress,) * 2)
    events += (withdrawals, first_tokens, lost, broken, ticks, changes)
    if is_busy:
        events = (*(offered,) * 4, *(ends,) * 3, *(progress,) * 2)
    # `one_of` would take each of them once.
    step = st.tuples(steps_s, st.integers(0, len(events) - 1).flatmap(events.__getitem__))
    # Lists without a least size are short ones.
    steps = st.one_of(st.lists(step, max_size=40), st.lists(step, min_size=20, max_size=60))

    def timed(steps: list[tuple[float, Event]]) -> list[Event]:
        now_s, history = 0.0, []
        for step_s, event in steps:
            now_s += step_s
            if isinstance(event, InvocationOffered):
                shifted = replace(
                    event.invocation,
                    arrived_at_s=now_s,
                    deadline_s=now_s + event.invocation.deadline_s,
                )
                event = replace(event, invocation=shifted)
            history.append(replace(event, now_s=now_s))
        return history

    return st.builds(
        lambda opening, steps: timed([(0.0, event) for event in opening] + steps),
        st.just([ALONE]) if is_busy else openings,
        steps,
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that a pool put to its policies: may this invocation go there?"""

    invocation: Invocation
    replica_id: ReplicaId | None
    answer: Route | Hold | Admit | Defer


@dataclass(frozen=True, slots=True)
class WatchedRouting:
    policy: RoutingPolicy
    asked: list[Asked | None]

    def route(self, invocation: Invocation, pool: PoolSnapshot) -> Route | Hold:
        ids = [r.id for r in pool.replicas]
        assert ids == sorted(set(ids)), "replicas are shown once each, in the order of their ids"
        answer = self.policy.route(invocation, pool)
        self.asked.append(Asked(invocation, None, answer))
        return answer


@dataclass(frozen=True, slots=True)
class WatchedAdmission:
    policy: AdmissionPolicy
    asked: list[Asked | None]

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        assert replica.accepting
        answer = self.policy.admit(invocation, replica, now_s)
        self.asked.append(Asked(invocation, replica.id, answer))
        return answer


@dataclass(frozen=True, slots=True)
class WatchedOrdering:
    policy: OrderingPolicy
    ranked: dict[InvocationId, Ranked]

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        rank = self.policy.rank(invocation, work, now_s)
        self.ranked[invocation.id] = Ranked(invocation, work, rank, now_s)
        return rank


@dataclass(frozen=True, slots=True)
class WatchedPreemption:
    """Notes None where calls give way: afterwards all may be asked once more."""

    policy: PreemptionPolicy
    asked: list[Asked | None]

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
        load: QueueLoad = NO_LOAD,
    ) -> Sequence[tuple[InvocationId, str]]:
        found = self.policy.preempt(replica, waiting, now_s, place_s, load)
        if found:
            self.asked.append(None)
        return found


def watched(
    policies: Policies, asked: list[Asked | None], ranked: dict[InvocationId, Ranked]
) -> Policies:
    """The same policies, and a list of what they were asked."""
    admission, preemption = policies.admission, policies.preemption
    if admission is not ADMIT_ALWAYS:
        admission = WatchedAdmission(admission, asked)
    if preemption is not None:
        preemption = WatchedPreemption(preemption, asked)
    return replace(
        policies,
        routing=WatchedRouting(policies.routing, asked),
        ordering=WatchedOrdering(policies.ordering, ranked),
        admission=admission,
        preemption=preemption,
    )


def check_questions(
    event: Event, commands: tuple[Command, ...], asked: list[Asked | None], books: Books
) -> None:
    """Only what was admitted goes; who closes is asked no more; `window` and `strict` hold."""
    policies = books.policies
    given = set(dispatched(commands))
    rounds: list[list[Asked]] = [[]]
    for a in asked:
        if a is None:  # for a newcomer: before there was room, and after
            rounds.append([])
        else:
            rounds[-1].append(a)
    if books.is_turn_of_unbound:
        at = next((n for n, questions in enumerate(rounds) if questions), None)
        if at is not None:
            rounds[at] = after_the_reserve(rounds[at], given, books)
    admitted: set[tuple[InvocationId, ReplicaId]] = set()
    for questions in rounds:
        admitted |= admitted_by(questions)
    if policies.admission is not ADMIT_ALWAYS:
        assert admitted == given
    if policies.late_binding:
        for questions in rounds:
            check_order(event, commands, questions, books)


def admitted_by(asked: list[Asked]) -> set[tuple[InvocationId, ReplicaId]]:
    """What may go where; a replica that closed is not asked again."""
    closed: set[ReplicaId] = set()
    admitted: set[tuple[InvocationId, ReplicaId]] = set()
    for a in asked:
        if a.replica_id is None:
            continue
        assert a.replica_id not in closed, f"{a.replica_id} is closed"
        if isinstance(a.answer, Admit):
            admitted.add((a.invocation.id, a.replica_id))
        elif isinstance(a.answer, Defer) and a.answer.closes:
            closed.add(a.replica_id)
    return admitted


def check_order(
    event: Event, commands: tuple[Command, ...], asked: list[Asked], books: Books
) -> None:
    """Each is asked about once, in order; `window` and `strict` hold."""
    policies = books.policies
    order = [a.invocation for a in asked if a.replica_id is None]
    assert len({i.id for i in order}) == len(order), "asked about twice"
    assert not policies.window or len(order) <= policies.window
    gone = {c.invocation_id for c in commands if isinstance(c, Dispatch)}
    rank_of = {id: r.rank.value for id, r in books.ranked.items()}
    if policies.strict:
        least: float = inf
        for i in order:
            assert rank_of[i.id] <= least, "something of a smaller rank was passed over"
            least = least if i.id in gone else min(least, rank_of[i.id])
    # An offer may ask about the newcomer alone: who waited before it was asked before.
    if order and not isinstance(event, InvocationOffered):
        for asked_of in order:
            for id in set(books.waiting) - {i.id for i in order} - books.gave_way:
                if books.waiting[id].tenant == asked_of.tenant:
                    assert rank_of[asked_of.id] <= rank_of[id], "out of order"


def after_the_reserve(
    asked: list[Asked], given: set[tuple[InvocationId, ReplicaId]], books: Books
) -> list[Asked]:
    """The first question is about work without an SLO, which only a closed replica keeps back."""
    first, *rest = asked
    is_newcomer = first.invocation.id == books.newcomer
    if is_newcomer and first.invocation.deadline_s < inf:
        return asked  # it may be asked about alone
    assert first.invocation.deadline_s == inf
    if isinstance(first.answer, Hold):
        return rest
    assert isinstance(first.answer, Route)
    place = (first.invocation.id, first.answer.replica_id)
    if books.policies.admission is not ADMIT_ALWAYS:
        admission, *rest = rest
        if isinstance(admission.answer, Defer) and admission.answer.closes:
            return rest
    assert place in given or is_newcomer
    given.discard(place)
    return rest


def play(
    policies: Policies, history: list[Event], *, some_held: bool, never_idle: bool = False
) -> PoolOrchestrator:
    """Feed `history` and check every promise after every event.

    `some_held`: the policies leave in the queue, if anything, what has a draw of at least one half.
    `never_idle`: they give an idle replica whatever waits for it.
    """
    asked: list[Asked | None] = []
    changes = [e.policies for e in history if isinstance(e, PoliciesChanged)]
    books = Books(policies, all(p.late_binding for p in (policies, *changes)))
    pool = a_pool(watched(policies, asked, books.ranked))
    for event in history:
        event = books.aimed(event)
        said_again = books.note(event)
        if isinstance(event, PoliciesChanged):
            event = PoliciesChanged(event.now_s, watched(event.policies, asked, books.ranked))
        asked.clear()
        commands = pool.handle(event)
        if said_again is not None:
            assert commands == (said_again,)
            assert not asked
        else:
            books.take(event, commands)
            books.check_newcomer(event)
            check_questions(event, commands, asked, books)
        check_picture(pool, books, event.now_s, never_idle=never_idle)
        check_counters(pool, books)
        for id, replica_id in books.passed_over:
            why = pool.why_waiting(id)
            if books.policies.late_binding:
                assert some_held, f"{id} was passed over: {why}"
                assert books.waiting[id].draw >= 0.5
            else:
                assert not why.startswith(f"in the queue of {replica_id}:")
        books.passed_over.clear()
        if isinstance(event, Ticked):
            for i in books.waiting.values():
                hopeless = books.may_be_shed(i) and books.is_hopeless(i, event.now_s)
                assert not hopeless, f"{i.id} waits although it can no longer meet its SLO"
        if books.asks_all:
            has_room = any(books.has_room(id) for id in books.replicas)
            kept = [i for i in books.waiting.values() if not some_held or i.draw < 0.5]
            kept = [i for i in kept if not waits_on_purpose(pool.why_waiting(i.id))]
            assert not (kept and has_room), f"{kept[0].id} waits although there is room"
    return pool


def check_picture(pool: PoolOrchestrator, books: Books, now_s: float, *, never_idle: bool) -> None:
    picture = pool.picture(now_s)
    assert picture.queued == len(books.waiting)
    assert picture.refused == books.refused
    assert {r.id: r.held for r in picture.replicas} == {id: books.held(id) for id in books.replicas}
    assert not set(books.leases) & set(books.waiting)
    for id in IDS:
        assert as_offered(pool.invocation(id)) == books.invocation(id)
    for buffer, latest in books.buffers.items():
        there = [i for i in map(pool.invocation, IDS) if i is not None and i.buffer == buffer]
        assert {i.run_id for i in there} <= {latest.run_id}, "an older run is there still"
    for r in picture.replicas:
        assert r.prefilling == sum(x.began_at_s is None for x in books.leased(r.id))
        check_prompts_ahead(pool, r)
        assert r.wait_s >= 0
        assert isfinite(r.wait_s) or r.max_running == 0
        is_idle = books.has_room(r.id) and r.held == 0
        if is_idle and never_idle:
            waits_for_it: list[str] = [f"{r.queued} bound to it"] * (r.queued > 0)
            if books.policies.late_binding:
                waits_for_it = [pool.why_waiting(id) for id in books.waiting]
            waits_for_it = [why for why in waits_for_it if not waits_on_purpose(why)]
            assert not waits_for_it, f"{r.id} is idle while calls wait: {waits_for_it}"


def waits_on_purpose(why: str) -> bool:
    """For room that is kept for others, or for another replica."""
    return why in (LEAVES_ROOM, TURN_LEAVES_ROOM) or why.startswith("waits for ")


def check_prompts_ahead(pool: PoolOrchestrator, r: ReplicaSnapshot) -> None:
    leases = [lease for lease in pool._leases.by_id.values() if lease.replica_id == r.id]
    ahead = [x.uncached_tokens for x in leases if x.running.first_token_at_s is None]
    assert (r.prefilling, r.prompt_tokens_ahead) == (len(ahead), sum(ahead))
    assert r.context_tokens == sum(lease.running.context_tokens for lease in leases)
    assert r.prompts_ahead_s == 0 or ahead


def check_counters(pool: PoolOrchestrator, books: Books) -> None:
    """What the pool counts on the way is what there is."""
    pool.check_invariants()
    assert pool._backlog.prompt_tokens == sum(books.prompts.values())
    assert set(pool._backlog.unbound) == books.unbound
    assert pool._taken_back == books.taken_back
    if books.binds_late:
        assert pool._dispatcher.saved == pytest.approx(books.saved)
        for tenant in {str(call["tenant"]) for call in CALLS.values()}:
            assert pool._backlog.shares.waiting(tenant) == books.shares.waiting(tenant)
            assert pool._backlog.shares.served(tenant) == pytest.approx(books.shares.served(tenant))


@settings(max_examples=120)
@given(st.sampled_from(SHIPPED), histories(SHIPPED))
def test_books_and_decisions_hold_under_any_events_with_the_shipped_policies(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=False)


@settings(max_examples=60)
@given(st.sampled_from(HOLDING), histories(HOLDING))
def test_only_what_the_routing_policy_holds_is_passed_over(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=True)


@settings(max_examples=200)
@given(st.sampled_from(ASKING), histories(ASKING))
def test_books_hold_with_policies_that_defer_close_take_back_and_look_at_a_part(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=True)


@settings(max_examples=250)
@given(st.sampled_from(WHOLE), histories(WHOLE, rich_offers))
def test_books_hold_with_whole_schedulers_and_nothing_idles_while_work_waits(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=True, never_idle=True)


@settings(max_examples=300)
@given(st.sampled_from(PLAIN), histories(PLAIN, rich_offers))
def test_tenants_share_and_runs_replace_each_other_where_nothing_else_decides(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=True)


@settings(max_examples=200)
@given(st.sampled_from(IMPATIENT), histories(IMPATIENT, rich_offers))
def test_books_hold_where_clients_lose_patience(policies: Policies, history: list[Event]) -> None:
    play(policies, history, some_held=True)


BUSY = PLAIN + tuple(p for p in BOUNDED if p.max_queued == 1000 and not p.max_queued_tokens)
no_buffers = rich_offers.map(lambda invocation: replace(invocation, attempt=1, buffer=""))


@settings(max_examples=500)
@given(st.sampled_from(BUSY), histories(BUSY, no_buffers, is_busy=True))
def test_books_hold_where_tenants_compete_for_one_replica(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=True)


@settings(max_examples=300)
@given(st.sampled_from(BOUNDED), histories(BOUNDED, rich_offers))
def test_books_hold_with_a_reserve_and_bounds_of_the_queue_that_tenants_share(
    policies: Policies, history: list[Event]
) -> None:
    play(policies, history, some_held=True)


EVERY = SHIPPED + HOLDING + ASKING + BOUNDED + BOUNDED_EARLY + WHOLE


@settings(max_examples=120)
@given(st.sampled_from(EVERY), histories(EVERY, rich_offers))
def test_the_same_events_give_the_same_commands(policies: Policies, history: list[Event]) -> None:
    first, second = a_pool(policies), a_pool(policies)
    assert [first.handle(e) for e in history] == [second.handle(e) for e in history]
    assert first.picture(1e3) == second.picture(1e3)


@settings(max_examples=200)
@given(st.sampled_from(EVERY), histories(EVERY, rich_offers))
def test_no_slot_leaks_once_everything_has_ended(policies: Policies, history: list[Event]) -> None:
    pool = play(policies, history, some_held=True)
    end_s = history[-1].now_s if history else 0.0
    for id in IDS:
        pool.handle(InvocationWithdrawn(end_s, id, MANY, "over"))
    for replica_id in REPLICAS:
        pool.handle(a_report(replica_id, now_s=end_s + LEASE_GRACE_S + 1, slots=2, held=()))
    picture = pool.picture(end_s)
    assert picture.queued == 0
    assert [(r.held, r.prefilling, r.queued) for r in picture.replicas] == [(0, 0, 0)] * 3
    for books in (
        pool._waiting,
        pool._leases.by_id,
        pool._leases._adopters,
        pool._taken_back,
        pool._backlog.unbound,
    ):
        assert not books
    assert (
        pool._backlog.prompt_tokens,
        pool._backlog.load_s,
        pool._backlog.shares.tenants_waiting,
    ) == (
        0,
        0,
        0,
    )


SERVING = SHIPPED + WHOLE


@settings(max_examples=120)
@given(st.sampled_from(SERVING), histories(SERVING, rich_offers))
def test_whatever_waits_has_its_turn_when_what_runs_ends(
    policies: Policies, history: list[Event]
) -> None:
    pool = play(policies, history, some_held=True)
    now_s = history[-1].now_s if history else 0.0
    for _ in range(2 * len(IDS)):
        now_s += 1.0
        for replica_id in REPLICAS:
            pool.handle(a_report(replica_id, now_s=now_s, held=tuple(pool.leased)))
        for id in list(pool.leased):
            invocation = pool.invocation(id)
            assert invocation is not None
            pool.handle(InvocationEnded(now_s, id, invocation.attempt, 9, "done"))
    assert pool.picture(now_s).queued == 0


# Offers and leases


def test_an_offer_made_again_gets_the_same_lease() -> None:
    pool = a_pool()
    pool.handle(a_report("r", slots=2))
    first = pool.handle(offer("i"))
    assert pool.handle(offer("i", 1.0)) == first
    assert pool.picture(1.0).replicas[0].held == 1


def test_a_higher_attempt_replaces_the_lease_of_the_one_before() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("i"))
    (again,) = pool.handle(offer("i", 1.0, attempt=2))
    assert isinstance(again, Dispatch)
    assert again.attempt == 2
    assert pool.handle(ended("i", 2.0, attempt=1)) == ()
    assert pool.picture(2.0).replicas[0].held == 1


@pytest.mark.parametrize("policies", [LATE_CATO, PLAIN[0]])
def test_a_call_for_several_answers_takes_their_places(policies: Policies) -> None:
    pool = a_pool(policies)
    pool.handle(a_report("r", slots=4))
    wide = replace(offer("wide").invocation, calls=4)
    assert dispatched(pool.handle(InvocationOffered(0.0, wide))) == [("wide", "r")]
    picture = pool.picture(0.1).replicas[0]
    assert (picture.held, picture.wait_s > 0) == (4, True)
    pool.handle(offer("next", 0.1))
    assert dispatched(pool.handle(ended("wide", 1.0))) in ([("next", "r")], [])
    assert pool.picture(1.0).replicas[0].held == 1


def test_a_late_copy_of_an_earlier_attempt_does_not_replace_the_newer_one() -> None:
    pool = a_pool()
    pool.handle(offer("i", attempt=2))
    pool.handle(offer("i", attempt=1))
    (command,) = pool.handle(a_report("r"))
    assert isinstance(command, Dispatch)
    assert command.attempt == 2


def test_late_binding_gives_a_freed_slot_to_the_most_urgent_and_late_ones_come_last() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("running"))
    pool.handle(offer("late", 0.1, deadline_s=0.5))
    pool.handle(offer("relaxed", 0.2, deadline_s=60.0))
    pool.handle(offer("tight", 0.3, deadline_s=1.2))
    order = []
    for now_s, id in ((1.0, "running"), (1.1, "tight"), (1.2, "relaxed")):
        order += [i for i, _ in dispatched(pool.handle(ended(id, now_s)))]
    assert order == ["tight", "relaxed", "late"]


def test_a_queued_call_offered_again_with_tokens_counts_as_begun_until_it_leaves() -> None:
    """What is queued and has begun tells streams for how long they would rest."""
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("running"))
    pool.handle(offer("queued", 1.0))
    again = offer("queued", 2.0, attempt=2)
    pool.handle(replace(again, invocation=replace(again.invocation, generated=5)))
    pool.check_invariants()
    pool.handle(offer("other", 3.0, deadline_s=100.0))
    pool.handle(ended("running", 4.0))
    pool.check_invariants()


def test_slack_is_judged_again_at_dispatch_not_only_on_arrival() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("running"))
    pool.handle(offer("was-feasible", 0.0, deadline_s=5.0))
    pool.handle(offer("is-feasible", 1.0, deadline_s=50.0))
    (command,) = pool.handle(ended("running", 6.0))
    assert isinstance(command, Dispatch)
    assert command.invocation_id == "is-feasible"
    assert command.priority == 1
    assert command.slack_s == pytest.approx(44.0)
    assert command.queue_s == pytest.approx(5.0)
    assert command.reason.startswith("feasible (place 1); slack 44.000 s")


def test_standby_places_are_filled_after_every_running_place() -> None:
    pool = a_pool()
    pool.handle(a_report("a", standby=1))
    pool.handle(a_report("b", standby=1))
    places = [dispatched(pool.handle(offer(f"i{n}", 0.1 * n))) for n in range(5)]
    assert places == [[("i0", "a")], [("i1", "b")], [("i2", "a")], [("i3", "b")], []]


def test_what_was_saved_for_work_without_an_slo_ends_with_its_reserve() -> None:
    edf = Policies(ROUTING["least-wait"], ORDERING["edf"], reserve=0.5)
    pool = a_pool(edf)
    pool.handle(a_report("r"))
    for id, deadline_s in (("running", 1.0), ("free", inf), ("soon", 2.0), ("later", 3.0)):
        pool.handle(offer(id, deadline_s=deadline_s))
    assert dispatched(pool.handle(ended("running"))) == [("soon", "r")]
    pool.handle(PoliciesChanged(1.0, replace(edf, reserve=0.0)))
    assert dispatched(pool.handle(ended("soon", 1.0))) == [("later", "r")]


# The bound of the queue


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    pool = a_pool(replace(LATE_CATO, max_queued=2))
    pool.handle(a_report("r", profile=a_profile(prefill_s=3.0, token_s=0.0)))
    for id in ("running", "first", "second"):
        pool.handle(offer(id))
    (refusal,) = pool.handle(offer("third"))
    reason = "2 invocations are queued, the limit of pool 'p'"
    assert refusal == Refuse(InvocationId("third"), reason, retry_after_s=6.0)
    assert pool.picture(0.0).refused == 1


def test_a_pool_that_may_not_queue_still_serves_what_it_has_room_for() -> None:
    pool = a_pool(replace(LATE_CATO, max_queued=0))
    pool.handle(a_report("r"))
    assert dispatched(pool.handle(offer("i"))) == [("i", "r")]
    (refusal,) = pool.handle(offer("j"))
    assert isinstance(refusal, Refuse)
    assert refusal.retry_after_s == MIN_RETRY_AFTER_S


def test_what_goes_on_after_a_lost_replica_is_never_refused() -> None:
    pool = a_pool(replace(LATE_CATO, max_queued=1))
    pool.handle(a_report("a"))
    pool.handle(offer("streaming"))
    pool.handle(offer("queued"))
    pool.handle(ReplicaLost(1.0, ReplicaId("a"), "host died"))
    assert pool.handle(offer("streaming", 1.0, attempt=2)) == ()
    assert pool.picture(1.0).queued == 2


def test_what_a_router_had_before_its_restart_is_never_refused() -> None:
    late = replace(LATE_CATO, max_queued=1, refuse_late=True)
    pool = a_pool(late)
    pool.handle(a_report("a", profile=a_profile(prefill_s=30.0)))
    for n in range(4):
        again = replace(offer(f"i{n}").invocation, was_taken=True)
        commands = pool.handle(InvocationOffered(0.0, again))
        assert not any(isinstance(c, Refuse) for c in commands)
    (refusal,) = pool.handle(offer("new"))
    assert isinstance(refusal, Refuse)


# Replicas come, go and restart


def test_a_lease_that_its_replica_never_takes_up_is_free_after_the_grace_time() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("i"))
    pool.handle(a_report("r", now_s=LEASE_GRACE_S))
    assert pool.picture(1.0).replicas[0].held == 1
    pool.handle(a_report("r", now_s=LEASE_GRACE_S + 0.1))
    assert pool.picture(1.0).replicas[0].held == 0


def test_a_silent_replica_is_lost_and_its_leases_end() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("i"))
    pool.handle(Ticked(SILENCE_S))
    assert len(pool.picture(0.0).replicas) == 1
    pool.handle(Ticked(SILENCE_S + 0.1))
    assert pool.picture(0.0).replicas == ()
    assert dispatched(pool.handle(a_report("s", now_s=6.0))) == []


def test_a_router_that_restarted_counts_what_its_replicas_already_hold() -> None:
    pool = a_pool()
    pool.handle(a_report("r", slots=2, held=("x", "y")))
    assert pool.handle(offer("i")) == ()
    assert dispatched(pool.handle(ended("x"))) == [("i", "r")]


def test_an_adopted_invocation_that_is_offered_again_counts_once() -> None:
    pool = a_pool()
    pool.handle(a_report("r", slots=2, held=("x",)))
    pool.handle(offer("x"))
    assert pool.picture(0.0).replicas[0].held == 1


def test_withdrawing_an_adopted_invocation_frees_its_slot_at_once() -> None:
    pool = a_pool()
    pool.handle(a_report("r", held=("x",)))
    pool.handle(offer("i"))
    withdrawn = pool.handle(InvocationWithdrawn(0.0, InvocationId("x"), 1, "left"))
    assert dispatched(withdrawn) == [("i", "r")]


def test_a_withdrawal_of_an_attempt_leaves_a_newer_one_alone() -> None:
    pool = a_pool()
    pool.handle(offer("i", attempt=2))
    assert pool.handle(InvocationWithdrawn(0.0, InvocationId("i"), 1, "its stream broke")) == ()
    assert dispatched(pool.handle(a_report("r"))) == [("i", "r")]
    pool.handle(InvocationWithdrawn(0.0, InvocationId("i"), 1, "its stream broke"))
    assert [r.held for r in pool.picture(0.0).replicas] == [1]
    pool.handle(InvocationWithdrawn(0.0, InvocationId("i"), 2, "the client left"))
    assert [r.held for r in pool.picture(0.0).replicas] == [0]


def test_a_report_made_before_the_end_of_an_invocation_blocks_a_slot_until_the_next() -> None:
    pool = a_pool()
    pool.handle(a_report("r"))
    pool.handle(offer("i"))
    pool.handle(ended("i", 1.0))
    pool.handle(a_report("r", now_s=1.1, held=("i",)))
    assert pool.picture(1.1).replicas[0].held == 1
    pool.handle(a_report("r", now_s=1.6))
    assert pool.picture(1.6).replicas[0].held == 0


@pytest.mark.parametrize("routing", ["cato", "power-of-two", "round-robin"])
def test_a_draining_replica_passes_its_queue_to_the_others(routing: str) -> None:
    policies = Policies(ROUTING[routing], FirstComeFirstServed(), late_binding=False)
    pool = a_pool(policies)
    pool.handle(a_report("a"))
    for n in range(3):
        pool.handle(offer(f"i{n}"))
    pool.handle(a_report("b", slots=2))
    moved = pool.handle(a_report("a", accepting=False, held=("i0",)))
    assert dispatched(moved) == [("i1", "b"), ("i2", "b")]


def test_early_binding_keeps_each_queue_with_its_replica() -> None:
    policies = Policies(ROUTING["round-robin"], FirstComeFirstServed(), late_binding=False)
    pool = a_pool(policies)
    pool.handle(a_report("a"))
    pool.handle(a_report("b"))
    for n in range(4):
        pool.handle(offer(f"i{n}", 0.1 * n))
    assert pool.why_waiting(InvocationId("i3")) == "in the queue of b: turn 2 of 2"
    assert [r.queued for r in pool.picture(1.0).replicas] == [1, 1]
    assert dispatched(pool.handle(ended("i0", 1.0))) == [("i2", "a")]
    assert dispatched(pool.handle(ended("i2", 1.1))) == []
    assert dispatched(pool.handle(PoliciesChanged(1.2, LATE_CATO))) == [("i3", "a")]


# Admission and preemption


def progressed(id: str, *tokens: tuple[str, int], now_s: float = 1.0) -> ReplicaProgressed:
    return ReplicaProgressed(now_s, ReplicaId(id), tuple((InvocationId(i), n) for i, n in tokens))


def drawn(id: str, draw: float, *, attempt: int = 1, now_s: float = 0.0) -> InvocationOffered:
    return InvocationOffered(now_s, an_invocation(id, draw=draw, attempt=attempt))


def test_a_replica_that_closes_is_not_asked_about_the_next_in_the_queue() -> None:
    asked: list[Asked | None] = []
    fcfs = FirstComeFirstServed()
    policies = Policies(ROUTING["power-of-two"], fcfs, admission=DefersSome(closes_from=0.75))
    pool = a_pool(watched(policies, asked, {}))
    pool.handle(drawn("closing", 0.9))
    pool.handle(drawn("willing", 0.1, now_s=0.1))
    assert pool.handle(a_report("r", slots=2)) == ()
    assert [a.invocation.id for a in asked if a.replica_id is not None] == ["closing"]
    assert pool.why_waiting(InvocationId("closing")) == "this one may not"


@dataclass(frozen=True, slots=True)
class ByTokens:
    """Ranks by the last digit of the expected tokens."""

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        return Rank(invocation.expected_tokens % 10, "")


def test_nothing_of_a_larger_rank_is_asked_about_though_a_tenant_that_is_ahead_goes_last() -> None:
    asked: list[Asked | None] = []
    strict = Policies(ROUTING["least-wait"], ByTokens(), admission=DefersSome(), strict=True)
    pool = a_pool(watched(strict, asked, {}))
    pool.handle(a_report("r"))
    ahead = an_invocation("running", tokens=40_000)
    pool.handle(InvocationOffered(0.0, replace(ahead, tenant="ahead")))
    for id, tenant, tokens in (("a0", "ahead", 0), ("a1", "ahead", 1), ("b2", "behind", 2)):
        call = replace(an_invocation(id, tokens=tokens, draw=0.9), tenant=tenant)
        pool.handle(InvocationOffered(0.0, call))
    asked.clear()
    pool.handle(InvocationEnded(1.0, ahead.id, 1, 40_000, "done"))
    assert [a.invocation.id for a in asked if a.replica_id is None] == ["b2", "a0"]


def test_a_place_that_a_new_attempt_leaves_goes_to_whoever_waits_for_it() -> None:
    pool = a_pool(Policies(HoldsSome(), FirstComeFirstServed()))
    pool.handle(a_report("r"))
    pool.handle(drawn("i", 0.1))
    pool.handle(drawn("j", 0.1))
    assert dispatched(pool.handle(drawn("i", 0.9, attempt=2))) == [("j", "r")]


def test_what_is_taken_back_goes_to_an_idle_replica_with_early_binding_too() -> None:
    policies = Policies(
        ROUTING["cato"], FirstComeFirstServed(), late_binding=False, preemption=TakesBackSome()
    )
    pool = a_pool(policies)
    pool.handle(a_report("a"))
    pool.handle(drawn("i", 0.9))
    pool.handle(drawn("j", 0.1))
    pool.handle(a_report("b"))
    back, *given = pool.handle(progressed("a", ("i", 7)))
    assert isinstance(back, Preempt)
    assert sorted(dispatched(tuple(given))) == [("i", "b"), ("j", "a")]
    assert [r.prefilling for r in pool.picture(1.0).replicas] == [1, 1]


def test_what_is_taken_back_does_not_get_its_place_back_at_once() -> None:
    """Its rest is short and would go first."""
    policies = Policies(
        ROUTING["least-wait"], ByTokens(), preemption=TakesBackSome(), asks_at_once=True
    )
    pool = a_pool(policies)
    pool.handle(a_report("r"))
    pool.handle(InvocationOffered(0.0, an_invocation("i", tokens=10, draw=0.9)))
    pool.handle(progressed("r", ("i", 7)))
    newcomer = an_invocation("j", tokens=15, draw=0.1, deadline_s=9.0)
    back, *given = pool.handle(InvocationOffered(0.0, newcomer))
    assert isinstance(back, Preempt)
    assert (back.invocation_id, back.attempt) == ("i", 1)
    assert dispatched(tuple(given)) == [("j", "r")]
    assert [i.id for i in pool.waiting] == ["i"]


@pytest.mark.parametrize("outcome", ["", "cancelled", "failed"])
def test_a_client_that_leaves_before_it_heard_of_a_preemption_takes_the_call_with_it(
    outcome: str,
) -> None:
    """Its replica may tell of the end of its stream before its ingress withdraws it."""
    policies = Policies(
        CatoRouting(), FirstComeFirstServed(), preemption=TakesBackSome(), asks_at_once=True
    )
    pool = a_pool(policies)
    pool.handle(a_report("r"))
    pool.handle(drawn("i", 0.9))
    back, *_ = pool.handle(drawn("j", 0.1))
    assert isinstance(back, Preempt)
    if outcome:
        pool.handle(InvocationEnded(0.0, InvocationId("i"), 1, 7, outcome))
    pool.handle(InvocationWithdrawn(0.0, InvocationId("i"), 1, "the client left"))
    assert pool.invocation(InvocationId("i")) is None


def test_nothing_gives_way_while_no_replica_accepts_work() -> None:
    policies = Policies(
        CatoRouting(), FirstComeFirstServed(), preemption=TakesBackSome(), asks_at_once=True
    )
    pool = a_pool(policies)
    pool.handle(a_report("r"))
    pool.handle(drawn("i", 0.9))
    pool.handle(a_report("r", accepting=False, held=("i",)))
    assert pool.handle(drawn("j", 0.1)) == ()
    assert pool.handle(progressed("r", ("i", 7))) == ()


@dataclass(frozen=True, slots=True)
class HearsOfPlaces:
    heard_s: list[float] = field(default_factory=list)

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
        load: QueueLoad = NO_LOAD,
    ) -> Sequence[tuple[InvocationId, str]]:
        self.heard_s.append(place_s())
        return ()


def test_a_preemption_policy_hears_when_the_first_of_all_replicas_has_a_place() -> None:
    hears = HearsOfPlaces()
    pool = a_pool(
        Policies(CatoRouting(), FirstComeFirstServed(), preemption=hears, asks_at_once=True)
    )
    for id in ("a", "b"):
        pool.handle(a_report(id, profile=a_profile(prefill_s=1.0, token_s=0.1)))
    pool.handle(offer("i"))  # 50 tokens: until 5.9 s
    pool.handle(offer("j"))
    pool.handle(progressed("a", ("i", 1), now_s=1.0))
    assert hears.heard_s == []  # nobody waits for one
    pool.handle(offer("k"))
    assert hears.heard_s == [pytest.approx(5.9)] * 2, "a new call that comes first asks both"
    pool.handle(offer("l"))  # comes second
    pool.handle(InvocationOffered(0.0, an_invocation("m", deadline_s=inf)))
    pool.handle(progressed("a", ("i", 2), now_s=3.0))  # 48 more tokens: until 7.8 s
    assert hears.heard_s[2:] == [pytest.approx(2.9)]  # that of "b"


def test_a_new_call_asks_a_few_replicas_for_room_until_one_has_it() -> None:
    policies = Policies(
        ROUTING["least-wait"], FirstComeFirstServed(), preemption=TakesBackSome(), asks_at_once=True
    )
    pool = a_pool(policies)
    few = [f"r{n:02}" for n in range(REPLICAS_ASKED)]
    for n, id in enumerate([*few, "z"]):
        pool.handle(a_report(id))
        pool.handle(drawn(f"i{n}", 0.9 if id in (few[-1], "z") else 0.1))
    back, *given = pool.handle(drawn("j", 0.1))
    assert isinstance(back, Preempt)
    assert back.replica_id == few[-1]
    assert dispatched(tuple(given)) == [("j", few[-1])]
    assert pool.handle(InvocationWithdrawn(0.0, back.invocation_id, MANY, "over")) == ()
    assert pool.handle(drawn("k", 0.1)) == (), "of those asked, none has room"


@dataclass(frozen=True, slots=True)
class ReadsTheHead:
    seen: list[list[str]] = field(default_factory=list)

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
        load: QueueLoad = NO_LOAD,
    ) -> Sequence[tuple[InvocationId, str]]:
        ways = (waiting, waiting[:2], [waiting[-1]], [waiting[len(waiting) - 1]])
        self.seen.extend([i.id for i in way] for way in ways)
        with pytest.raises(IndexError):
            waiting[len(waiting)]
        return ()


def test_a_preemption_policy_may_read_the_head_of_the_queue_in_any_way() -> None:
    reads = ReadsTheHead()
    pool = a_pool(Policies(CatoRouting(), FirstComeFirstServed(), preemption=reads))
    pool.handle(a_report("r", slots=1))
    for at_s, id in enumerate("iabcdefghj"):
        pool.handle(offer(id, float(at_s)))
    reads.seen.clear()
    pool.handle(progressed("r", ("i", 2), now_s=20.0))
    shown = list("abcdefgh")
    assert reads.seen == [shown, ["a", "b"], ["h"], ["h"]]
    pool.handle(ended("i", 21.0))
    assert pool.picture(21.0).queued == 8, "what was shown waits still"


# Expected waits


def test_what_a_batch_holds_is_as_much_as_it_would_take_alone_one_after_another() -> None:
    pool = a_pool(Policies(CatoRouting(), FirstComeFirstServed(), late_binding=False))
    profile = a_profile(prefill_s=1.0, token_s=0.1, batch_token_s=0.05)  # 0.15 s a token alone
    pool.handle(a_report("r", slots=2, profile=profile))
    for id in "ijk":  # 50 tokens each; the third is bound and waits
        pool.handle(offer(id))
    assert pool.picture(0.0).replicas[0].serial_s == pytest.approx(
        1 + 7.5 + 1 + 7.5 + 1 + 49 * 0.15
    )
    pool.handle(progressed("r", ("i", 30)))
    # Of the first only the expected length is known, so 50 more than its 30 may come.
    assert pool.picture(1.0).replicas[0].serial_s == pytest.approx(50 * 0.15 + 8.5 + 8.35)
    pool.handle(progressed("r", ("i", 70)))
    assert pool.picture(1.0).replicas[0].serial_s == pytest.approx(70 * 0.15 + 8.5 + 8.35)


def test_the_wait_at_a_full_replica_is_what_its_running_invocation_still_needs() -> None:
    pool = a_pool()
    pool.handle(a_report("r", profile=a_profile(prefill_s=1.0, token_s=0.1)))
    pool.handle(offer("i"))  # 50 tokens: 1 s and 49 steps of 0.1 s
    assert pool.picture(2.0).replicas[0].wait_s == pytest.approx(3.9)
    pool.handle(FirstTokenSent(3.0, InvocationId("i")))  # 2 s later than the profile said
    assert pool.picture(3.0).replicas[0].wait_s == pytest.approx(5.0)


def test_the_end_of_a_lease_does_not_wait_for_what_is_queued_behind_it() -> None:
    pool = a_pool(Policies(CatoRouting(), FirstComeFirstServed(), late_binding=False))
    pool.handle(a_report("r", profile=a_profile(prefill_s=1.0, token_s=0.0)))
    for n in range(3):
        pool.handle(offer(f"i{n}"))
    assert pool.picture(0.0).replicas[0].wait_s == pytest.approx(3.0)
    pool.handle(ended("i0", 1.0))  # i1 starts, i2 waits
    assert pool.picture(1.0).replicas[0].wait_s == pytest.approx(2.0)


@given(
    st.lists(st.floats(0, 9), max_size=5), st.lists(st.floats(0, 9), max_size=6), st.integers(1, 4)
)
def test_the_expected_wait_is_that_of_serving_in_order_by_the_first_free_slot(
    running_s: list[float], queued_s: list[float], slots: int
) -> None:
    running_s = running_s[:slots]
    free_at = running_s + [0.0] * (slots - len(running_s))
    for service_s in queued_s:
        first = free_at.index(min(free_at))
        free_at[first] += service_s
    assert expected_wait_s(running_s, queued_s, slots) == pytest.approx(min(free_at))


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=4), st.floats(0.1, 9))
def test_a_standby_that_follows_the_first_to_end_counts_as_its_slots_new_end(
    running_s: list[float], service_s: float
) -> None:
    slots = len(running_s)
    standby_end_s = min(running_s) + service_s
    expected = expected_wait_s(running_s, [service_s], slots)
    assert expected_wait_s([*running_s, standby_end_s], [], slots) == pytest.approx(expected)


def test_a_replica_without_slots_is_never_free() -> None:
    assert expected_wait_s([], [], 0) == float("inf")


# Words for the operator


def test_why_waiting_names_the_reason() -> None:
    pool = a_pool(Policies(HoldsSome(), FirstComeFirstServed()))
    held = an_invocation("held", draw=0.9)
    pool.handle(InvocationOffered(0.0, held))
    assert pool.why_waiting(held.id) == "none of 0 replicas has room"
    pool.handle(a_report("r"))
    assert pool.why_waiting(held.id) == "not this one"
    pool.handle(offer("i"))
    assert pool.why_waiting(held.id) == "none of 1 replicas has room"
    assert pool.why_waiting(InvocationId("i")) == ""


# Price of a decision


@dataclass(frozen=True, slots=True)
class CountedRanks:
    """First come, first served, and a list of what was ranked."""

    ranked: list[InvocationId]

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        self.ranked.append(invocation.id)
        return Rank(0, "")


def test_an_event_that_frees_nothing_does_not_look_at_the_queue() -> None:
    ranked: list[InvocationId] = []
    pool = a_pool(Policies(CatoRouting(), CountedRanks(ranked)))
    pool.handle(a_report("r"))
    pool.handle(offer("running"))
    ranked.clear()
    for n in range(50):
        pool.handle(offer(f"i{n}"))
    pool.handle(FirstTokenSent(1.0, InvocationId("running")))
    pool.handle(a_report("r", now_s=1.0, held=("running",)))
    pool.handle(Ticked(1.0))
    assert ranked == []
    pool.handle(ended("running", 1.0))
    assert len(ranked) == 50
