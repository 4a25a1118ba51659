"""Supersede: a newer completion of an editor's buffer takes the place of the older one.

An ingress replica ends at once what it runs itself. What another one runs is ended by the router of
their pool, which sees the calls of both: it is told the buffer's name with each. A shared pool so
ends what waits; what runs in one of its slots for another ingress runs on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakValueDictionary

from cato.serve.executor import RunningTask
from cato.serve.service import Origin

BufferId = tuple[str, ...]
"""A buffer, with whose it is in front, so that nobody can end the work of anybody else."""


class Buffers:
    """The latest run of every buffer."""

    def __init__(self) -> None:
        self._latest: WeakValueDictionary[BufferId, RunningTask] = WeakValueDictionary()

    def started(
        self,
        buffer: BufferId | None,
        origin: Origin,
        start: Callable[[Origin], RunningTask],
    ) -> RunningTask:
        """What `start` starts for `origin`, in the place of the buffer's latest run.

        When `start` raises, nothing was replaced.
        """
        if buffer is None:
            return start(origin)
        older = self._latest.get(buffer)
        if older is not None and older.finish is not None:
            older = None
        named = replace(origin, replaces=older, buffer=_name_of(buffer))
        task = self._latest[buffer] = start(named)
        return task


def _name_of(buffer: BufferId) -> str:
    """The buffer as pools and their logs know it: no path, no address, no person's name."""
    return hashlib.blake2b("\0".join(buffer).encode(), digest_size=12).hexdigest()
