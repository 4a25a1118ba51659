"""Keeps code indexes up to date while an ingress searches them.

Another process looks at the files, at low priority: a scan of a large folder would hold the
interpreter lock of the ingress, which streams tokens, for tenths of a second.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from cato.core.errors import ConfigError
from cato.serve.nodes.code_index import CodeIndex

log = logging.getLogger("cato.nodes")

FOLLOW_EVERY_S = 60.0
# A folder that takes long is looked at less often: one core is busy for at most this share of time.
BUSY_SHARE = 0.05
_NICE = 10
_REFRESH = "from cato.serve.nodes.index_following import refresh; refresh()"


class IndexFollower:
    """A thread that refreshes `indexes`, one after the other, until `stop`."""

    def __init__(
        self,
        indexes: Sequence[CodeIndex],
        every_s: float = FOLLOW_EVERY_S,
        busy_share: float = BUSY_SHARE,
    ) -> None:
        self._indexes = tuple(indexes)
        self._every_s = every_s
        self._pause_per_work = 1 / busy_share - 1
        self._problems: dict[CodeIndex, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="indexes", daemon=True)

    def start(self) -> None:
        if self._indexes:
            self._thread.start()

    def stop(self) -> None:
        """Start no more refreshes; one that is running ends by itself."""
        self._over.set()

    def _follow(self) -> None:
        pause_s = self._every_s
        while not self._over.wait(pause_s):
            began_s = time.monotonic()
            for index in self._indexes:
                self._tell(index, _refreshed(index))
            pause_s = max(self._every_s, self._pause_per_work * (time.monotonic() - began_s))

    def _tell(self, index: CodeIndex, problem: str) -> None:
        """Log a problem once, not at every look."""
        if problem and problem != self._problems.get(index):
            log.warning("%s: the code index is not up to date: %s", index.folder, problem)
        self._problems[index] = problem


def _refreshed(index: CodeIndex) -> str:
    """Refresh `index` and search the result; why that failed, or empty."""
    command = [sys.executable, "-c", _REFRESH, *map(str, index.places)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True
        )
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            return lines[-1].strip() if lines else f"exit status {done.returncode}"
        index.reload()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def refresh() -> None:
    """The process: bring the index of the folder `argv[1]` in the store `argv[2]` up to date."""
    os.nice(_NICE)
    folder, store = map(Path, sys.argv[1:3])
    try:
        CodeIndex.open(folder, store)
    except (ConfigError, OSError, ValueError) as error:
        sys.exit(str(error))
