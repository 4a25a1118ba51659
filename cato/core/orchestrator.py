"""The books of one pool, and the only door through which they change."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import exp, inf
from operator import attrgetter, itemgetter
from typing import Any, TypeVar, assert_never, overload

from cato.core.buffers import MAX_BUFFERS, LatestRun, replaced_by
from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.decision import Admit, Defer, Hold, Rank
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
    Ticked,
)
from cato.core.fairness import TokenShares
from cato.core.ids import DeploymentName, InvocationId, PoolName, ReplicaId, RunId
from cato.core.policies import ADMIT_ALWAYS, MappingPolicy, Policies, Work
from cato.core.pool.caches import CachePicture
from cato.core.pool.pace import MOST_PROMPTS, Pace
from cato.core.pool.patience import EVERY_S, LINED_UP_S, LateService, Line, Order
from cato.core.pool.pressure import Pressure
from cato.core.pool.sessions import Home, Homes, WorkingSet
from cato.core.pool.window import learnt_dispatch_s
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.snapshot import (
    PREFIX_BLOCK_TOKENS,
    Invocation,
    PoolSnapshot,
    ReplicaSnapshot,
    ReplicaView,
    Running,
)

# A lease that its replica does not name this long after the dispatch was never taken up: the
# message from ingress to replica takes milliseconds, a first connection a second at worst, and for
# a replica that it does not know yet an ingress looks for 5 s.
LEASE_GRACE_S = 6.0
# Replicas report every 0.5 s; a busy host may be late a few times.
SILENCE_S = 5.0
MIN_RETRY_AFTER_S = 1.0
# A burst of keystrokes; who types on for longer has no claim to the place of its beginning.
MAX_HEAD_START_S = 10.0
# A predicted wait is wrong by about so much; what is admitted should be in time all the same.
WAIT_MARGIN = 1.15
# How fast a queue moves is seen, and forgotten with this time constant; less of it says nothing.
DRAIN_MEMORY_S = 10.0
LEAST_DRAIN_S = 1.0
# How much of the queue a preemption policy is shown: more could not start at once anyway.
PREEMPTORS_SHOWN = 8
# Of how many replicas, spread evenly, it is told when the first has a place.
PLACES_LOOKED_AT = 16

T = TypeVar("T")


def expected_wait_s(running_s: Iterable[float], queued_s: Iterable[float], slots: int) -> float:
    """Expected queueing time of a newcomer behind `queued_s`, with `running_s` still to run.

    Walks the queue (CATO, Algorithm 1: "wait"): each queued service time goes to the slot that
    frees first. All values in seconds. A replica without slots never takes it.
    """
    if slots < 1:
        return inf
    free_at = sorted(running_s)[-slots:]
    free_at = [0.0] * (slots - len(free_at)) + free_at  # sorted, so a heap
    for service_s in queued_s:
        heapq.heapreplace(free_at, free_at[0] + service_s)
    return free_at[0]


@dataclass(slots=True)
class _Clock:
    """The instant of the event in hand; the books never ask for another."""

    now_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Waiting:
    invocation: Invocation
    queue: _Queue | _TenantQueues
    bound_to: ReplicaId | None = None
    held_because: str = ""
    rank: Rank | None = None
    work: Work | None = None
    # What it adds to the backlog, in replica-seconds, and the wait it was expected to have.
    load_s: float = 0.0
    predicted_s: float = 0.0
    prompt_tokens: int = 0
    # When its client leaves without a first token, and the latest dispatch that is in time for it.
    leaves_at_s: float = inf
    latest_s: float = inf
    # The replica that it was last held back for, and the prompt work that it brings there.
    awaits: _Replica | None = None
    awaits_s: float = 0.0
    # Of its present rank; an entry of a heap with another number is an old one.
    version: int = 0


_versions = count(1)  # only their difference matters
_HeapEntry = tuple[int, float, float, InvocationId, int, _Waiting]


class _Queue:
    """What waits, in the order of its ranks; ranks that have run out are judged anew."""

    __slots__ = ("_due", "_heap", "_unranked", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[InvocationId, _Waiting] = {}
        self._heap: list[_HeapEntry] = []
        self._due: list[tuple[float, InvocationId, int, _Waiting]] = []
        self._unranked: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, waiting: _Waiting) -> None:
        waiting.queue = self
        self.waiting[waiting.invocation.id] = waiting
        self.forget_rank(waiting)

    def remove(self, waiting: _Waiting) -> None:
        del self.waiting[waiting.invocation.id]
        waiting.version = 0

    def forget_rank(self, waiting: _Waiting) -> None:
        waiting.version = next(_versions)
        waiting.rank = None
        self._unranked.append(waiting)

    def forget_ranks(self) -> None:
        """Judge all anew: what there is to run on has changed, or the order itself."""
        self._heap.clear()
        self._due.clear()
        self._unranked.clear()
        for waiting in self.waiting.values():
            waiting.work = None
            self.forget_rank(waiting)

    def refresh(self, rank: Callable[[_Waiting, float], Rank], now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            _, id, version, waiting = heapq.heappop(self._due)
            if waiting.version == version and self.waiting.get(id) is waiting:
                self.forget_rank(waiting)
        if self._unranked:
            fresh, self._unranked = self._unranked, []
            for waiting in fresh:
                if waiting.rank is None and self._has(waiting):
                    self._place(waiting, rank(waiting, now_s))
        if len(self._heap) > 2 * len(self.waiting) + 64:  # what left stays in the heap till here
            self._heap = [e for e in self._heap if e[4] == e[5].version and self._has(e[5])]
            heapq.heapify(self._heap)

    def pop(self, rank: Callable[[_Waiting, float], Rank], now_s: float) -> _HeapEntry | None:
        """The first, taken out of the order but not off the books; `push` puts it back."""
        heap = self._heap
        while heap:
            entry = heapq.heappop(heap)
            waiting = entry[5]
            if entry[4] != waiting.version:
                continue
            if waiting.rank is None or now_s < waiting.rank.until_s or not waiting.rank.worsens:
                return entry
            waiting.version = next(_versions)
            waiting.rank = rank(waiting, now_s)
            fresh = _entry(waiting, waiting.rank)
            if not heap or fresh < heap[0]:
                return fresh
            heapq.heappush(heap, fresh)
        return None

    def push(self, entry: _HeapEntry) -> None:
        heapq.heappush(self._heap, entry)

    def _has(self, waiting: _Waiting) -> bool:
        return self.waiting.get(waiting.invocation.id) is waiting

    def _place(self, waiting: _Waiting, rank: Rank) -> None:
        waiting.rank = rank
        invocation = waiting.invocation
        heapq.heappush(self._heap, _entry(waiting, rank))
        if rank.until_s < inf and not rank.worsens:
            heapq.heappush(self._due, (rank.until_s, invocation.id, waiting.version, waiting))


class _TenantQueues:
    """What waits in a pool, a queue for each tenant.

    Tenants take turns by the order of their first, but whoever is ahead of its share lets the
    others go before.
    """

    __slots__ = ("_bound", "_by_tenant", "_heads", "_shares", "waiting")

    def __init__(self, shares: TokenShares) -> None:
        self.waiting: dict[InvocationId, _Waiting] = {}
        self._by_tenant: dict[str, _Queue] = {}
        # The first of each tenant while the queue is walked; taken out of their own queues.
        self._heads: list[tuple[bool, _HeapEntry]] | None = None
        self._shares = shares
        self._bound = inf  # of the shares, when the walk began

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, waiting: _Waiting) -> None:
        tenant = waiting.invocation.tenant
        queue = self._by_tenant.get(tenant)
        if queue is None:
            queue = self._by_tenant[tenant] = _Queue()
        queue.add(waiting)
        waiting.queue = self
        self.waiting[waiting.invocation.id] = waiting
        self._shares.joined(tenant)

    def remove(self, waiting: _Waiting) -> None:
        tenant = waiting.invocation.tenant
        queue = self._by_tenant[tenant]
        queue.remove(waiting)
        if not queue.waiting:
            del self._by_tenant[tenant]
        del self.waiting[waiting.invocation.id]
        self._shares.left(tenant)

    def forget_rank(self, waiting: _Waiting) -> None:
        self._by_tenant[waiting.invocation.tenant].forget_rank(waiting)

    def forget_ranks(self) -> None:
        for queue in self._by_tenant.values():
            queue.forget_ranks()

    def refresh(self, rank: Callable[[_Waiting, float], Rank], now_s: float) -> None:
        heads, self._heads = self._heads or [], None
        for _, entry in heads:
            if entry[4] == entry[5].version:
                self.push(entry)
        for queue in self._by_tenant.values():
            queue.refresh(rank, now_s)

    def pop(self, rank: Callable[[_Waiting, float], Rank], now_s: float) -> _HeapEntry | None:
        """As `_Queue.pop`; call `refresh` before a walk."""
        if self._heads is None:
            if len(self._by_tenant) == 1:
                (only,) = self._by_tenant.values()
                return only.pop(rank, now_s)
            self._heads, self._bound = [], self._shares.bound()
            for tenant in self._by_tenant:
                self._show_next(tenant, self._heads, rank, now_s)
        while self._heads:
            _, entry = heapq.heappop(self._heads)
            self._show_next(entry[5].invocation.tenant, self._heads, rank, now_s)
            if entry[4] == entry[5].version:
                return entry
        return None

    def _show_next(
        self,
        tenant: str,
        heads: list[tuple[bool, _HeapEntry]],
        rank: Callable[[_Waiting, float], Rank],
        now_s: float,
    ) -> None:
        queue = self._by_tenant.get(tenant)
        entry = None if queue is None else queue.pop(rank, now_s)
        if entry is not None:
            heapq.heappush(heads, (self._shares.served(tenant) > self._bound, entry))

    def push(self, entry: _HeapEntry) -> None:
        self._by_tenant[entry[5].invocation.tenant].push(entry)


class _Head(Sequence[Invocation]):
    """The first of a queue, in order, taken out of it as far as they are asked for."""

    __slots__ = ("_entries", "_now_s", "_queue", "_rank")

    def __init__(
        self,
        queue: _Queue | _TenantQueues,
        rank: Callable[[_Waiting, float], Rank],
        now_s: float,
    ) -> None:
        """`queue` has been refreshed, and nobody else walks it until `put_back`."""
        self._queue, self._rank, self._now_s = queue, rank, now_s
        self._entries: list[_HeapEntry] = []

    def __len__(self) -> int:
        return min(PREEMPTORS_SHOWN, len(self._queue))

    @overload
    def __getitem__(self, i: int) -> Invocation: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Invocation]: ...
    def __getitem__(self, i: int | slice) -> Invocation | Sequence[Invocation]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        i += len(self) if i < 0 else 0
        if not 0 <= i < len(self):
            raise IndexError(i)
        while len(self._entries) <= i:
            entry = self._queue.pop(self._rank, self._now_s)
            assert entry is not None, "what waits is in the order"
            self._entries.append(entry)
        return self._entries[i][5].invocation

    def put_back(self) -> None:
        for entry in self._entries:
            self._queue.push(entry)


def _entry(waiting: _Waiting, rank: Rank) -> _HeapEntry:
    invocation = waiting.invocation
    return (
        rank.value,
        rank.key,
        invocation.arrived_at_s,
        invocation.id,
        waiting.version,
        waiting,
    )


@record
class _Lease:
    replica_id: ReplicaId
    running: Running
    command: Dispatch
    # Of its prompt, what the replica was not believed to have cached, and the time that it takes.
    uncached_tokens: int
    prompt_s: float
    # Of what was believed to be cached: see `CachePicture.correct`.
    cache_age: int
    # No prompt was ahead of it: its first token tells the delay of messages.
    went_first: bool


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica of the books; also the `ReplicaView` that policies see."""

    clock: _Clock
    picture: CachePicture
    homes: Homes
    working_set: WorkingSet
    id: ReplicaId
    deployment: DeploymentName
    profile: Profile
    max_running: int
    standby: int
    accepting_work: bool
    seen_at_s: float
    pace: Pace
    # Time of prompts that have their first token: what they added to the steps of the others.
    prompts_done_s: float = 0.0
    leases: dict[InvocationId, Running] = field(default_factory=dict)
    # Held according to the replica but unknown here: leased before a restart of the router.
    adopted: frozenset[InvocationId] = frozenset()
    # Early binding: what waits for this replica alone, with its service times in order.
    queue: _Queue = field(default_factory=_Queue)
    queued_s: dict[InvocationId, float] = field(default_factory=dict)
    queued_tokens: int = 0
    held: int = 0
    # Places that leases take beyond one each: those of several answers.
    wide: int = 0
    prefilling: int = 0
    prompt_tokens_ahead: int = 0
    context_tokens: int = 0
    step_tokens: int = 0
    host_tokens: int = 0
    dispatch_s: float = 0.0
    # When the prompts that are ahead are expected to be done.
    _prompts_end_s: float = -inf
    # The same claim as `ReplicaSnapshot.has_room`.
    is_open: bool = False
    # Its engine keeps the beginnings of prompts; `picture` has them.
    has_prefix_cache: bool = False
    awaited_s: float = 0.0
    # The time that the prompts ahead were predicted to take, added up.
    _prompts_s: float = 0.0
    # When a newcomer would start, and until when that answer holds.
    _free_at_s: float = 0.0
    _free_holds_until_s: float = -inf
    # What policies derived from the present state at `_derived_at_s`.
    _derived: dict[object, Any] = field(default_factory=dict)
    _derived_at_s: float = -inf

    @property
    def queued(self) -> int:
        return len(self.queued_s)

    @property
    def accepting(self) -> bool:
        return self.accepting_work and self.max_running > 0

    @property
    def batch(self) -> int:
        joined = self.held + 1
        return joined if joined < self.max_running else max(1, self.max_running)

    @property
    def running(self) -> Collection[Running]:
        return self.leases.values()

    @property
    def wait_s(self) -> float:
        now_s = self.clock.now_s
        if now_s < self._free_holds_until_s:
            return max(0.0, self._free_at_s - now_s)
        if not self.queued_s and self.held < self.max_running:
            return 0.0
        ends = [r.expected_end_s for r in self.leases.values()]
        running_s = [max(0.0, end_s - now_s) for end_s in ends] + [0.0] * len(self.adopted)
        if self.wide:
            for running in self.leases.values():
                end_s = max(0.0, running.expected_end_s - now_s)
                running_s += [end_s] * (running.invocation.calls - 1)
        wait_s = expected_wait_s(running_s, self.queued_s.values(), self.max_running)
        # What has overrun its expected end is expected to end at once, for as long as it runs.
        first_end_s = min(ends, default=inf)
        overrun = bool(self.adopted) or first_end_s <= now_s
        self._free_holds_until_s = -inf if overrun else first_end_s
        self._free_at_s = now_s + wait_s
        return wait_s

    @property
    def serial_s(self) -> float:
        if self.max_running == 1:
            return self.wait_s
        running_s = sum(_left_alone_s(r, self.profile) for r in self.leases.values())
        return running_s + sum(self.queued_s.values())

    @property
    def prompts_ahead_s(self) -> float:
        return max(0.0, self._prompts_end_s - self.clock.now_s)

    def prompt_sent(self, invocation: Invocation, uncached_tokens: int, prompt_s: float) -> None:
        self.prefilling += 1
        self.prompt_tokens_ahead += uncached_tokens
        self.context_tokens += invocation.prompt_tokens
        self._prompts_s += prompt_s
        start_s = max(self.clock.now_s, self._prompts_end_s)
        self._prompts_end_s = start_s + prompt_s

    def prompt_done(self, uncached_tokens: int, prompt_s: float) -> None:
        """One of the prompts ahead has its first token, or has left."""
        self.prefilling -= 1
        self.prompt_tokens_ahead -= uncached_tokens
        self._prompts_s -= prompt_s
        if not self.prefilling:
            self._prompts_end_s = -inf
            self._prompts_s = 0.0
            return
        # What was predicted for those that remain may have been too long, but not too short.
        if self.profile.prefill_per_attended_token_s:  # tokens alone do not tell the time
            latest_s = self.clock.now_s + self._prompts_s
        else:
            latest_s = self.clock.now_s + self.profile.prefill_s(self.prompt_tokens_ahead)
        self._prompts_end_s = min(self._prompts_end_s, latest_s)

    def changed(self) -> None:
        self.held = len(self.leases) + len(self.adopted) + self.wide
        self._free_holds_until_s = -inf
        if self._derived:
            self._derived.clear()

    @property
    def sessions(self) -> int:
        return self.working_set.sessions

    @property
    def working_set_tokens(self) -> int:
        return self.working_set.tokens

    def is_home(self, invocation: Invocation) -> bool:
        home = self.homes.of(invocation.session)
        return home is not None and home.replica_id == self.id

    def cached_tokens(self, invocation: Invocation) -> int:
        if not self.has_prefix_cache:
            return 0
        nodes = self.picture.cached_nodes(self.id, invocation.prefix)
        if not nodes:
            return 0
        cached = int(_tokens_of(nodes, invocation, self.homes.of(invocation.session)))
        # The last token of a prompt is always computed: it gives the first one of the answer.
        return cached if cached < invocation.prompt_tokens else invocation.prompt_tokens - 1

    def derived(self, derive: Callable[[ReplicaView, float], T], now_s: float) -> T:
        if now_s != self._derived_at_s:
            self._derived.clear()
            self._derived_at_s = now_s
        if derive not in self._derived:
            self._derived[derive] = derive(self, now_s)
        value: T = self._derived[derive]
        return value

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            id=self.id,
            deployment=self.deployment,
            profile=self.profile,
            held=self.held,
            max_running=self.max_running,
            standby=self.standby,
            queued=self.queued,
            wait_s=self.wait_s,
            serial_s=self.serial_s,
            accepting=self.accepting,
            prefilling=self.prefilling,
            prompt_tokens_ahead=self.prompt_tokens_ahead,
            prompts_ahead_s=self.prompts_ahead_s,
            context_tokens=self.context_tokens,
            step_tokens=self.step_tokens,
            host_tokens=self.host_tokens,
            dispatch_s=self.dispatch_s,
            sessions=self.sessions,
            working_set_tokens=self.working_set_tokens,
            awaited_s=self.awaited_s,
            queued_tokens=self.queued_tokens,
        )


