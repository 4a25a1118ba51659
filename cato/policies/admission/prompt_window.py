"""Admission bounded by prompt work only."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Admit, Defer
from cato.core.pool.window import takes_prompt
from cato.core.snapshot import Invocation, ReplicaView

_FITS = Admit("its prompt fits")


@dataclass(frozen=True, slots=True)
class PromptWindow:
    """Prompts join while they fit into the engine's next steps.

    The others wait in the queue, where they can still be reordered.
    """

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        if takes_prompt(replica, invocation):
            return _FITS
        return Defer(f"{replica.prompt_tokens_ahead} prompt tokens are ahead", closes=True)
