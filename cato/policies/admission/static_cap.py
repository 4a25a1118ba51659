"""A fixed number of running invocations per replica."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.decision import Admit, Defer
from cato.core.snapshot import Invocation, ReplicaView


@dataclass(frozen=True, slots=True)
class StaticCap:
    """At most `cap` calls per replica, like `--max-num-seqs`: SABER's baseline."""

    cap: int

    def admit(self, invocation: Invocation, replica: ReplicaView, now_s: float) -> Admit | Defer:
        if replica.held < self.cap:
            return Admit(f"{replica.held} of {self.cap} run")
        return Defer(f"{replica.held} run, the cap", closes=True)
