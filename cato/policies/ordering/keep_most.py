"""Which queued calls to keep in time, and in which order they start."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from cato.core.ids import InvocationId
from cato.core.policies import BY_LOAD, Plan, Queued


def keep_most(
    queued: Sequence[Queued],
    replicas: float,
    now_s: float,
    stretch: float = 1.0,
    margin: float = 1.0,
) -> Plan:
    """Keep as many calls in time as possible; of those kept, the shortest go first.

    All replicas are taken for one that works `replicas` times as fast, on one call at a time. In
    the order in which calls must have ended, whenever one would start too late, the largest so far
    is not kept (Moore, 1968); work counts `stretch` times there. Then from the back: of the kept
    calls that may be the last, the largest is (Smith, 1956); none if there is no such call: then
    the one that may wait longest. Here work counts `margin` times: a call that waits for shorter
    ones until it must start is late if anything comes between. So none that is kept goes late for
    a shorter one, but those that can wait do, since more calls may come. Takes O(n log n): a queue
    may hold thousands, where the kernels of `cato.policies.mapping` do the same in O(n^2) for one
    batch.
    """
    kept, least_dropped_s = _kept(queued, stretch / replicas, now_s)
    per_load = margin / replicas
    left = sorted((by_s + load_s * per_load, load_s, id) for by_s, load_s, id in kept)
    end_s = now_s + per_load * sum(load_s for _, load_s, _ in kept)
    may_be_last: list[tuple[float, float, InvocationId]] = []
    start_by_s = inf
    plan: list[tuple[InvocationId, float, float, float]] = []
    while left or may_be_last:
        while left and (left[-1][0] >= end_s or not may_be_last):
            due_s, load_s, id = left.pop()
            heapq.heappush(may_be_last, (-load_s, -due_s, id))
        minus_load_s, minus_due_s, id = heapq.heappop(may_be_last)
        start_by_s = min(start_by_s, minus_load_s * per_load - minus_due_s)
        plan.append((id, start_by_s - BY_LOAD * minus_load_s, end_s, -minus_load_s))
        end_s += minus_load_s * per_load
    plan.reverse()
    places = {id: place_s for id, place_s, _, _ in plan}
    ends_s, loads_s = [end_s for _, _, end_s, _ in plan], [load_s for _, _, _, load_s in plan]
    return Plan(places, least_dropped_s, ends_s, loads_s)


def _kept(queued: Sequence[Queued], per_load: float, now_s: float) -> tuple[list[Queued], float]:
    """The calls that are kept, and the least load of one that is not; `per_load` seconds each."""
    jobs = sorted((by_s + load_s * per_load, load_s, id) for by_s, load_s, id in queued)
    kept: list[tuple[float, InvocationId]] = []
    dropped: set[InvocationId] = set()
    end_s, least_dropped_s = now_s, inf
    for due_s, load_s, id in jobs:
        heapq.heappush(kept, (-load_s, id))
        end_s += load_s * per_load
        if end_s > due_s:
            minus_load_s, gone = heapq.heappop(kept)
            end_s += minus_load_s * per_load
            dropped.add(gone)
            least_dropped_s = min(least_dropped_s, -minus_load_s)
    return [call for call in queued if call[2] not in dropped], least_dropped_s
