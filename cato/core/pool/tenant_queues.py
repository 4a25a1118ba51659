"""A pool's queued calls by tenant: tenants take turns by their shares."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from math import inf

from cato.core.decision import Rank
from cato.core.fairness import TokenShares
from cato.core.ids import InvocationId
from cato.core.pool.queue import Entry, Queue, Waiting


class TenantQueues:
    """A pool's queued calls, with one queue per tenant.

    Tenants compete by the rank of their first call, but a tenant ahead of its share yields to the
    others.
    """

    __slots__ = ("_bound", "_by_tenant", "_heads", "_shares", "_versions", "waiting")

    def __init__(self, shares: TokenShares, versions: Iterator[int]) -> None:
        self._versions = versions
        self.waiting: dict[InvocationId, Waiting] = {}
        self._by_tenant: dict[str, Queue] = {}
        # The first call of each tenant during a walk; taken out of their own queues.
        self._heads: list[tuple[bool, Entry]] | None = None
        self._shares = shares
        self._bound = inf  # the shares' bound when the walk began

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, waiting: Waiting) -> None:
        tenant = waiting.invocation.tenant
        queue = self._by_tenant.get(tenant)
        if queue is None:
            queue = self._by_tenant[tenant] = Queue(self._versions)
        queue.add(waiting)
        waiting.queue = self
        self.waiting[waiting.invocation.id] = waiting
        self._shares.joined(tenant)

    def remove(self, waiting: Waiting) -> None:
        tenant = waiting.invocation.tenant
        queue = self._by_tenant[tenant]
        queue.remove(waiting)
        if not queue.waiting:
            del self._by_tenant[tenant]
        del self.waiting[waiting.invocation.id]
        self._shares.left(tenant)

    def forget_rank(self, waiting: Waiting) -> None:
        self._by_tenant[waiting.invocation.tenant].forget_rank(waiting)

    def forget_ranks(self) -> None:
        for queue in self._by_tenant.values():
            queue.forget_ranks()

    def refresh(self, rank: Callable[[Waiting, float], Rank], now_s: float) -> None:
        heads, self._heads = self._heads or [], None
        for _, entry in heads:
            if entry[4] == entry[5].version:
                self.push(entry)
        for queue in self._by_tenant.values():
            queue.refresh(rank, now_s)

    def pop(self, rank: Callable[[Waiting, float], Rank], now_s: float) -> Entry | None:
        """Like `Queue.pop`; call `refresh` before a walk."""
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
        heads: list[tuple[bool, Entry]],
        rank: Callable[[Waiting, float], Rank],
        now_s: float,
    ) -> None:
        queue = self._by_tenant.get(tenant)
        entry = None if queue is None else queue.pop(rank, now_s)
        if entry is not None:
            heapq.heappush(heads, (self._shares.served(tenant) > self._bound, entry))

    def push(self, entry: Entry) -> None:
        self._by_tenant[entry[5].invocation.tenant].push(entry)

    def check_invariants(self) -> None:
        """Assert that the tenants' queues are consistent."""
        found = {id: w for q in self._by_tenant.values() for id, w in q.waiting.items()}
        assert found == self.waiting, "each waits in the queue of its tenant"
        taken_out = {e[3] for _, e in self._heads or () if e[4] == e[5].version}
        for tenant, queue in self._by_tenant.items():
            assert queue.waiting, f"the queue of {tenant!r} is empty"
            assert len(queue.waiting) == self._shares.waiting(tenant)
            queue.check_invariants(taken_out)
