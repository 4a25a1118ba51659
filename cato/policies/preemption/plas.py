"""Program-level least attained service preempts what has been demoted (Autellix, "PLAS")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cato.core.ids import InvocationId
from cato.core.policies import NO_LOAD, QueueLoad
from cato.core.snapshot import Invocation, ReplicaView
from cato.policies.ordering.plas import LeastAttainedService


@dataclass(frozen=True, slots=True)
class LeastAttainedPreemption:
    """An invocation in a lower queue yields to one that waits in a higher queue.

    Luo et al., "Autellix" (2025), section "PLAS": a call that has used up its queue's quantum is
    demoted, and calls of a higher queue preempt it. Running calls are safe until their first
    report, so that a slot is never given away for nothing. Ties: the call that would lose the least
    context.
    """

    ordering: LeastAttainedService

    def preempt(
        self,
        replica: ReplicaView,
        waiting: Sequence[Invocation],
        now_s: float,
        place_s: Callable[[], float],
        load: QueueLoad = NO_LOAD,
    ) -> Sequence[tuple[InvocationId, str]]:
        if replica.held < replica.max_running:
            return ()
        levels = self.ordering
        victims = sorted(
            (
                (-levels.level(r.invocation, r.tokens), r.context_tokens, r.invocation.id)
                for r in replica.running
                if r.tokens > 0
            ),
        )
        found: list[tuple[InvocationId, str]] = []
        for candidate, (minus_level, _, id) in zip(waiting, victims, strict=False):
            at = levels.level(candidate)
            if at >= -minus_level:
                break
            found.append((id, f"at level {-minus_level}; one at level {at} waits for its place"))
        return found
