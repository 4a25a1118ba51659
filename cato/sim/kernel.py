"""The virtual clock: a heap of callbacks, run by time, then by order of scheduling."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf
from typing import TypeVarTuple

Args = TypeVarTuple("Args")


class Kernel:
    """Runs scheduled callbacks. Deterministic: ties are broken by the order of `at` calls."""

    __slots__ = ("_count", "_heap", "events", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[*Args], None], *args: *Args) -> None:
        """Run `action` with `args` at `time_s`, or now when that is in the past."""
        self._count += 1
        at_s = time_s if time_s > self.now_s else self.now_s
        heappush(self._heap, (at_s, self._count, action, args))

    def withdraw(self, action: Callable[..., None]) -> None:
        """Cancel every callback of `action`; linear in the number of scheduled callbacks."""
        heap = self._heap
        heap[:] = [entry for entry in heap if entry[2] != action]
        heapify(heap)

    def stop(self) -> None:
        """Drop all scheduled callbacks: time stops at the current event."""
        self._heap.clear()

    def run(self, until_s: float = inf) -> None:
        """Run everything up to `until_s`, inclusive; later callbacks stay."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action, args = heappop(heap)
            self.events += 1
            action(*args)
        if until_s < inf:
            self.now_s = max(self.now_s, until_s)


class Alarms:
    """Timers that can be cancelled; a cancelled timer does not prolong the run."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._heap: list[tuple[float, int]] = []
        self._waiting: dict[int, Callable[[], None]] = {}
        self._count = 0
        self._armed_s = inf
        self._version = 0

    def at(self, time_s: float, action: Callable[[*Args], None], *args: *Args) -> int:
        """Run `action` with `args` at `time_s`; returns the id for `call_off`."""
        self._count += 1
        self._waiting[self._count] = lambda: action(*args)
        heappush(self._heap, (time_s, self._count))
        self._arm()
        return self._count

    def call_off(self, alarm: int) -> None:
        """No-op when it has fired."""
        if self._waiting.pop(alarm, None) is not None and not self._waiting:
            self._kernel.withdraw(self._ring)
            self._heap.clear()
            self._armed_s = inf

    def _arm(self) -> None:
        if self._heap and self._heap[0][0] < self._armed_s:
            self._armed_s = self._heap[0][0]
            self._version += 1
            self._kernel.at(self._armed_s, self._ring, self._version)

    def _ring(self, version: int) -> None:
        if version != self._version:
            return
        self._armed_s = inf
        while self._heap and self._heap[0][0] <= self._kernel.now_s:
            action = self._waiting.pop(heappop(self._heap)[1], None)
            if action is not None:
                action()
        self._arm()
