"""Shortest job first, by the predicted length."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation


@dataclass(frozen=True, slots=True)
class ShortestJobFirst:
    """Least expected service first: the least mean wait (Smith, 1956); ignores deadlines.

    "Predicted SJF" of Tempo's evaluation: the length is the expected one, not the real one.
    """

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        return Rank(0, f"{work.service_s:.3f} s of work", key=work.service_s)
