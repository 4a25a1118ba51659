"""The latest run of each editor buffer, which supersedes earlier ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from cato.core.ids import InvocationId, RunId
from cato.core.snapshot import Invocation

# Number of buffers remembered; the least recently used one is dropped first.
MAX_BUFFERS = 10_000
# A longer burst of keystrokes keeps only its last 10 s of queue priority.
MAX_HEAD_START_S = 10.0


@dataclass(slots=True)
class LatestRun:
    """The latest run of a buffer, its calls so far, and since when its place in the queue counts.

    That is the arrival of its first call, or of the first call of the runs that it superseded.
    """

    run_id: RunId
    began_at_s: float
    place_s: float
    ids: set[InvocationId] = field(default_factory=set)

    def is_later_than(self, invocation: Invocation) -> bool:
        mine = (self.began_at_s, self.run_id)
        return self.run_id != invocation.run_id and mine > (
            invocation.began_at_s,
            invocation.run_id,
        )


class Buffers:
    """The latest runs by buffer, the least recently used first."""

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: OrderedDict[str, LatestRun] = OrderedDict()

    def latest(self, buffer: str) -> LatestRun | None:
        return self._latest.get(buffer)

    def join(self, invocation: Invocation, ended_older: bool) -> float:
        """Add a call of the buffer's latest run; since when its place in the queue counts.

        `ended_older`: it is the first of its run, and calls of an older run were ended for it.
        """
        buffer, place_s = invocation.buffer, invocation.arrived_at_s
        latest = self._latest.get(buffer)
        if latest is None or latest.run_id != invocation.run_id:
            if latest is not None and ended_older:
                earliest_s = invocation.began_at_s - MAX_HEAD_START_S
                place_s = min(place_s, max(latest.place_s, earliest_s))
            latest = LatestRun(invocation.run_id, invocation.began_at_s, place_s)
            self._latest[buffer] = latest
            if len(self._latest) > MAX_BUFFERS:
                self._latest.popitem(last=False)
        elif invocation.id in latest.ids:  # the same call offered again
            place_s = min(place_s, latest.place_s)
        self._latest.move_to_end(buffer)
        latest.ids.add(invocation.id)
        return place_s


def replaced_by(newer: RunId) -> str:
    """Why a call of an older run has ended."""
    return f"run {newer} of the same buffer replaced it"
