"""Which queued calls to keep in time, and in which order they start."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from cato.core.ids import InvocationId
from cato.core.policies import BY_LOAD, Plan, Queued


def keep_most(queued: Sequence[Queued], replicas: float, now_s: float) -> Plan:
    """Keep as many calls in time as possible; of those kept, the shortest go first.

    All replicas are taken for one that works `replicas` times as fast, on one call at a time. In
    the order in which calls must have ended, whenever one would start too late, the largest so far
    is not kept (Moore, 1968). Then from the back: of the kept calls that may be the last, the
    largest is (Smith, 1956). So none that is kept goes late for a shorter one, but those that can
    wait do, since more calls may come. Takes O(n log n): a queue may hold thousands, where the
    kernels of `cato.policies.mapping` do the same in O(n^2) for one batch.
    """
    jobs = sorted((by_s + load_s / replicas, load_s, id) for by_s, load_s, id in queued)
    kept: list[tuple[float, InvocationId]] = []
    dropped: set[InvocationId] = set()
    end_s, least_dropped_s = now_s, inf
    for due_s, load_s, id in jobs:
        heapq.heappush(kept, (-load_s, id))
        end_s += load_s / replicas
        if end_s > due_s:
            minus_load_s, gone = heapq.heappop(kept)
            end_s += minus_load_s / replicas
            dropped.add(gone)
            least_dropped_s = min(least_dropped_s, -minus_load_s)
    left = [job for job in jobs if job[2] not in dropped]
    may_be_last: list[tuple[float, float, InvocationId]] = []
    start_by_s = inf
    plan: list[tuple[InvocationId, float, float]] = []
    while left or may_be_last:
        while left and (left[-1][0] >= end_s or not may_be_last):
            due_s, load_s, id = left.pop()
            heapq.heappush(may_be_last, (-load_s, -due_s, id))
        minus_load_s, minus_due_s, id = heapq.heappop(may_be_last)
        end_s += minus_load_s / replicas
        start_by_s = min(start_by_s, minus_load_s / replicas - minus_due_s)
        plan.append((id, start_by_s, -minus_load_s))
    plan.reverse()
    peaks: list[tuple[float, float]] = []
    for _, by_s, load_s in plan:
        if not peaks or load_s > peaks[-1][0]:
            peaks.append((load_s, by_s))
    places = {id: by_s + BY_LOAD * load_s for id, by_s, load_s in plan}
    return Plan(places, least_dropped_s, tuple(peaks))
