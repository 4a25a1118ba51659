"""Retry budget: limits how often work is repeated after a loss."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

# A retry repeats a prompt that was computed before, so retries must not multiply load. Any
# `WINDOW_S` allows at most as many retries as calls, plus a few for an idle system.
WINDOW_S = 10.0
SHARE = 1.0
ALWAYS = 10


@dataclass(slots=True)
class RetryBudget:
    """Retries as a share of traffic: of the calls that ran at any time in the last `window_s`.

    All calls of one lost replica may be retried at once, but engines that crash again and again
    cannot make everything run more than twice. `now_s` never decreases.
    """

    share: float = SHARE
    always: int = ALWAYS
    window_s: float = WINDOW_S
    _running: int = 0
    _ended_s: deque[float] = field(default_factory=deque)
    _retried_s: deque[float] = field(default_factory=deque)

    def begin(self) -> None:
        """A call begins; `end` must follow."""
        self._running += 1

    def end(self, now_s: float) -> None:
        self._running -= 1
        self._ended_s.append(now_s)
        self._forget(now_s)

    def take(self, now_s: float) -> bool:
        """Whether a call may be tried again now; counts the retry if so."""
        self._forget(now_s)
        calls = self._running + len(self._ended_s)
        if len(self._retried_s) >= self.always + self.share * calls:
            return False
        self._retried_s.append(now_s)
        return True

    def _forget(self, now_s: float) -> None:
        for moments in (self._ended_s, self._retried_s):
            while moments and moments[0] <= now_s - self.window_s:
                moments.popleft()
