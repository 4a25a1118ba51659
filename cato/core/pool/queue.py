"""Queues of a pool: calls in order of rank, and those that wait for their turn."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, overload

from cato.core.decision import Rank
from cato.core.ids import InvocationId, ReplicaId
from cato.core.policies import Work
from cato.core.snapshot import Invocation

if TYPE_CHECKING:
    from cato.core.pool.replica import Replica
    from cato.core.pool.tenant_queues import TenantQueues

# How much of the queue a preemption policy sees: more calls could not start at once anyway.
PREEMPTORS_SHOWN = 8
# Shorter waits need no reason: half the time in which people notice a delay.
LEAST_WAIT_S = 0.05


@dataclass(slots=True, eq=False)
class Waiting:
    invocation: Invocation
    queue: Queue | TenantQueues | Parked
    bound_to: ReplicaId | None = None
    held_because: str = ""
    rank: Rank | None = None
    work: Work | None = None
    # Work that it adds to the backlog, in replica-seconds, the part of it that is decoding, and its
    # expected queueing delay on arrival.
    load_s: float = 0.0
    decoding_s: float = 0.0
    predicted_s: float = 0.0
    prompt_tokens: int = 0
    # Early binding: tokens of its prompt that its replica had not cached then.
    uncached_tokens: int = 0
    # How long before its latest start it should have started; see `PlanningPolicy`.
    reserve_s: float = 0.0
    # When its client leaves without a first token, and the latest dispatch that avoids this.
    leaves_at_s: float = inf
    latest_s: float = inf
    # The replica for which it was last held back, and the prompt work that it brings there.
    awaits: Replica | None = None
    awaits_s: float = 0.0
    # Where calls take turns: its turn has come.
    has_turn: bool = False
    # Version of its current rank; heap entries with another version are outdated.
    version: int = 0
    # When it joined the pool, and how many calls the pool had dispatched by then.
    joined_at_s: float = 0.0
    dispatched_before: int = 0
    # How long it had been queued before it was preempted.
    waited_s: float = 0.0

    def why_it_waited(self, now_s: float, dispatched: int) -> str:
        """For the reason of its dispatch, after `dispatched` calls; empty if it hardly waited."""
        waited_s = now_s - self.joined_at_s
        if waited_s < LEAST_WAIT_S:
            return ""
        others = dispatched - self.dispatched_before
        why = self.held_because or "no replica had room"
        return f"; waited {waited_s:.2f} s while {others} others started: {why}"


Entry = tuple[int, float, float, InvocationId, int, Waiting]


class Queue:
    """Queued calls in order of rank; expired ranks are computed again."""

    __slots__ = ("_due", "_heap", "_unranked", "_versions", "waiting")

    def __init__(self, versions: Iterator[int]) -> None:
        """`versions`: one counter for all queues of a pool, because calls move between them."""
        self._versions = versions
        self.waiting: dict[InvocationId, Waiting] = {}
        self._heap: list[Entry] = []
        self._due: list[tuple[float, InvocationId, int, Waiting]] = []
        self._unranked: list[Waiting] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, waiting: Waiting) -> None:
        waiting.queue = self
        self.waiting[waiting.invocation.id] = waiting
        self.forget_rank(waiting)

    def remove(self, waiting: Waiting) -> None:
        del self.waiting[waiting.invocation.id]
        waiting.version = 0

    def forget_rank(self, waiting: Waiting) -> None:
        waiting.version = next(self._versions)
        waiting.rank = None
        self._unranked.append(waiting)
        # Nothing is ranked before there is a replica; calls come and leave meanwhile.
        if len(self._unranked) > 2 * len(self.waiting) + 64:
            self._unranked = list(dict.fromkeys(filter(self._has, self._unranked)))

    def forget_ranks(self) -> None:
        """Recompute all ranks: the replicas' profiles or the ordering policy have changed."""
        self._heap.clear()
        self._due.clear()
        self._unranked.clear()
        for waiting in self.waiting.values():
            waiting.work = None
            self.forget_rank(waiting)

    def refresh(self, rank: Callable[[Waiting, float], Rank], now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            _, id, version, waiting = heapq.heappop(self._due)
            if waiting.version == version and self.waiting.get(id) is waiting:
                self.forget_rank(waiting)
        if self._unranked:
            fresh, self._unranked = self._unranked, []
            for waiting in fresh:
                if waiting.rank is None and self._has(waiting):
                    self._place(waiting, rank(waiting, now_s))
        # Calls that left stay in the heaps until here.
        most = 2 * len(self.waiting) + 64
        if len(self._heap) > most:
            self._heap = [e for e in self._heap if e[4] == e[5].version and self._has(e[5])]
            heapq.heapify(self._heap)
        if len(self._due) > most:
            self._due = [e for e in self._due if e[2] == e[3].version and self._has(e[3])]
            heapq.heapify(self._due)

    def pop(self, rank: Callable[[Waiting, float], Rank], now_s: float) -> Entry | None:
        """Take the first call out of the order, but keep it in the queue; `push` puts it back."""
        heap = self._heap
        while heap:
            entry = heapq.heappop(heap)
            waiting = entry[5]
            if entry[4] != waiting.version:
                continue
            if waiting.rank is None or now_s < waiting.rank.until_s or not waiting.rank.worsens:
                return entry
            waiting.version = next(self._versions)
            waiting.rank = rank(waiting, now_s)
            fresh = entry_of(waiting, waiting.rank)
            if not heap or fresh < heap[0]:
                return fresh
            heapq.heappush(heap, fresh)
        return None

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)

    def check_invariants(self, taken_out: Collection[InvocationId] = ()) -> None:
        """Assert that every queued call can be found; `taken_out` are those of a current walk."""
        in_order = {e[3] for e in self._heap if e[4] == e[5].version}
        unranked = {w.invocation.id for w in self._unranked}
        for id, waiting in self.waiting.items():
            assert waiting.version and waiting.invocation.id == id
            assert id in in_order or id in unranked or id in taken_out, f"{id} cannot be found"

    def _has(self, waiting: Waiting) -> bool:
        return self.waiting.get(waiting.invocation.id) is waiting

    def _place(self, waiting: Waiting, rank: Rank) -> None:
        waiting.rank = rank
        invocation = waiting.invocation
        heapq.heappush(self._heap, entry_of(waiting, rank))
        if rank.until_s < inf and not rank.worsens:
            heapq.heappush(self._due, (rank.until_s, invocation.id, waiting.version, waiting))


