"""Earliest deadline first."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation


@dataclass(frozen=True, slots=True)
class EarliestDeadlineFirst:
    """By the run's deadline less the downstream time (Liu and Layland, 1973).

    Best while all deadlines can be met; in overload it serves calls that are about to miss theirs.
    """

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        deadline_s = invocation.deadline_s - invocation.downstream_s
        return Rank(0, f"due in {deadline_s - now_s:.3f} s", key=deadline_s)
