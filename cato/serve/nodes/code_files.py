"""The files of a folder that are worth indexing, and their text."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

_log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1_000_000
# Files with a longer mean line are generated (minified code, data), useless in a prompt.
_MAX_MEAN_LINE_CHARS = 400
_VENDORED = {"node_modules", "bower_components", "site-packages", "__pycache__", "vendor", "venv"}


def files_of(folder: Path, store: Path) -> tuple[dict[str, list[int]], int]:
    """Modification time and size of each file to index, by relative path; and how many failed.

    Hidden files are skipped: they hold credentials (`.env`) more often than code. Symbolic links
    are not followed: they may lead out of the folder, and their targets inside it are indexed
    under their own paths. Raise `OSError` if `folder` itself cannot be listed.
    """
    found: dict[str, list[int]] = {}
    unreadable = 0
    pending = [str(folder)]
    while pending:
        place = pending.pop()
        try:
            with os.scandir(place) as scan:
                entries = list(scan)
        except OSError as exc:
            if place == str(folder):
                raise
            _log.debug("cannot be listed: %s", exc)
            unreadable += 1
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.path == str(store):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _VENDORED:
                        pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    name = os.path.relpath(entry.path, folder)
                    name.encode()  # a name that is not valid text cannot be stored
                    facts = entry.stat(follow_symlinks=False)
                    if facts.st_size <= MAX_FILE_BYTES:
                        found[name.replace(os.sep, "/")] = [facts.st_mtime_ns, facts.st_size]
            except (OSError, UnicodeEncodeError) as exc:
                _log.debug("%r: skipped: %s", entry.path, exc)
                unreadable += 1
    return found, unreadable


def text_of(path: Path) -> str | None:
    """The text of a file, None if it should be skipped. Raise `OSError` if unreadable."""
    # Between listing and opening the file may have become a link or a pipe.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES or b"\0" in data:
        return None
    if len(data) > _MAX_MEAN_LINE_CHARS * (data.count(b"\n") + 1):
        return None
    return data.decode("utf-8", "replace")
