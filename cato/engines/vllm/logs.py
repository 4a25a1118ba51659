"""Log files of engines: which ones stay in the run folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from cato.engines.vllm.host import last_words, open_log

# Logs of failed engines, and of engines whose replica was killed, that stay in a folder: every
# restart and every load of a shared pool makes another one.
KEPT_LOGS = 20
_PATTERN = "vllm-*.log"


class EngineLog:
    """The log of one engine: `path`, or `name`.log in `folder`.

    The latter is deleted when the engine is stopped, unless it `has_failed`: then the log may say
    why, and stays until newer ones take its place.
    """

    def __init__(self, folder: str, name: str, path: str | None) -> None:
        self.path = path or os.path.join(folder, f"{name}.log")
        self.has_failed = False
        self._folder, self._may_delete = folder, path is None
        self._held: int | None = None
        self._start = 0  # of the output of the engine's latest start

    def open(self) -> None:
        """A server is about to write to it; until `close` it is not pruned."""
        prune(self._folder)
        self._held, self._start = open_log(self.path)
        with contextlib.suppress(OSError):  # a file system without locks: nothing is pruned there
            fcntl.flock(self._held, fcntl.LOCK_SH)

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def delete_unless_failed(self) -> None:
        if self._may_delete and not self.has_failed:
            Path(self.path).unlink(missing_ok=True)

    def last_words(self) -> str:
        """The end of the latest start's output, for an error message."""
        return last_words(self.path, self._start)


def prune(folder: str) -> None:
    """Delete logs that no engine uses, except the newest `KEPT_LOGS`."""
    logs = sorted(Path(folder).glob(_PATTERN), key=_changed_at_s, reverse=True)
    for log in [log for log in logs if not _is_held(log)][KEPT_LOGS:]:
        with contextlib.suppress(OSError):
            log.unlink()


def _changed_at_s(log: Path) -> float:
    try:
        return log.stat().st_mtime
    except FileNotFoundError:  # pruned by another process
        return 0.0


def _is_held(log: Path) -> bool:
    """Whether an engine may use it."""
    try:
        opened = os.open(log, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(opened)
    return False
