"""Draining: lets running streams end before `cato serve` stops, through files in a shared folder.

`cato serve` creates the folder, named after its mark. Every ingress replica then refuses new
requests, and keeps a file there while it has running requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path

import psutil

from cato.serve.keeper import MARK_VARIABLE

log = logging.getLogger("cato.ingress")
POLL_S = 0.2
# All ingresses notice the folder within this time.
SEEN_WITHIN_S = 1.0


def _folder(run_dir: Path, mark: str) -> Path:
    return run_dir / f"draining-{mark.replace(':', '-')}"


def drain(run_dir: Path, mark: str, limit_s: float) -> bool:
    """Make all ingresses of this host drain, and wait; return whether all requests have ended. May
    raise OSError: a full disk has no room for the folder."""
    folder = _folder(run_dir, mark)
    folder.mkdir(exist_ok=True)
    until_s = time.monotonic() + limit_s
    time.sleep(min(limit_s, SEEN_WITHIN_S))
    while busy := [file for file in folder.iterdir() if _is_alive(file.name)]:
        if time.monotonic() >= until_s:
            break
        time.sleep(POLL_S)
    return not busy


def _is_alive(name: str) -> bool:
    """Whether the ingress that keeps the file lives: a killed one leaves its file behind."""
    try:
        return bool(psutil.Process(int(name)).status() != psutil.STATUS_ZOMBIE)
    except (ValueError, psutil.NoSuchProcess):
        return False


def forget(run_dir: Path, mark: str) -> None:
    folder = _folder(run_dir, mark)
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
        folder.rmdir()


class Drain:
    """An ingress replica's side. While `is_asked`, it refuses new requests; the HTTP layer counts
    `under_way`. Without a `mark` (deployed by Serve's own commands) it never drains this way."""

    def __init__(self, run_dir: Path, mark: str | None = None) -> None:
        mark = os.environ.get(MARK_VARIABLE) if mark is None else mark
        self.is_asked = False
        self.under_way = 0
        self._has_failed = False
        self._folder = _folder(run_dir, mark) if mark else None

    async def follow(self) -> None:
        """Poll for ever."""
        while self._folder is not None:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        if self._folder is None or not self._folder.exists():
            self.is_asked = False
            return
        self.is_asked = True
        mine = self._folder / str(os.getpid())
        try:
            if self.under_way:
                mine.touch()
            else:
                mine.unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # the folder was just removed
        except OSError as error:  # such as a full disk
            if not self._has_failed:
                log.warning("running requests may be cut off at the stop: %s", error)
            self._has_failed = True
