"""Working-set admission: new sessions wait until a replica's memory can hold their contexts."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Admit, Defer
from cato.core.snapshot import Invocation, ReplicaView


@dataclass(frozen=True, slots=True)
class WorkingSetAdmission:
    """A new session joins a replica whose memory (KV cache and host) has room for its context.

    The contexts of the sessions at home there count as occupied. Denning, "The working set model
    for program behavior" (1968): a program starts only when its working set fits into memory, or
    else all of them thrash. ThunderAgent (arXiv 2602.13692) pauses agents' programs by the same
    rule. Turns of sessions at home continue at once. No session waits for longer than
    `most_wait_s`.
    """

    most_wait_s: float = 60.0

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        if not invocation.session or replica.is_home(invocation):
            return Admit("its context is counted already")
        context_tokens = invocation.prompt_tokens + invocation.expected_tokens
        working_set = replica.working_set_tokens + context_tokens
        capacity_tokens = replica.profile.kv_capacity_tokens + replica.host_tokens
        if working_set <= capacity_tokens or not replica.sessions:
            return Admit(f"a working set of {working_set} tokens fits")
        if now_s - invocation.arrived_at_s >= self.most_wait_s:
            return Admit(f"has waited for {self.most_wait_s:.0f} s")
        return Defer(f"a working set of {working_set} tokens exceeds {capacity_tokens}")
