"""Batch mapping by scheduling theory and local search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cato.policies.mapping import kernels
from cato.policies.mapping.latency import LatencyModel
from cato.policies.mapping.packing import packed, unpacked
from cato.policies.mapping.problem import Mapping, MappingRequest, checked


@dataclass(frozen=True, slots=True)
class MooreSmith:
    """Choose the requests to keep on time, order them at least latency, then improve by search.

    Moore-Hodgson keeps as many requests on time as one server can; Smith's rule then gives the
    least summed latency for those kept. Together they give the exact numerator and, for it, the
    exact denominator of G for batches of one. A batch of b is treated as b requests of 1/b of their
    time each. Batch effects, and cases in which G prefers fewer on time, are left to a local search
    from the best start of all batch sizes: first-improvement over squeeze, delay, swap, split and
    the place of a batch, then again after three random changes. Arrival order in full batches is
    among the starts, so no mapping is worse than that.

    The work of a call is bounded by `visits_per_request` (times the number of requests), not by a
    clock: the same call has the same answer. A visit (one request examined while a move is
    evaluated) takes 5 to 10 ns.
    """

    visits_per_request: int = 2_000

    def map(
        self, requests: Sequence[MappingRequest], latency: LatencyModel, max_batch: int, seed: int
    ) -> Mapping:
        checked(requests, max_batch)
        if not requests:
            return Mapping((), 0.0, "nothing waits")
        cap = min(max_batch, len(requests))
        max_visits = self.visits_per_request * len(requests)
        found = kernels.moore_smith(*packed(requests, latency, cap), cap, seed, max_visits)
        return unpacked(requests, *found, "kept on time by Moore-Hodgson, then improved")
