"""Program-level least attained service (Autellix, "PLAS")."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation


def level(attained_s: float, first_s: float) -> int:
    """The queue of a multi-level feedback: each holds twice the service of the one before."""
    return int(log2(1.0 + attained_s / first_s))


@dataclass(frozen=True, slots=True)
class LeastAttainedService:
    """Runs that have received the least service so far go first, in levels; then by arrival.

    Luo et al., "Autellix: An Efficient Serving Engine for LLM Agents as General Programs" (2025),
    section "PLAS": a call inherits the service of the earlier calls of its program. Needs no
    prediction; blind to deadlines.
    """

    first_level_s: float = 1.0

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        at = level(invocation.served_s, self.first_level_s)
        return Rank(at, f"its run has had {invocation.served_s:.3f} s of service (level {at})")
