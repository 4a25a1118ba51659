"""Service-level objectives: a number to aim at, and the instant it implies."""

from __future__ import annotations

from enum import StrEnum
from math import inf

from cato.core.record import record


class SloMetric(StrEnum):
    """What an objective measures; see GLOSSARY.md for the exact definitions."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"


@record
class Slo:
    """A target for one metric of a task; `target_s` is seconds (per token for TPOT).

    `tpot_target_s` is a second objective: the pace of the stream once it has begun (inf: none).
    `hard_deadline_s` after its arrival a run ends, if its task's own deadline is not sooner.
    """

    metric: SloMetric
    target_s: float
    tpot_target_s: float = inf
    hard_deadline_s: float = inf

    def deadline_s(self, arrived_at_s: float) -> float | None:
        """The instant by which the metric's event must happen; TPOT is a pace and has none."""
        return None if self.metric is SloMetric.TPOT else arrived_at_s + self.target_s

    def is_met_by(self, achieved_s: float | None, pace_s: float | None = None) -> bool:
        """A metric that was never achieved (refused, failed, cancelled) is a miss.

        `pace_s` is the TPOT of the stream; None where nothing was streamed.
        """
        is_in_time = achieved_s is not None and achieved_s <= self.target_s
        return is_in_time and (pace_s is None or pace_s <= self.tpot_target_s)


def tpot_s(ttft_s: float, e2e_s: float, output_tokens: int) -> float:
    """Time per output token after the first.

    Single-token answers have no TPOT. vLLM's benchmark counts them as 0 s for goodput
    (vllm/benchmarks/serve.py); we do the same, so that our numbers compare with theirs.
    """
    return (e2e_s - ttft_s) / (output_tokens - 1) if output_tokens > 1 else 0.0
