"""Signals that end a command as Ctrl-C does."""

from __future__ import annotations

import signal


def end_like_ctrl_c() -> None:
    """Let SIGTERM, and SIGINT also in a shell's background job, raise `KeyboardInterrupt`.

    A shell starts such a job, and all that it starts, with SIGINT ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
