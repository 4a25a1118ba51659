"""Supersede: a newer completion of an editor's buffer replaces the older one.

An ingress replica cancels its own older run at once. Runs of other ingresses are cancelled by the
pool's router, which gets the buffer's name with every call. A shared pool cancels only waiting
calls this way; a call of another ingress that already runs in a slot continues.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from weakref import WeakValueDictionary

from cato.core.record import changed
from cato.serve.executor import RunningTask
from cato.serve.service import Origin

BufferId = tuple[str, ...]
"""A buffer's name, prefixed with its owner, so that callers cannot cancel each other's runs."""


class Buffers:
    """The latest run of every buffer."""

    def __init__(self) -> None:
        self._latest: WeakValueDictionary[BufferId, RunningTask] = WeakValueDictionary()

    def started(
        self, buffer: BufferId | None, origin: Origin, start: Callable[[Origin], RunningTask]
    ) -> RunningTask:
        """Start a run for `origin` that replaces the buffer's latest run.

        When `start` raises, nothing is replaced.
        """
        if buffer is None:
            return start(origin)
        older = self._latest.get(buffer)
        if older is not None and older.finish is not None:
            older = None
        named = changed(origin, replaces=older, buffer=_name_of(buffer))
        task = self._latest[buffer] = start(named)
        return task


def _name_of(buffer: BufferId) -> str:
    """The buffer's name in pools and logs: a hash, so no path, address or person's name leaks."""
    return hashlib.blake2b("\0".join(buffer).encode("utf-8", "replace"), digest_size=12).hexdigest()