@dataclass(slots=True)
class _Buffer(LatestRun):
    """Also since when its calls have waited, those of the runs that it replaced counted."""

    arrived_at_s: float = 0.0


_BY_ID: Callable[[_Replica], ReplicaId] = attrgetter("id")
_BY_REMAINING: Callable[[Work], float] = attrgetter("remaining_s")


@dataclass(frozen=True, slots=True)
class PoolPicture:
    """What an operator sees of a pool."""

    name: PoolName
    now_s: float
    queued: int
    dispatched: int
    refused: int
    replicas: tuple[ReplicaSnapshot, ...]

    @property
    def queued_per_place(self) -> float:
        """Calls that wait for each place; as if there were one, while there is none."""
        places = sum(r.max_running for r in self.replicas if r.accepting)
        return self.queued / max(1, places)


class PoolOrchestrator:
    """Queue, leases and replicas of one pool.

    `handle` is deterministic: the same events give the same commands. Late binding keeps an
    invocation in the pool's queue until a replica has room; early binding gives it to a
    replica's own queue on arrival.
    """

    def __init__(self, name: PoolName, policies: Policies) -> None:
        self.name = name
        self._policies = policies
        self._clock = _Clock()
        self._picture = CachePicture()
        self._homes = Homes()
        self._waiting: dict[InvocationId, _Waiting] = {}
        self._shares = TokenShares()
        # Late binding; with early binding what no replica accepts yet.
        self._queue = _TenantQueues(self._shares)
        self._leases: dict[InvocationId, _Lease] = {}
        self._adopters: dict[InvocationId, set[ReplicaId]] = {}
        # Preempted attempts whose ingress has not asked again.
        self._taken_back: dict[InvocationId, int] = {}
        self._buffers: OrderedDict[str, _Buffer] = OrderedDict()
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._open: list[_Replica] = []  # with room, by id
        self._accepting: list[_Replica] = []  # by id
        self._profiles: tuple[Profile, ...] = ()  # of what accepts work
        # What waits without an SLO, by arrival, and how much of a dispatch it has been saving for.
        self._unbound: dict[InvocationId, _Waiting] = {}
        self._saved = 0.0
        # Replica-seconds of what waits: its time in full batches, shared among their places.
        self._backlog_s = 0.0
        self._queued_tokens = 0
        self._dispatched = 0
        self._refused = 0
        # How many left the queue for a replica while others waited, and for how long some did.
        self._drained = 0.0
        self._queueing_s = 0.0
        self._watched_at_s = 0.0
        # By the latest dispatch that is in time for their clients; some have left the queue since.
        self._leaving: list[tuple[float, int, _Waiting]] = []
        self._late = LateService()
        self._pressure = Pressure()
        self._late_line = Line()
        # All that waits, in order, as of then, and the work that has joined since.
        self._line = Line()
        self._lined_up_at_s = -inf
        self._joined_s = 0.0
        self._judged_at_s = -inf

    def handle(self, event: Event) -> tuple[Command, ...]:
        now_s = self._clock.now_s = event.now_s
        if self._policies.refuse_late:
            self._watch_queue(now_s)
        # What is offered again must not be refused in the same breath.
        if not self._leaving or isinstance(event, InvocationOffered):
            return self._commands(event, now_s)
        return self._refuse_impatient(now_s) + self._commands(event, now_s)

    def _commands(self, event: Event, now_s: float) -> tuple[Command, ...]:
        match event:
            case InvocationOffered():
                return self._offer(event)
            case ReplicaProgressed():
                return self._progress(event)
            case FirstTokenSent():
                return self._note_first_token(event)
            case InvocationEnded():
                return self._end(event)
            case InvocationWithdrawn():
                return self._withdraw(event)
            case ReplicaReported():
                return self._report(event)
            case ReplicaLost():
                self._lose(event.replica_id)
            case PoliciesChanged():
                self._change_policies(event.policies)
            case Ticked():
                for replica in list(self._replicas.values()):
                    if now_s - replica.seen_at_s > SILENCE_S:
                        self._lose(replica.id)
                self._homes.forget_old(now_s)
                return self._shed_hopeless(now_s) + self._fill_all(now_s)
            case _:
                assert_never(event)
        return self._fill_all(now_s)

    @property
    def leased(self) -> Collection[InvocationId]:
        """What has been given to replicas and has not ended, as far as this router knows."""
        return self._leases.keys()

    def invocation(self, id: InvocationId) -> Invocation | None:
        """The call as it was last offered, while it waits or has a lease."""
        waiting = self._waiting.get(id)
        if waiting is not None:
            return waiting.invocation
        lease = self._leases.get(id)
        return None if lease is None else lease.running.invocation

    @property
    def replicas(self) -> Collection[ReplicaId]:
        """All that are known, whether they take work or not."""
        return self._replicas.keys()

    def picture(self, now_s: float) -> PoolPicture:
        self._clock.now_s = now_s
        replicas = tuple(r.snapshot() for r in sorted(self._replicas.values(), key=_BY_ID))
        return PoolPicture(
            self.name, now_s, len(self._waiting), self._dispatched, self._refused, replicas
        )

    def why_waiting(self, invocation_id: InvocationId) -> str:
        """The reason why an invocation waits; empty when it does not."""
        waiting = self._waiting.get(invocation_id)
        if waiting is None:
            return ""
        if waiting.bound_to is not None:
            return f"in the queue of {waiting.bound_to}: {waiting.held_because}"
        if not self._open:
            return f"none of {len(self._replicas)} replicas has room"
        return waiting.held_because

    # Events

    def _offer(self, event: InvocationOffered) -> tuple[Command, ...]:
        invocation, now_s = event.invocation, event.now_s
        if not invocation.buffer:
            return self._take(invocation, now_s, [])
        latest = self._buffers.get(invocation.buffer)
        if latest is not None and latest.is_later_than(invocation):
            self._taken_back.pop(invocation.id, None)
            return (_superseded(invocation.id, latest.run_id),)
        commands: list[Command] = []
        freed: list[_Replica] = []
        place_s = invocation.arrived_at_s
        if latest is None or latest.run_id != invocation.run_id:
            if latest is not None and self._supersede(latest, invocation.run_id, commands, freed):
                earliest_s = invocation.began_at_s - MAX_HEAD_START_S
                place_s = min(place_s, max(latest.arrived_at_s, earliest_s))
            latest = _Buffer(invocation.run_id, invocation.began_at_s, arrived_at_s=place_s)
            self._buffers[invocation.buffer] = latest
            if len(self._buffers) > MAX_BUFFERS:
                self._buffers.popitem(last=False)
        elif invocation.id in latest.ids:  # the same offer again
            place_s = min(place_s, latest.arrived_at_s)
        self._buffers.move_to_end(invocation.buffer)
        latest.ids.add(invocation.id)
        invocation = replace(invocation, arrived_at_s=place_s)
        return (*commands, *self._take(invocation, now_s, freed))

    def _supersede(
        self, older: _Buffer, newer: RunId, commands: list[Command], freed: list[_Replica]
    ) -> bool:
        """End what waits or runs of `older`'s run, for `newer`; False when that was nothing."""
        has_ended_any = False
        for id in sorted(older.ids):
            waiting, lease = self._waiting.get(id), self._leases.get(id)
            if waiting is not None:
                self._unqueue(waiting)
                commands.append(_superseded(id, newer))
            elif lease is not None:
                freed += self._release(id)
                self._taken_back[id] = lease.command.attempt
                commands.append(
                    Preempt(id, lease.command.attempt, lease.replica_id, replaced_by(newer), True)
                )
            has_ended_any |= waiting is not None or lease is not None
        return has_ended_any

    def _take(
        self, invocation: Invocation, now_s: float, freed: list[_Replica]
    ) -> tuple[Command, ...]:
        """Queue `invocation`, or lease it a replica; there is new room on what was `freed`."""
        id = invocation.id
        lease = self._leases.get(id)
        if self._taken_back.get(id, invocation.attempt) < invocation.attempt:
            del self._taken_back[id]  # its ingress knows
        if lease is not None:
            if invocation.attempt <= lease.running.invocation.attempt:
                return (lease.command,)  # the answer was lost on its way: say it again
            freed += self._release(id)
        known = self._waiting.get(id)
        if known is not None:
            # A late copy of an earlier attempt says nothing new.
            if invocation.attempt >= known.invocation.attempt:
                known.invocation, known.work = invocation, None
                if invocation.generated:
                    self._await_client(known, now_s)
                if known.bound_to is not None:
                    replica = self._replicas[known.bound_to]
                    replica.queued_s[id] = _alone_s(invocation, replica.profile)
                    replica.changed()
                known.queue.forget_rank(known)
                return self._fill_all(now_s)
            return ()
        freed += self._unadopt(id)
        waiting = _Waiting(invocation, self._queue)
        has_been_asked = not (self._waiting or freed) and self._may_place_at_once()
        if has_been_asked:
            command = self._place_at_once(waiting, now_s)
            if command is not None:
                return (command,)
        self._enqueue(waiting)
        commands: tuple[Command, ...] = ()
        if not has_been_asked:
            commands = self._fill_all(now_s) if freed else self._fill_for(waiting, now_s)
        if id not in self._waiting or invocation.attempt > 1 or invocation.was_taken:
            return commands  # what goes on after a lost replica or router was admitted before
        why_not = self._why_not_queued(waiting, now_s)
        return (*commands, self._refuse(waiting, why_not)) if why_not else commands

    def _refuse(self, waiting: _Waiting, reason: str) -> Refuse:
        self._unqueue(waiting)
        self._refused += 1
        retry_after_s = MIN_RETRY_AFTER_S
        if self._accepting:
            retry_after_s = max(retry_after_s, self._backlog_s / len(self._accepting))
        return Refuse(waiting.invocation.id, reason, retry_after_s)

    def _why_not_queued(self, waiting: _Waiting, now_s: float) -> str:
        """Why a newcomer that found no place is turned away; empty when it may wait."""
        if self._is_too_much(waiting.invocation.tenant):
            return f"{len(self._waiting) - 1} invocations wait, the bound of pool {self.name!r}"
        bound = self._policies.max_queued_tokens
        if bound is not None and self._queued_tokens > bound and len(self._waiting) > 1:
            return f"prompts of {bound} tokens wait, the bound of pool {self.name!r}"
        if why_not := self._why_in_vain(waiting, now_s):
            return why_not
        if not self._policies.refuse_late or not self._may_be_shed(waiting):
            return ""
        late_s = now_s + WAIT_MARGIN * self._wait_s(waiting) + self._alone_s(waiting)
        late_s -= waiting.invocation.deadline_s
        return f"it would miss its SLO by {late_s:.2f} s" if late_s > 0 else ""

    def _watch_queue(self, now_s: float) -> None:
        """Time has passed, with a queue or without."""
        passed_s = max(0.0, now_s - self._watched_at_s)
        kept = exp(-passed_s / DRAIN_MEMORY_S)
        self._drained *= kept
        self._queueing_s *= kept
        if self._waiting:
            self._queueing_s += DRAIN_MEMORY_S * (1 - kept)
        self._watched_at_s = now_s

    def _may_be_shed(self, waiting: _Waiting) -> bool:
        """Work with an SLO that no engine has begun: what has had a part of them goes on."""
        invocation = waiting.invocation
        is_new = invocation.attempt == 1 and invocation.served_s == 0.0
        return is_new and invocation.deadline_s < inf and bool(self._profiles)

    def _wait_s(self, newcomer: _Waiting) -> float:
        """Expected wait behind what runs, and behind what waits with an earlier deadline: as long
        as profiles say, or as the queue was seen to take for so many."""
        deadline_s = newcomer.invocation.deadline_s
        before = [
            w.load_s
            for w in self._waiting.values()
            if w is not newcomer and w.invocation.deadline_s <= deadline_s
        ]
        wait_s = sum(before) / len(self._accepting)
        if self._queueing_s >= LEAST_DRAIN_S and self._drained > 0:
            wait_s = max(wait_s, len(before) * self._queueing_s / self._drained)
        return wait_s + min((r.wait_s for r in self._accepting), default=0.0)

    # Clients leave

    def _why_in_vain(self, waiting: _Waiting, now_s: float) -> str:
        """Why a newcomer would have no first token before its client leaves; empty when it may."""
        if waiting.latest_s == inf or waiting.invocation.served_s > 0.0 or not self._accepting:
            return ""
        # One replica stands for all.
        wait_s = 0.0 if self._open else self._accepting[0].wait_s
        if self._is_late(waiting, now_s):
            if self._late_line:
                wait_s += self._late_line.wait_s(self._order(waiting, now_s))
        elif self._backlog_s <= len(self._accepting) * (waiting.latest_s - now_s - wait_s):
            return ""  # whatever goes before it
        else:
            wait_s += self._line_now(now_s).wait_s(self._order(waiting, now_s))
            wait_s += max(0.0, self._joined_s - waiting.load_s) / len(self._accepting)
        return "" if now_s + wait_s <= waiting.latest_s else _in_vain(waiting, wait_s, now_s)

    def _line_now(self, now_s: float) -> Line:
        """What waits, in order, as of a moment ago; `_joined_s` is what came since."""
        replicas = len(self._accepting)
        is_old = now_s >= self._lined_up_at_s + EVERY_S
        if is_old or self._joined_s > LINED_UP_S * replicas:
            self._lined_up_at_s, self._joined_s = now_s, 0.0
            self._queue.refresh(self._rank, now_s)
            self._line = Line(float(replicas))
            # A rank that has run out is behind; what has it is as good as late.
            loads_s = [
                (self._order(w, now_s), w.load_s)
                for w in self._waiting.values()
                if not (w.rank is not None and w.rank.worsens and w.rank.until_s <= now_s)
            ]
            for order, load_s in sorted(loads_s):
                self._line.join(order, load_s)
        return self._line

    def _refuse_impatient(self, now_s: float) -> tuple[Command, ...]:
        """Refuse those whose clients have left by the first token, as far as that is known now."""
        gone: list[Command] = []
        while self._leaving and self._leaving[0][0] <= now_s:
            _, _, waiting = heapq.heappop(self._leaving)
            if self._waiting.get(waiting.invocation.id) is not waiting or waiting.latest_s > now_s:
                continue
            if not self._accepting and waiting.invocation.leaves_at_s == inf:
                # How long a start takes says nothing of how long clients wait for it.
                self._await_client(waiting, now_s)
                continue
            gone.append(self._refuse(waiting, "its client has waited for as long as it does"))
        if now_s >= self._judged_at_s + EVERY_S:
            self._judged_at_s = now_s
            gone += self._refuse_late_in_vain(now_s)
            if len(self._leaving) > 2 * len(self._waiting) + 64:
                self._leaving = [
                    e for e in self._leaving if self._waiting.get(e[2].invocation.id) is e[2]
                ]
                heapq.heapify(self._leaving)
        return tuple(gone)

    def _refuse_late_in_vain(self, now_s: float) -> list[Command]:
        """Of what is late, in order, what others of it will keep from a place for too long."""
        self._late.watch(now_s, have_waited=len(self._late_line) > 0)
        line = self._late_line = Line(self._late.speed(len(self._accepting)))
        if not self._accepting:
            return []
        late = [
            (self._order(w, now_s), w) for w in self._waiting.values() if self._is_late(w, now_s)
        ]
        late.sort(key=itemgetter(0))
        gone: list[Command] = []
        for order, waiting in late:
            wait_s, invocation = line.wait_s(order), waiting.invocation
            may_stay = invocation.attempt > 1 or invocation.was_taken or invocation.served_s > 0.0
            if may_stay or now_s + wait_s <= waiting.latest_s:
                line.join(order, waiting.load_s)
            else:
                gone.append(self._refuse(waiting, _in_vain(waiting, wait_s, now_s)))
        return gone

    def _await_client(self, waiting: _Waiting, from_s: float) -> None:
        """`waiting` is refused when its client has waited from `from_s` for as long as it does: by
        its own word, or as the policies assume, and then no shorter than its SLO allows. While
        nodes of a run were served, its client had signs of life: then the policies' word counts."""
        invocation, assumed_s = waiting.invocation, self._policies.patience_s
        if assumed_s == inf:
            return
        if invocation.leaves_at_s < inf and invocation.served_s == 0.0:
            patience_s = invocation.leaves_at_s - invocation.arrived_at_s
        else:
            patience_s = max(assumed_s, invocation.deadline_s - invocation.arrived_at_s)
        if patience_s == inf:
            return
        waiting.leaves_at_s = waiting.latest_s = from_s + patience_s
        if self._accepting:  # a prompt that takes longer than its client waits may be tried
            prompt_s = self._accepting[0].profile.first_token_s(invocation.prompt_tokens)
            waiting.latest_s -= min(prompt_s, patience_s / 2)
        heapq.heappush(self._leaving, (waiting.latest_s, next(_versions), waiting))

    def _is_late(self, waiting: _Waiting, now_s: float) -> bool:
        """Whether it misses its SLO even if it starts now, alone, and is as short as may be."""
        invocation, work = waiting.invocation, self._work_of(waiting)
        latest_s = invocation.deadline_s - work.remaining_s
        if now_s <= latest_s or invocation.until_first_token or invocation.length is None:
            return now_s > latest_s
        shortest = max(1.0, invocation.length.points[0] - invocation.generated)
        return now_s > latest_s + work.token_s * (invocation.expected_tokens - shortest)

    def _order(self, waiting: _Waiting, now_s: float) -> Order:
        """The place of a call in the queue, by a rank that holds."""
        rank, invocation = waiting.rank, waiting.invocation
        if rank is None or rank.until_s <= now_s:
            rank = self._rank(waiting, now_s)
        return rank.value, rank.key, invocation.arrived_at_s, invocation.id

    def _shed_hopeless(self, now_s: float) -> tuple[Command, ...]:
        """Refuse what would be late even if it ran now, alone: others need its place more."""
        if not self._policies.refuse_late:
            return ()
        hopeless = [
            w
            for w in self._waiting.values()
            if self._may_be_shed(w) and now_s + self._alone_s(w) > w.invocation.deadline_s
        ]
        return tuple(self._refuse(w, "it can no longer meet its SLO") for w in hopeless)

    def _alone_s(self, waiting: _Waiting) -> float:
        """Time to the SLO's event on the fastest profile, if it started now."""
        cached = self._cached_tokens(waiting.invocation)
        if cached:
            return min(_work(waiting.invocation, p, 1, cached).remaining_s for p in self._profiles)
        return min(waiting.invocation.remaining_s(p) for p in self._profiles)

    def _cached_tokens(self, invocation: Invocation) -> int:
        """Of a session's prompt, on the replica that is believed to hold most of it."""
        if not invocation.session:
            return 0
        return max((r.cached_tokens(invocation) for r in self._accepting), default=0)

    def _await(self, waiting: _Waiting, replica: _Replica | None) -> None:
        """A session's call is held back for that replica, or for none."""
        if waiting.awaits is not None:
            waiting.awaits.awaited_s -= waiting.awaits_s
            waiting.awaits = None
        if replica is not None:
            invocation = waiting.invocation
            cached = replica.cached_tokens(invocation)
            waiting.awaits_s = replica.profile.prefill_s(invocation.prompt_tokens, 1, cached)
            waiting.awaits = replica
            replica.awaited_s += waiting.awaits_s

    def _is_too_much(self, tenant: str) -> bool:
        """Whether the queue is full, and `tenant` has its part of it."""
        bound, shares = self._policies.max_queued, self._shares
        if len(self._waiting) <= bound or shares.tenants_waiting < 2:
            return len(self._waiting) > bound
        return shares.waiting(tenant) > bound / shares.tenants_waiting

    def _withdraw(self, event: InvocationWithdrawn) -> tuple[Command, ...]:
        id = event.invocation_id
        known = self.invocation(id)
        # The ingress that gives up an attempt that was taken back knows of no newer one.
        is_late = known is not None and event.attempt < known.attempt
        if is_late and id not in self._taken_back:
            return ()
        self._taken_back.pop(id, None)
        waiting = self._waiting.get(id)
        if waiting is not None:
            self._unqueue(waiting)
        return self._fill_freed(self._unadopt(id) + self._release(id), event.now_s)

    def _end(self, event: InvocationEnded) -> tuple[Command, ...]:
        id = event.invocation_id
        freed = self._unadopt(id)
        lease = self._leases.get(id)
        # Its end and the order to take it back may cross: nobody will come for the next attempt.
        has_crossed = self._taken_back.get(id) == event.attempt and event.outcome == "done"
        if lease is not None and (lease.command.attempt == event.attempt or has_crossed):
            invocation = lease.running.invocation
            if event.outcome == "done" and self._policies.corrects:
                replica = self._replicas.get(lease.replica_id)
                self._see_pace(replica, lease.running, event.output_tokens)
            if event.prompt_tokens is not None and invocation.session:
                nodes = len(invocation.prefix)
                self._homes.count(invocation.session, nodes, event.prompt_tokens)
            if event.cached_tokens is not None:
                estimated = invocation.prompt_tokens
                counted = event.prompt_tokens or estimated
                self._picture.correct(
                    lease.replica_id,
                    estimated - lease.uncached_tokens,
                    lease.cache_age,
                    event.cached_tokens * estimated / counted,
                )
            freed += self._release(id, event.output_tokens)
        elif has_crossed and id in self._waiting:
            self._unqueue(self._waiting[id])
        if lease is None or id not in self._leases:
            self._taken_back.pop(id, None)
        return self._fill_freed(freed, event.now_s)

    def _report(self, event: ReplicaReported) -> tuple[Command, ...]:
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            replica = self._replicas[event.replica_id] = _Replica(
                self._clock,
                self._picture,
                self._homes,
                self._homes.working_set(event.replica_id),
                event.replica_id,
                event.deployment,
                event.profile,
                event.max_running,
                event.standby,
                event.accepting,
                event.now_s,
                self._pace_of(event.profile),
            )
        is_changed = replica.host_tokens != event.host_tokens
        if replica.pace.profile != event.profile:
            is_changed, replica.pace = True, self._pace_of(event.profile)
        replica.profile = replica.pace.corrected
        replica.max_running = event.max_running
        replica.standby = event.standby
        replica.step_tokens = event.step_tokens
        replica.host_tokens = event.host_tokens
        replica.accepting_work = event.accepting
        replica.seen_at_s = event.now_s
        if event.prefix_caching and (is_changed or not replica.has_prefix_cache):
            capacity_tokens = event.profile.kv_capacity_tokens + event.host_tokens
            self._picture.add(replica.id, capacity_tokens)
        elif not event.prefix_caching:
            self._picture.remove(replica.id)
        replica.has_prefix_cache = event.prefix_caching
        held = frozenset(event.held)
        for id, running in list(replica.leases.items()):
            if id not in held and event.now_s - running.at_s > LEASE_GRACE_S:
                self._release(id)
        # What this router leased elsewhere since is the other replica's; the rest is adopted.
        unknown = (id for id in held if id not in self._leases and id not in self._waiting)
        self._adopt(replica, frozenset(unknown))
        if not replica.accepting:
            self._unbind(replica)
        is_new_mix = self._list_replica(replica)
        if is_new_mix or (self._queue.waiting and not self._policies.late_binding):
            return self._fill_all(event.now_s)
        return self._fill_one(replica, event.now_s)

    def _pace_of(self, profile: Profile) -> Pace:
        """Replicas of one profile share it."""
        for replica in self._replicas.values():
            if replica.pace.profile == profile:
                return replica.pace
        return Pace(profile)

    def _lose(self, replica_id: ReplicaId) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        for id in replica.leases:
            self._release(id)
        replica.leases.clear()
        replica.wide = 0
        self._picture.remove(replica_id)
        self._homes.lose(replica_id)
        self._adopt(replica, frozenset())
        self._unbind(replica)
        replica.accepting_work = False
        self._list_replica(replica)

    def _unbind(self, replica: _Replica) -> None:
        for waiting in list(replica.queue.waiting.values()):
            replica.queue.remove(waiting)
            waiting.bound_to = None
            self._queue.add(waiting)
        replica.queued_s.clear()
        replica.queued_tokens = 0
        replica.changed()

    def _change_policies(self, policies: Policies) -> None:
        self._policies = policies
        if not policies.reserve:
            self._saved = 0.0
        for replica in self._replicas.values():
            self._unbind(replica)
        self._queue.forget_ranks()

    def _note_first_token(self, event: FirstTokenSent) -> tuple[Command, ...]:
        lease = self._leases.get(event.invocation_id)
        if lease is None:
            return ()
        replica, running = self._replicas[lease.replica_id], lease.running
        if running.first_token_at_s is None:
            self._see_tokens(replica, running, 1, event.now_s)
        if self._policies.admission is ADMIT_ALWAYS:
            return ()  # nothing was freed
        return self._fill_one(replica, event.now_s)

    def _progress(self, event: ReplicaProgressed) -> tuple[Command, ...]:
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            return ()
        for id, tokens in event.tokens:
            running = replica.leases.get(id)
            if running is not None and tokens > running.tokens:
                self._see_tokens(replica, running, tokens, event.now_s)
        preempted = self._preempt(replica, event.now_s)
        if preempted:  # they may go anywhere
            return preempted + self._fill_all(event.now_s)
        return self._fill_one(replica, event.now_s)

    def _see_tokens(self, replica: _Replica, running: Running, tokens: int, now_s: float) -> None:
        batch = min(replica.held, max(1, replica.max_running))
        if self._policies.corrects:
            self._see_pace(replica, running, tokens)
        if running.first_token_at_s is None:
            running.first_token_at_s = now_s
            lease = self._leases[running.invocation.id]
            # The last of its steps gave a token to the others, too.
            replica.prompts_done_s += max(0.0, lease.prompt_s - replica.profile.step_base_s)
            if lease.went_first and tokens == 1:
                prompt_tokens = running.invocation.prompt_tokens
                cached = prompt_tokens - lease.uncached_tokens
                predicted_s = replica.profile.first_token_s(prompt_tokens, batch, cached)
                late_s = now_s - running.at_s - predicted_s
                replica.dispatch_s = learnt_dispatch_s(replica.dispatch_s, late_s)
            replica.prompt_done(lease.uncached_tokens, lease.prompt_s)
        replica.context_tokens += tokens - running.tokens
        running.saw(tokens, now_s, batch, replica.profile)
        running.prompts_seen_s = replica.prompts_done_s
        replica.changed()

    def _see_pace(self, replica: _Replica | None, running: Running, tokens: int) -> None:
        """It has `tokens` now: as soon as predicted?"""
        if replica is None or running.first_token_at_s is None or tokens <= running.tokens:
            return
        batch = min(replica.held, max(1, replica.max_running))
        context_tokens = running.invocation.prompt_tokens + tokens
        step_s = replica.profile.decode_step_s(batch, context_tokens)
        steps_s = (tokens - running.tokens) * (step_s + running.pace_step_s) / 2
        prompts_s = replica.prompts_done_s - running.prompts_seen_s
        if prompts_s > MOST_PROMPTS * steps_s:
            return
        took_s = self._clock.now_s - running.seen_at_s
        if replica.pace.saw(took_s, steps_s + prompts_s):
            for other in self._replicas.values():
                if other.pace is replica.pace:
                    other.profile = replica.pace.corrected
            self._list_replica(replica)

    def _release(self, id: InvocationId, output_tokens: int = 0) -> list[_Replica]:
        """End a lease; the replica that it was on, when that is still known.

        `output_tokens` as far as the caller knows; its tenant pays for no more than it got.
        """
        lease = self._leases.pop(id, None)
        if lease is not None:
            served = lease.running.invocation
            tokens = max(output_tokens, lease.running.tokens)
            paid = served.expected_tokens * served.calls
            self._shares.charge(served.tenant, served.weight, 0, tokens - paid)
        replica = self._replicas.get(lease.replica_id) if lease is not None else None
        if replica is None or lease is None:
            return []
        running = replica.leases.pop(id)
        replica.wide -= running.invocation.calls - 1
        if running.first_token_at_s is None:
            replica.prompt_done(lease.uncached_tokens, lease.prompt_s)
        replica.context_tokens -= running.context_tokens
        self._touch(replica)
        return [replica]

    def _unadopt(self, id: InvocationId) -> list[_Replica]:
        if not self._adopters:
            return []
        freed = [self._replicas[replica_id] for replica_id in sorted(self._adopters.pop(id, ()))]
        for replica in freed:
            replica.adopted -= {id}
            self._touch(replica)
        return freed

    def _adopt(self, replica: _Replica, ids: frozenset[InvocationId]) -> None:
        """`ids` are what the replica holds beyond its leases; nothing else is, any more."""
        for id in replica.adopted - ids:
            self._adopters[id].discard(replica.id)
            if not self._adopters[id]:
                del self._adopters[id]
        for id in ids - replica.adopted:
            self._adopters.setdefault(id, set()).add(replica.id)
        replica.adopted = ids

    def _enqueue(self, waiting: _Waiting) -> None:
        invocation = waiting.invocation
        self._waiting[invocation.id] = waiting
        if self._accepting:
            profile, places = self._accepting[0].profile, max(1, self._accepting[0].max_running)
            cached = self._cached_tokens(invocation) if invocation.session else 0
            waiting.load_s = _load_s(invocation, profile, places, cached)
            self._backlog_s += waiting.load_s
            self._joined_s += waiting.load_s
            if not self._open:
                waiting.predicted_s = self._backlog_s / len(self._accepting)
        waiting.prompt_tokens = invocation.prompt_tokens
        self._queued_tokens += waiting.prompt_tokens
        if invocation.deadline_s < inf and self._accepting:
            latest_s = invocation.deadline_s - self._work_of(waiting).remaining_s
            self._pressure.join(invocation.id, latest_s, waiting.load_s)
        self._queue.add(waiting)
        if invocation.deadline_s == inf:
            self._unbound[invocation.id] = waiting
        # What has had tokens was taken back, or lost its replica: its client waits for the next.
        self._await_client(
            waiting, self._clock.now_s if invocation.generated else invocation.arrived_at_s
        )

    def _unqueue(self, waiting: _Waiting) -> None:
        id = waiting.invocation.id
        del self._waiting[id]
        self._backlog_s = self._backlog_s - waiting.load_s if self._waiting else 0.0
        self._queued_tokens -= waiting.prompt_tokens
        self._pressure.leave(id)
        self._unbound.pop(id, None)
        if waiting.awaits is not None:
            self._await(waiting, None)
        waiting.queue.remove(waiting)
        if waiting.bound_to is not None:
            replica = self._replicas[waiting.bound_to]
            del replica.queued_s[id]
            replica.queued_tokens -= waiting.prompt_tokens
            replica.changed()

    # Lists of replicas

    def _touch(self, replica: _Replica) -> None:
        """The load of a replica changed: is it still listed where it belongs?"""
        replica.changed()
        has_room = replica.accepting and replica.held < replica.max_running + replica.standby
        if has_room != replica.is_open:
            replica.is_open = has_room
            _list(self._open, replica, has_room)

    def _list_replica(self, replica: _Replica) -> bool:
        """Like `_touch`, when the replica itself changed; True when the pool's profiles did."""
        self._touch(replica)
        _list(self._accepting, replica, replica.accepting)
        profiles = tuple(dict.fromkeys(r.profile for r in self._accepting))
        if profiles == self._profiles:
            return False
        self._profiles = profiles
        self._queue.forget_ranks()
        for other in self._accepting:
            other.queue.forget_ranks()
        return True

    # Decisions

    def _fill_for(self, waiting: _Waiting, now_s: float) -> tuple[Command, ...]:
        """A newcomer: whoever waited before it could not be placed, and nothing was freed."""
        if not self._policies.late_binding:
            return self._fill_one(self._bind(waiting), now_s)
        if not self._open:
            return ()
        policies = self._policies
        is_cut = 0 < policies.window < len(self._queue)
        if policies.strict or is_cut or policies.mapping is not None:
            return self._fill(self._queue, self._open, now_s)
        self._queue.refresh(self._rank, now_s)
        assert waiting.rank is not None, "a newcomer has been ranked"
        commands: list[Command] = []
        self._place(waiting, list(self._open), now_s, commands)
        return tuple(commands)

    def _fill_freed(self, freed: Sequence[_Replica], now_s: float) -> tuple[Command, ...]:
        """An invocation left `freed`: one replica, or none; more after a restart of the router."""
        if len(freed) > 1:
            return self._fill_all(now_s)
        return self._fill_one(freed[0], now_s) if freed else ()

    def _fill_one(self, replica: _Replica | None, now_s: float) -> tuple[Command, ...]:
        """Something changed on one replica: who may join it?"""
        if replica is None or not replica.is_open:
            return ()
        if self._policies.late_binding:
            return self._fill(self._queue, (replica,), now_s)
        return self._fill(replica.queue, (replica,), now_s)

    def _fill_all(self, now_s: float) -> tuple[Command, ...]:
        if self._policies.late_binding:
            return self._fill(self._queue, self._open, now_s)
        for waiting in list(self._queue.waiting.values()):
            self._bind(waiting)
        commands: tuple[Command, ...] = ()
        for replica in list(self._open):
            commands += self._fill(replica.queue, (replica,), now_s)
        return commands

    def _fill(
        self, queue: _Queue | _TenantQueues, replicas: Iterable[_Replica], now_s: float
    ) -> tuple[Command, ...]:
        """Offer what waits, in order, to `replicas`, for as long as one of them takes any."""
        if not queue.waiting or not self._profiles:
            return ()
        open_ = list(replicas)
        if not open_:
            return ()
        if self._policies.mapping is not None:
            return self._start_mapped(self._policies.mapping, queue, open_, now_s)
        queue.refresh(self._rank, now_s)
        commands: list[Command] = []
        if self._saved >= 1 and self._unbound:
            self._place_reserved(open_, now_s, commands)
            if not open_:
                return tuple(commands)
        passed_over: list[_HeapEntry] = []
        for entry in self._looked_at(queue, now_s):
            if self._policies.strict and passed_over and entry[0] > min(passed_over)[0]:
                passed_over.append(entry)
                break
            if not self._place(entry[5], open_, now_s, commands):
                passed_over.append(entry)
            if not open_:
                break
        for entry in passed_over:
            queue.push(entry)
        return tuple(commands)

    def _start_mapped(
        self,
        mapping: MappingPolicy,
        queue: _Queue | _TenantQueues,
        replicas: Sequence[_Replica],
        now_s: float,
    ) -> tuple[Command, ...]:
        """Each of `replicas` starts what the mapping of the whole queue gives it."""
        commands: list[Command] = []
        for replica in replicas:
            if not queue.waiting:
                break
            queue.refresh(self._rank, now_s)
            entries: list[_HeapEntry] = []
            while (entry := queue.pop(self._rank, now_s)) is not None:
                entries.append(entry)
            known = {e[3]: e[5] for e in entries}
            batch = mapping.start([w.invocation for w in known.values()], replica, now_s)
            started = [known.pop(id) for id in batch.ids]
            for entry in entries:
                if entry[3] in known:
                    queue.push(entry)
                    if entry[5].bound_to is None:
                        entry[5].held_because = batch.reason
            commands += [self._dispatch(w, replica, batch.reason, now_s) for w in started]
        return tuple(commands)

    def _looked_at(self, queue: _Queue | _TenantQueues, now_s: float) -> Iterator[_HeapEntry]:
        window = self._policies.window
        if not self._policies.shuffled:
            looked = 0
            while (not window or looked < window) and (
                entry := queue.pop(self._rank, now_s)
            ) is not None:
                looked += 1
                yield entry
            return
        entries: list[_HeapEntry] = []
        while (not window or len(entries) < window) and (
            entry := queue.pop(self._rank, now_s)
        ) is not None:
            entries.append(entry)
        entries.sort(key=lambda e: (e[0], e[5].invocation.draw))
        left = iter(entries)
        try:
            yield from left
        finally:
            for entry in left:
                queue.push(entry)

    def _may_place_at_once(self) -> bool:
        policies = self._policies
        by_call = policies.late_binding and not policies.strict and policies.mapping is None
        return by_call and bool(self._open)

    def _place_at_once(self, waiting: _Waiting, now_s: float) -> Command | None:
        """A newcomer when nothing waits: what starts now need not go through the queue."""
        waiting.rank = self._rank(waiting, now_s)
        commands: list[Command] = []
        self._place(waiting, list(self._open), now_s, commands)
        return commands[0] if commands else None

    def _place(
        self, waiting: _Waiting, open_: list[_Replica], now_s: float, commands: list[Command]
    ) -> bool:
        """Dispatch `waiting` to one of `open_` if the policies agree; drop what closes."""
        invocation = waiting.invocation
        if waiting.bound_to is not None:
            replica, reason = open_[0], waiting.held_because
        else:
            is_uniform = len(self._profiles) == 1
            if invocation.session:
                self._await(waiting, None)
                self._homes.forget_old(now_s)
            pool = PoolSnapshot(
                self.name, now_s, open_, self._dispatched, is_uniform, self._accepting
            )
            decision = self._policies.routing.route(invocation, pool)
            if isinstance(decision, Hold):
                waiting.held_because = decision.reason
                if decision.replica_id is not None:
                    self._await(waiting, self._replicas[decision.replica_id])
                return False
            replica, reason = self._replicas[decision.replica_id], decision.reason
            assert replica in open_, f"routed to {replica.id}, which has no room"
        answer = self._policies.admission.admit(invocation, replica, now_s)
        if isinstance(answer, Admit):
            commands.append(self._dispatch(waiting, replica, reason, now_s))
            if not replica.is_open:
                open_.remove(replica)
            return True
        if waiting.bound_to is None:
            waiting.held_because = answer.reason
            if invocation.session:
                self._await(waiting, replica)
        if answer.closes:
            open_.remove(replica)
        return False

    def _place_reserved(self, open_: list[_Replica], now_s: float, commands: list[Command]) -> None:
        """It is the turn of work without an SLO, whatever that costs the others."""
        waiting = next(iter(self._unbound.values()))
        if not open_ or waiting.bound_to is not None:
            return
        if now_s - waiting.invocation.arrived_at_s < self._policies.reserve_after_s:
            return
        pool = PoolSnapshot(self.name, now_s, open_, self._dispatched)
        decision = self._policies.routing.route(waiting.invocation, pool)
        if isinstance(decision, Hold):
            return
        replica = self._replicas[decision.replica_id]
        answer = self._policies.admission.admit(waiting.invocation, replica, now_s)
        if isinstance(answer, Defer) and answer.closes:
            return
        self._saved -= 1
        reason = f"{self._policies.reserve:.0%} are for work without an SLO"
        commands.append(self._dispatch(waiting, replica, reason, now_s))
        if not replica.is_open:
            open_.remove(replica)

    def _bind(self, waiting: _Waiting) -> _Replica | None:
        """Early binding: give it to a replica's own queue."""
        invocation = waiting.invocation
        bound = len(self._waiting) - len(self._queue)
        if invocation.session:
            self._homes.forget_old(self._clock.now_s)
        pool = PoolSnapshot(
            self.name,
            self._clock.now_s,
            self._accepting,
            self._dispatched + bound,
            accepting=self._accepting,
        )
        decision = self._policies.routing.route(invocation, pool)
        waiting.held_because = decision.reason
        if isinstance(decision, Hold):
            return None
        replica = self._replicas[decision.replica_id]
        assert replica.accepting, f"bound to {replica.id}, which is closed"
        self._queue.remove(waiting)
        waiting.bound_to = replica.id
        replica.queue.add(waiting)
        replica.queued_s[invocation.id] = _alone_s(invocation, replica.profile)
        replica.queued_tokens += waiting.prompt_tokens
        replica.changed()
        return replica

    def _rank(self, waiting: _Waiting, now_s: float) -> Rank:
        work = waiting.work or self._work_of(waiting)
        pressure = self._pressure
        if self._waiting:
            pressure.pass_to(now_s)
            ahead_s = pressure.waiting_s / max(1, len(self._accepting))
            remaining_s, service_s, token_s = work.remaining_s, work.service_s, work.token_s
            work = Work(remaining_s, service_s, token_s, ahead_s, pressure.missed)
        return self._policies.ordering.rank(waiting.invocation, work, now_s)

    def _work_of(self, waiting: _Waiting) -> Work:
        """Of a call on the fastest profile."""
        work = waiting.work
        if work is None:
            invocation = waiting.invocation
            cached = self._cached_tokens(invocation) if invocation.session else 0
            work = _work(invocation, self._profiles[0], 1, cached)
            if len(self._profiles) > 1:
                work = min(
                    [_work(invocation, p, 1, cached) for p in self._profiles], key=_BY_REMAINING
                )
            waiting.work = work
        return work

    def _dispatch(
        self, waiting: _Waiting, replica: _Replica, reason: str, now_s: float
    ) -> Dispatch:
        invocation, rank = waiting.invocation, waiting.rank
        assert replica.is_open, f"dispatch to {replica.id}, which has no room"
        assert rank is not None, "what is dispatched has been ranked"
        profile, work, batch = replica.profile, waiting.work, replica.batch
        if batch > 1 or len(self._profiles) > 1 or work is None or invocation.session:
            work = _work(invocation, profile, batch)
        saved_s = 0.0
        cached = replica.cached_tokens(invocation) if invocation.prefix else 0
        if cached:
            tokens = invocation.prompt_tokens
            saved_s = profile.prefill_s(tokens) - profile.prefill_s(tokens, cached_tokens=cached)
        command = Dispatch(
            invocation_id=invocation.id,
            attempt=invocation.attempt,
            replica_id=replica.id,
            deployment=replica.deployment,
            priority=rank.value,
            queue_s=now_s - invocation.arrived_at_s,
            slack_s=invocation.deadline_s - now_s,
            remaining_s=work.remaining_s - saved_s,
            reason=f"{rank.reason}; {reason}",
            predicted_queue_s=waiting.predicted_s,
            service_s=work.service_s - saved_s,
            cached_tokens=cached,
            home=self._home_of(invocation),
        )
        if self._waiting:
            if self._pressure.leave(invocation.id):
                self._pressure.begins(waiting.load_s, now_s)
            self._unqueue(waiting)
            if self._late_line and self._is_late(waiting, now_s):
                self._late.served(waiting.load_s)
        else:  # it never waited
            if invocation.deadline_s < inf:
                self._pressure.begins(_load_s(invocation, profile, replica.max_running), now_s)
            self._shares.passed(invocation.tenant)
        if self._waiting:
            self._drained += 1.0
        self._shares.charge(
            invocation.tenant,
            invocation.weight,
            invocation.prompt_tokens,
            invocation.expected_tokens * invocation.calls,
        )
        if self._unbound and invocation.deadline_s < inf:
            share = self._policies.reserve
            self._saved = min(1.0, self._saved + share / (1 - share))
        # A standby starts when a place frees; in a freed place it starts at once.
        start_s = now_s + (replica.wait_s if replica.held >= replica.max_running else 0.0)
        running = Running(invocation, now_s, start_s + command.service_s)
        uncached_tokens = invocation.prompt_tokens - cached
        went_first = not replica.prefilling and replica.held < replica.max_running
        prompt_s = profile.prefill_s(invocation.prompt_tokens, 1, cached)
        age = 0
        if cached:
            nodes = self._picture.cached_nodes(replica.id, invocation.prefix)
            age = self._picture.age_of(replica.id, invocation.prefix, nodes)
        self._leases[invocation.id] = _Lease(
            replica.id, running, command, uncached_tokens, prompt_s, age, went_first
        )
        replica.leases[invocation.id] = running
        replica.wide += invocation.calls - 1
        replica.prompt_sent(invocation, uncached_tokens, prompt_s)
        if invocation.prefix and replica.has_prefix_cache:
            self._picture.use(replica.id, invocation.session, invocation.prefix)
        if invocation.session:
            context_tokens = invocation.prompt_tokens + invocation.expected_tokens
            self._homes.note(invocation.session, replica.id, context_tokens, now_s)
        self._touch(replica)
        self._dispatched += 1
        return command

    def _home_of(self, invocation: Invocation) -> ReplicaId:
        home = self._homes.of(invocation.session) if invocation.session else None
        return ReplicaId("") if home is None else home.replica_id

    def _preempt(self, replica: _Replica, now_s: float) -> tuple[Command, ...]:
        policy = self._policies.preemption
        queue = self._queue if self._policies.late_binding else replica.queue
        if policy is None or not queue.waiting or not self._profiles:
            return ()
        queue.refresh(self._rank, now_s)
        head = _Head(queue, self._rank, now_s)
        victims = policy.preempt(replica, head, now_s, self._next_place_s)
        head.put_back()
        return tuple(
            self._take_back(replica, id, reason)
            for id, reason in victims
            if replica.leases[id].invocation.resumable
        )

    def _next_place_s(self) -> float:
        """When the pool has its next place, in seconds from now, as some of its replicas tell."""
        looked_at = self._accepting[:: max(1, len(self._accepting) // PLACES_LOOKED_AT)]
        return min([r.wait_s for r in looked_at], default=inf)

    def _take_back(self, replica: _Replica, id: InvocationId, reason: str) -> Preempt:
        running = replica.leases[id]
        before = running.invocation
        self._release(id)
        self._taken_back[id] = before.attempt
        invocation = before.continued(before.attempt + 1, running.tokens)
        waiting = _Waiting(invocation, self._queue)
        self._enqueue(waiting)
        if not self._policies.late_binding:
            self._bind(waiting)
        return Preempt(id, before.attempt, replica.id, reason)


def _superseded(id: InvocationId, newer: RunId) -> Refuse:
    return Refuse(id, replaced_by(newer), 0.0, superseded=True)


def _list(replicas: list[_Replica], replica: _Replica, belongs: bool) -> None:
    """Put `replica` into the list by id, or take it out."""
    i = bisect_left(replicas, replica.id, key=_BY_ID)
    is_listed = i < len(replicas) and replicas[i] is replica
    if belongs and not is_listed:
        replicas.insert(i, replica)
    elif is_listed and not belongs:
        del replicas[i]


def _alone_s(invocation: Invocation, profile: Profile) -> float:
    return profile.service_s(invocation.prompt_tokens, invocation.expected_tokens)


def _load_s(invocation: Invocation, profile: Profile, places: int, cached_tokens: int = 0) -> float:
    """Replica-seconds that a call takes where `places` are full: prompts go one after another, the
    steps are shared."""
    prompt, tokens = invocation.prompt_tokens, invocation.expected_tokens
    step_s = profile.decode_step_s(places, prompt + tokens / 2)
    return profile.prefill_s(prompt, 1, cached_tokens) + (tokens - 1) * step_s / places


def _in_vain(waiting: _Waiting, wait_s: float, now_s: float) -> str:
    first_s = wait_s + waiting.leaves_at_s - waiting.latest_s
    left_s = waiting.leaves_at_s - now_s
    return f"its first token is expected in {first_s:.1f} s, its client leaves in {left_s:.1f} s"


def _left_alone_s(running: Running, profile: Profile) -> float:
    prompt_s = 0.0
    if running.first_token_at_s is None:
        prompt_s = profile.prefill_s(running.invocation.prompt_tokens)
    return prompt_s + running.left_tokens * profile.decode_step_s(1, running.context_tokens)


def _tokens_of(nodes: int, invocation: Invocation, home: Home | None) -> float:
    """Tokens of the prompt's first nodes, which are cut by characters.

    Up to the end of an earlier prompt of the session an engine has counted them.
    """
    prompt_tokens, length = invocation.prompt_tokens, len(invocation.prefix)
    if home is None or not 0 < home.counted_nodes < length:
        return nodes * _node_tokens(prompt_tokens, length)
    counted, tokens = home.counted_nodes, home.counted_tokens
    if nodes <= counted:
        return nodes * _node_tokens(tokens, counted)
    return tokens + (nodes - counted) * max(0, prompt_tokens - tokens) / (length - counted)


def _node_tokens(tokens: int, nodes: int) -> float:
    """Of each node of a prompt; half a node stands for the text behind the last one."""
    if 0 <= tokens - nodes * PREFIX_BLOCK_TOKENS < PREFIX_BLOCK_TOKENS:
        return PREFIX_BLOCK_TOKENS
    return tokens / (nodes + 0.5)


def _work(invocation: Invocation, profile: Profile, batch: int = 1, cached_tokens: int = 0) -> Work:
    prompt, tokens = invocation.prompt_tokens, invocation.expected_tokens
    service_s = own_s = profile.service_s(prompt, tokens, batch, cached_tokens)
    if invocation.until_first_token:
        own_s = profile.first_token_s(prompt, batch, cached_tokens)
    token_s = profile.decode_step_s(batch, prompt + tokens)
    return Work(own_s + invocation.downstream_s, service_s, token_s)
