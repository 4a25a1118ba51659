"""Whether the threads of processes run; Linux."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

# Running or runnable; waiting for a disk or a driver.
_WORKING = {"R", "D"}


def family(pid: int) -> list[int]:
    """`pid` and its children. Looks at every process of the host: for once, not for each sample."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def is_working(pids: Iterable[int]) -> bool:
    """Whether any thread of `pids` runs at this moment, or waits for a core."""
    return any(state in _WORKING for pid in pids for state in _states(pid))


def _states(pid: int) -> Iterator[str]:
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it ended between the two
            yield stat.read_text(errors="replace").rpartition(")")[2].split()[0]
