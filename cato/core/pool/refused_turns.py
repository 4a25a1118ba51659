"""Turns of sessions that were refused a moment ago; one that comes again is the same turn."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from cato.core.record import changed
from cato.core.snapshot import Invocation

# A turn that comes again so soon after its refusal is the same one; clients wait for up to 40 s by
# themselves. So long after its first refusal it counts as new: who is late once must not stay so
# until the load falls.
ASKS_AGAIN_S, LATE_FOR_S = 60.0, 300.0
MAX_TURNS = 20_000


class RefusedTurns:
    """By session and prompt, the latest refusal last; at most `MAX_TURNS` are kept."""

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[str, int], _RefusedTurn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def keep(self, invocation: Invocation, now_s: float) -> None:
        """It was refused now; calls that are no turn of a session are not kept."""
        if not _is_turn(invocation):
            return
        turns, key = self._turns, _turn(invocation)
        known = turns.setdefault(key, _RefusedTurn(invocation.deadline_s, now_s, now_s))
        known.last_s = now_s
        turns.move_to_end(key)
        while turns:
            oldest = next(iter(turns.values()))
            if len(turns) <= MAX_TURNS and now_s <= oldest.last_s + ASKS_AGAIN_S:
                break
            turns.popitem(last=False)

    def as_first_asked(self, invocation: Invocation, now_s: float) -> Invocation:
        """A turn that was refused a moment ago and comes again keeps its due date for a while.

        Its user has waited since then. As a new one it would have the right of way once more, and
        make turns of sessions late that are in time.
        """
        if not self._turns or not _is_turn(invocation):
            return invocation
        key = _turn(invocation)
        known = self._turns.get(key)
        if known is None:
            return invocation
        if now_s > min(known.last_s + ASKS_AGAIN_S, known.first_s + LATE_FOR_S):
            del self._turns[key]
            return invocation
        return changed(invocation, deadline_s=min(known.deadline_s, invocation.deadline_s))


@dataclass(slots=True)
class _RefusedTurn:
    """When it was due at first, and when it was refused, first and last."""

    deadline_s: float
    first_s: float
    last_s: float


def _is_turn(invocation: Invocation) -> bool:
    """Whether it belongs to a session and its prompt can be told from others."""
    return bool(invocation.session and invocation.prefix)


def _turn(invocation: Invocation) -> tuple[str, int]:
    return invocation.session, invocation.prefix[-1]
