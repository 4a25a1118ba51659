"""The prefixes of sessions as their router has them, so that a turn sends only what is new."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from cato.core.errors import PrefixUnknownError
from cato.core.snapshot import Invocation

# Blocks of all sessions of a pool, 8 bytes each: 32 MB.
MOST_BLOCKS = 4_000_000


class SessionPrefixes:
    """The latest prefix of every session; the one used longest ago is forgotten first."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._blocks = 0
        self._known: OrderedDict[str, array[int]] = OrderedDict()

    def whole(self, session: str, shared: int, rest: tuple[int, ...]) -> tuple[int, ...]:
        """The prefix of the session's next prompt, and remember it.

        `rest` is the prefix without its first `shared` - 1 values, which are those of the prompt
        before (`shared` 0: it is all of it). Raise `PrefixUnknownError` when they are not known.
        """
        known = self._known.pop(session, None)
        self._blocks -= 0 if known is None else len(known)
        prefix = rest
        if shared > 0:
            is_known = (
                known is not None and len(known) >= shared and rest[:1] == (known[shared - 1],)
            )
            if known is None or not is_known:
                raise PrefixUnknownError(session)
            prefix = (*known[: shared - 1], *rest)
        if session:
            self._known[session] = array("Q", prefix)
            self._blocks += len(prefix)
        while self._blocks > self._most_blocks and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._blocks -= len(oldest)
        return prefix


def difference(invocation: Invocation) -> tuple[tuple[int, ...], int]:
    """The prefix as it is sent to a router that has the session's previous one, and how many of its
    values that one shares; see `SessionPrefixes.whole`."""
    shared = invocation.shared_blocks
    if shared < 2 or not invocation.session:
        return invocation.prefix, 0
    return invocation.prefix[shared - 1 :], shared
