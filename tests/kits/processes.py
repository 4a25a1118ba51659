"""What processes do, for tests that start or end them."""

from __future__ import annotations

import psutil


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
