"""The objective of a mapping, in plain Python: the reference for testing the compiled searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cato.core.errors import InputError
from cato.core.ids import InvocationId
from cato.core.slo import SloMetric
from cato.policies.mapping.latency import LatencyModel
from cato.policies.mapping.problem import MappingRequest


@dataclass(frozen=True, slots=True)
class Worth:
    """`met` requests meet all their targets; the latencies of all requests sum to `latency_s`."""

    met: int
    latency_s: float

    @property
    def objective_per_s(self) -> float:
        """G of SLO-SA."""
        return self.met / self.latency_s if self.met else 0.0


def worth(
    batches: Sequence[Sequence[InvocationId]],
    requests: Sequence[MappingRequest],
    latency: LatencyModel,
) -> Worth:
    """Evaluate `batches`, run one after the other, with the lengths that `requests` have.

    A request starts with its batch, and the next batch starts when the longest of this one ends
    (SLO-SA, equations of the waiting time). Its latency is waited + wait + execution. Raise
    `InputError` unless each request is in exactly one batch.
    """
    by_id = {r.id: r for r in requests}
    if sorted(id for batch in batches for id in batch) != sorted(by_id):
        raise InputError("each request must stand in exactly one batch of the mapping", "batches")
    met, total_s, now_s = 0, 0.0, 0.0
    for batch in batches:
        size = len(batch)
        end_s = now_s
        for r in (by_id[id] for id in batch):
            ttft_s = r.waited_s + now_s + latency.prefill_s(size, r.prompt_tokens)
            execution_s = latency.execution_s(size, r.prompt_tokens, r.expected_tokens)
            e2e_s = r.waited_s + now_s + execution_s
            paced = r.expected_tokens > 1
            tpot_s = latency.step_s(size, r.prompt_tokens, r.expected_tokens) if paced else 0.0
            achieved_s = {SloMetric.TTFT: ttft_s, SloMetric.TPOT: tpot_s, SloMetric.E2E: e2e_s}
            met += all(s.is_met_by(achieved_s[s.metric]) for s in r.slos)
            total_s += e2e_s
            end_s = max(end_s, now_s + execution_s)
        now_s = end_s
    return Worth(met, total_s)
