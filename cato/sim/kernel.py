"""Virtual time: a heap of callbacks, run in order of time, then of scheduling."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TypeVarTuple

Args = TypeVarTuple("Args")


class Kernel:
    """Runs what was scheduled. Deterministic: ties go by the order of `at` calls."""

    __slots__ = ("_count", "_heap", "events", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[*Args], None], *args: *Args) -> None:
        """Run `action` with `args` at `time_s`, or now when that is past."""
        self._count += 1
        at_s = time_s if time_s > self.now_s else self.now_s
        heappush(self._heap, (at_s, self._count, action, args))

    def withdraw(self, action: Callable[..., None]) -> None:
        """Take back all that was to run `action`; takes as long as there are other callbacks."""
        heap = self._heap
        heap[:] = [entry for entry in heap if entry[2] != action]
        heapify(heap)

    def run(self, until_s: float = float("inf")) -> None:
        """Run everything up to `until_s`, inclusive; what is later stays."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action, args = heappop(heap)
            self.events += 1
            action(*args)
        if until_s < float("inf"):
            self.now_s = max(self.now_s, until_s)
