"""First come, first served."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """By arrival only: fair to each call, but ignores deadlines."""

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        return Rank(0, "in order of arrival")
