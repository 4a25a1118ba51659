"""Exhaustive search for the best mapping, for few requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cato.core.errors import InputError
from cato.policies.mapping import kernels
from cato.policies.mapping.latency import LatencyModel
from cato.policies.mapping.packing import packed, unpacked
from cato.policies.mapping.problem import Mapping, MappingRequest, checked


@dataclass(frozen=True, slots=True)
class ExhaustiveSearch:
    """Evaluates every sequence of batches: the bound for the other mappers.

    n requests have n! mappings with batches of one, and 545,835 with batches of any size at n = 8;
    each further request multiplies that by about 13. Above `max_requests` it raises `InputError`.
    """

    max_requests: int = 8

    def map(
        self, requests: Sequence[MappingRequest], latency: LatencyModel, max_batch: int, seed: int
    ) -> Mapping:
        checked(requests, max_batch)
        if len(requests) > self.max_requests:
            raise InputError(
                f"{len(requests)} requests have too many mappings to value them all (at most "
                f"{self.max_requests}); use moore-smith",
                "requests",
            )
        if not requests:
            return Mapping((), 0.0, "nothing waits")
        cap = min(max_batch, len(requests))
        found = kernels.exhaust(*packed(requests, latency, cap), cap)
        return unpacked(requests, *found, "best of all mappings")
