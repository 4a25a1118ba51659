"""Program-level least attained service (Autellix, "PLAS")."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from cato.core.decision import Rank
from cato.core.policies import Work
from cato.core.snapshot import Invocation


@dataclass(frozen=True, slots=True)
class LeastAttainedService:
    """Runs with the least service so far go first, in levels; then by arrival.

    Luo et al., "Autellix: An Efficient Serving Engine for LLM Agents as General Programs" (2025),
    section "PLAS": a call inherits the service of the earlier calls of its program. Each level of
    the multi-level feedback queue covers twice the service of the previous one. Needs no
    prediction; ignores deadlines. `token_s` is the service counted per generated token, for a
    preempted call's own service.
    """

    first_level_s: float = 1.0
    token_s: float = 0.02

    def attained_s(self, invocation: Invocation, tokens: int = 0) -> float:
        """Service of the run's earlier calls and of this one, with `tokens` of this attempt."""
        return invocation.served_s + self.token_s * (invocation.generated + tokens)

    def level(self, invocation: Invocation, tokens: int = 0) -> int:
        """0 is served first."""
        return int(log2(1.0 + self.attained_s(invocation, tokens) / self.first_level_s))

    def rank(self, invocation: Invocation, work: Work, now_s: float) -> Rank:
        at, had_s = self.level(invocation), self.attained_s(invocation)
        return Rank(at, f"its run has had {had_s:.3f} s of service (level {at})")
