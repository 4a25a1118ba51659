"""What processes do: whether their threads run, or a signal has stopped them; Linux."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

# Running or runnable; waiting for a disk or a driver.
_WORKING = {"R", "D"}
_STOPPED = "T"


def family(pid: int) -> list[int]:
    """`pid` and its children. Looks at every process of the host: for once, not for each sample."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def is_working(pids: Iterable[int]) -> bool:
    """Whether any thread of `pids` runs at this moment, or waits for a core."""
    return any(state in _WORKING for pid in pids for state in _states(pid))


def is_stopped(pids: Iterable[int]) -> bool:
    """Whether a signal has stopped one of `pids`, and none has let it go on."""
    return any(_state(f"/proc/{pid}/stat") == _STOPPED for pid in pids)


def _states(pid: int) -> Iterator[str]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return
    for thread in threads:
        yield _state(f"/proc/{pid}/task/{thread}/stat")


def _state(stat: str) -> str:
    """Empty for one that has ended."""
    try:
        return Path(stat).read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
