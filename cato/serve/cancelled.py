"""Whose cancellation a `CancelledError` is."""

from __future__ import annotations

import asyncio


def is_this_task_cancelled() -> bool:
    """False when only what the task awaits was: Serve's calls to a replica that ends raise
    `CancelledError`, too."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
