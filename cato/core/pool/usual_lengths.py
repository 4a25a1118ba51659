"""Output lengths that a pool has seen, for turns of sessions that come without a belief.

Estimators give beliefs about kinds of calls that they know (`cato.estimators`). Until they do, and
while the Profiler is away, a pool would rely on the caller's first guess. A turn waits for the
replica that has its context, so it has to be known when that is free; single calls gain nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from cato.core.ids import NodeId, TaskName
from cato.core.length import LengthBelief
from cato.core.record import changed
from cato.core.snapshot import Invocation

# The last lengths of a kind count, from so many on.
KEPT_LENGTHS, FIRST_LENGTHS = 64, 8
# Kinds of calls that are remembered: those that came last.
KINDS = 256
# A belief is made again after this share of new lengths.
_RENEWED = 0.125


@dataclass(slots=True)
class _Seen:
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_LENGTHS))
    new: int = 0
    belief: LengthBelief | None = None
    guess: int = 0


class UsualLengths:
    """Remembers the lengths of whole outputs by task and node."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[TaskName, NodeId], _Seen] = OrderedDict()

    def believed(self, invocation: Invocation) -> Invocation:
        """With a belief, if it has none and enough turns of its kind have ended.

        Callers guess less only where the output is limited to less: such a guess stays.
        """
        if invocation.length is not None or not invocation.session:
            return invocation
        seen = self._of(invocation)
        if not invocation.generated:
            seen.guess = max(seen.guess, invocation.expected_tokens)
            if invocation.expected_tokens < seen.guess:
                return invocation
        if len(seen.lengths) < FIRST_LENGTHS:
            return invocation
        if seen.belief is None or seen.new > _RENEWED * len(seen.lengths):
            seen.new, seen.belief = 0, LengthBelief.of(seen.lengths)
        left_tokens = round(seen.belief.left_mean(invocation.generated))
        return changed(invocation, length=seen.belief, expected_tokens=left_tokens)

    def ended(self, invocation: Invocation, tokens: int) -> None:
        """A call was answered, with `tokens` of its last attempt."""
        if invocation.session:
            seen = self._of(invocation)
            seen.lengths.append(invocation.generated + tokens)
            seen.new += 1

    def _of(self, invocation: Invocation) -> _Seen:
        kind = invocation.task, invocation.node
        seen = self._kinds.get(kind)
        if seen is None:
            seen = self._kinds[kind] = _Seen()
            if len(self._kinds) > KINDS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(kind)
        return seen
