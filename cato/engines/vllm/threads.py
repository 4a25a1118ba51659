"""Whether threads of processes run, or a signal has stopped the processes; Linux."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

# Running or runnable; waiting for a disk or a driver.
_WORKING = {"R", "D"}
_STOPPED = "T"


def family(pid: int) -> list[int]:
    """`pid` and its children. Scans every process of the host: call it once, not per sample."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def is_working(pids: Iterable[int]) -> bool:
    """Whether any thread of `pids` is running or waiting for a core."""
    return any(state in _WORKING for pid in pids for state in _states(pid))


def is_stopped(pids: Iterable[int]) -> bool:
    """Whether one of `pids` is stopped by a signal."""
    return any(_state(f"/proc/{pid}/stat") == _STOPPED for pid in pids)


def _states(pid: int) -> Iterator[str]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return
    for thread in threads:
        yield _state(f"/proc/{pid}/task/{thread}/stat")


def _state(stat: str) -> str:
    """Empty for a process that has ended."""
    try:
        return Path(stat).read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
