"""Batches in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cato.policies.mapping.latency import LatencyModel
from cato.policies.mapping.objective import worth
from cato.policies.mapping.problem import Mapping, MappingRequest, checked


@dataclass(frozen=True, slots=True)
class FirstComeFirstServedBatches:
    """Full batches in order of arrival: an engine blind to lengths and targets."""

    def map(
        self, requests: Sequence[MappingRequest], latency: LatencyModel, max_batch: int, seed: int
    ) -> Mapping:
        checked(requests, max_batch)
        batches = tuple(
            tuple(r.id for r in requests[i : i + max_batch])
            for i in range(0, len(requests), max_batch)
        )
        value = worth(batches, requests, latency).objective_per_s
        return Mapping(batches, value, "in order of arrival")
