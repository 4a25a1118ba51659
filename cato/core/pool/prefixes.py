"""Session prefixes, cached at the router so that a turn sends only the new part."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from cato.core.errors import PrefixUnknownError
from cato.core.snapshot import Invocation

# Blocks of all sessions of a pool, 8 bytes each: 32 MB. What a session takes besides its blocks
# counts too: otherwise short ones would be kept without end.
MOST_BLOCKS = 4_000_000
BLOCKS_OF_A_SESSION = 32


class SessionPrefixes:
    """The latest prefix of every session; the least recently used one is dropped first."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._blocks = 0
        self._known: OrderedDict[str, array[int]] = OrderedDict()

    def whole(self, session: str, shared: int, rest: tuple[int, ...]) -> tuple[int, ...]:
        """Return the full prefix of the session's next prompt, and remember it.

        `rest` is the prefix without its first `shared` - 1 values, which equal those of the
        previous prompt (`shared` 0: `rest` is all of it). Raise `PrefixUnknownError` when they are
        not known.
        """
        known = self._known.pop(session, None)
        self._blocks -= 0 if known is None else _taken(known)
        prefix = rest
        if shared > 0:
            is_known = (
                known is not None and len(known) >= shared and rest[:1] == (known[shared - 1],)
            )
            if known is None or not is_known:
                raise PrefixUnknownError(session)
            prefix = (*known[: shared - 1], *rest)
        if session and prefix:
            self._known[session] = kept = array("Q", prefix)
            self._blocks += _taken(kept)
        while self._blocks > self._most_blocks and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._blocks -= _taken(oldest)
        return prefix


def _taken(prefix: array[int]) -> int:
    return len(prefix) + BLOCKS_OF_A_SESSION


def difference(invocation: Invocation) -> tuple[tuple[int, ...], int]:
    """The prefix to send to a router that has the session's previous one.

    Also returns how many values both share; see `SessionPrefixes.whole`.
    """
    shared = invocation.shared_blocks
    if shared < 2 or not invocation.session:
        return invocation.prefix, 0
    return invocation.prefix[shared - 1 :], shared
