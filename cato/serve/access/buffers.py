"""Supersede: a newer completion of an editor's buffer takes the place of the older one.

Known to one ingress replica: two requests of a buffer that reach different replicas both run, as
they did before; an editor that closes the older connection ends it anyway.
"""

from __future__ import annotations

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
        task = self._latest[buffer] = start(replace(origin, replaces=older))
        return task
