"""The latest run of each editor buffer, which supersedes earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from cato.core.ids import InvocationId, RunId
from cato.core.snapshot import Invocation

# Number of buffers remembered; the least recently used one is dropped first.
MAX_BUFFERS = 10_000


@dataclass(slots=True)
class LatestRun:
    """The latest run of a buffer, and its calls so far."""

    run_id: RunId
    began_at_s: float
    ids: set[InvocationId] = field(default_factory=set)

    def is_later_than(self, invocation: Invocation) -> bool:
        mine = (self.began_at_s, self.run_id)
        return self.run_id != invocation.run_id and mine > (
            invocation.began_at_s,
            invocation.run_id,
        )


def replaced_by(newer: RunId) -> str:
    """Why a call of an older run has ended."""
    return f"run {newer} of the same buffer replaced it"
