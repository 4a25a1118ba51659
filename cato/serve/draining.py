"""How `cato serve` lets streams end before it stops: files that it and its ingresses share.

`cato serve` asks with one file; every ingress replica then refuses new requests, and has a file of
its own for as long as it has requests under way. They are in a folder that is named after the mark
of that `cato serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

from cato.serve.keeper import MARK_VARIABLE

POLL_S = 0.2
# All ingresses have seen within this time that they are asked.
SEEN_WITHIN_S = 1.0


def _folder(run_dir: Path, mark: str) -> Path:
    return run_dir / f"draining-{mark.replace(':', '-')}"


def drain(run_dir: Path, mark: str, limit_s: float) -> bool:
    """Ask all ingresses of this host to drain, and wait; whether all requests have ended."""
    folder = _folder(run_dir, mark)
    folder.mkdir(exist_ok=True)
    until_s = time.monotonic() + limit_s
    time.sleep(min(limit_s, SEEN_WITHIN_S))
    while busy := list(folder.iterdir()):
        if time.monotonic() >= until_s:
            break
        time.sleep(POLL_S)
    return not busy


def forget(run_dir: Path, mark: str) -> None:
    folder = _folder(run_dir, mark)
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
        folder.rmdir()


class Drain:
    """An ingress replica's side. `is_asked`: no new request begins; `under_way` is counted by who
    takes them in. Without a `mark`, which Serve's own commands do not give, nobody asks."""

    def __init__(self, run_dir: Path, mark: str | None = None) -> None:
        mark = os.environ.get(MARK_VARIABLE) if mark is None else mark
        self.is_asked = False
        self.under_way = 0
        self._folder = _folder(run_dir, mark) if mark else None

    async def follow(self) -> None:
        """Look for ever."""
        while self._folder is not None:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        if self._folder is None or not self._folder.exists():
            self.is_asked = False
            return
        self.is_asked = True
        mine = self._folder / str(os.getpid())
        with contextlib.suppress(FileNotFoundError):  # it was just forgotten
            if self.under_way:
                mine.touch()
            else:
                mine.unlink(missing_ok=True)
