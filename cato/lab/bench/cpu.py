"""CPU time of this process and its descendants, from Linux's /proc.

On a busy machine wall times say little; the CPU time of a call says much: operators pay for it, and
it becomes latency when cores are scarce.
"""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def cpu_s() -> dict[str, float]:
    """CPU seconds by process name, including ended children; empty where /proc does not exist.

    Processes with the same name are summed; Ray names actor processes after their actor.
    """
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit():
            continue
        try:
            # The name is in parentheses and may contain anything.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        used[pid] = sum(map(int, fields[11:15])) * _TICK_S
    total: dict[str, float] = {}
    for pid in _descendants(os.getpid(), parents):
        name = _name(pid)
        total[name] = total.get(name, 0.0) + used[pid]
    return total


def _descendants(root: int, parents: dict[int, int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = [root] if root in parents else []
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def _name(pid: int) -> str:
    if pid == os.getpid():
        return "client"
    try:
        words = (_PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        words = []
    first = words[0] if words else ""
    if first.startswith("ray::"):
        return first.removeprefix("ray::").removeprefix("ServeReplica:").strip()
    return "Ray, HAProxy and engines"