class Parked:
    """Calls that may not start before their turn, by arrival."""

    __slots__ = ("_heap", "_versions", "waiting")

    def __init__(self, versions: Iterator[int]) -> None:
        self._versions = versions
        self.waiting: dict[InvocationId, Waiting] = {}
        self._heap: list[tuple[float, InvocationId, int, Waiting]] = []

    def add(self, waiting: Waiting) -> None:
        invocation = waiting.invocation
        waiting.queue, waiting.version = self, next(self._versions)
        self.waiting[invocation.id] = waiting
        entry = (invocation.arrived_at_s, invocation.id, waiting.version, waiting)
        heapq.heappush(self._heap, entry)

    def remove(self, waiting: Waiting) -> None:
        del self.waiting[waiting.invocation.id]
        waiting.version = 0

    def forget_rank(self, waiting: Waiting) -> None:
        """Parked calls have no rank."""

    def first(self) -> Invocation | None:
        while self._heap and self._heap[0][2] != self._heap[0][3].version:
            heapq.heappop(self._heap)
        return self._heap[0][3].invocation if self._heap else None


class Head(Sequence[Invocation]):
    """The head of a queue in order, taken out only as far as it is read."""

    __slots__ = ("_entries", "_now_s", "_queue", "_rank")

    def __init__(
        self,
        queue: Queue | TenantQueues,
        rank: Callable[[Waiting, float], Rank],
        now_s: float,
    ) -> None:
        """`queue` has been refreshed, and no other walk may start until `put_back`."""
        self._queue, self._rank, self._now_s = queue, rank, now_s
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return min(PREEMPTORS_SHOWN, len(self._queue))

    @overload
    def __getitem__(self, i: int) -> Invocation: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Invocation]: ...
    def __getitem__(self, i: int | slice) -> Invocation | Sequence[Invocation]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if 0 <= i < len(self._entries):  # read before: policies ask for the first one constantly
            return self._entries[i][5].invocation
        i += len(self) if i < 0 else 0
        if not 0 <= i < len(self):
            raise IndexError(i)
        while len(self._entries) <= i:
            entry = self._queue.pop(self._rank, self._now_s)
            assert entry is not None, "a queued call is in the order"
            self._entries.append(entry)
        return self._entries[i][5].invocation

    def put_back(self) -> None:
        for entry in self._entries:
            self._queue.push(entry)


def entry_of(waiting: Waiting, rank: Rank) -> Entry:
    invocation = waiting.invocation
    return (
        rank.value,
        rank.key,
        invocation.arrived_at_s,
        invocation.id,
        waiting.version,
        waiting,
    )
