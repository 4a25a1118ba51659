"""Conversion between requests and the arrays of the compiled searches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cato.core.ids import InvocationId
from cato.core.slo import SloMetric
from cato.policies.mapping import kernels
from cato.policies.mapping.kernels import Floats, Ints
from cato.policies.mapping.latency import LatencyModel
from cato.policies.mapping.problem import Mapping, MappingRequest


def packed(
    requests: Sequence[MappingRequest], latency: LatencyModel, cap: int
) -> tuple[Floats, Floats, float]:
    """`execution_s`, `latest_s` and `waited_s` of `kernels`."""
    facts = np.array(
        [
            (
                r.prompt_tokens,
                r.expected_tokens,
                r.waited_s,
                r.target_s(SloMetric.E2E),
                r.target_s(SloMetric.TTFT),
                r.target_s(SloMetric.TPOT),
            )
            for r in requests
        ],
        np.float64,
    )
    execution_s, latest_s = kernels.tables(
        facts,
        np.array(latency.prefill.coefficients),
        np.array(latency.decode.coefficients),
        cap,
    )
    return execution_s, latest_s, sum(r.waited_s for r in requests)


def unpacked(
    requests: Sequence[MappingRequest], value: float, order: Ints, sizes: Ints, reason: str
) -> Mapping:
    """The mapping that `order` and `sizes` describe; `value` as from `kernels.rated`."""
    ids = [requests[i].id for i in order.tolist()]
    batches: list[tuple[InvocationId, ...]] = []
    k = 0
    for size in sizes.tolist():
        if size:
            batches.append(tuple(ids[k : k + size]))
            k += size
    return Mapping(tuple(batches), max(0.0, float(value)), reason)
