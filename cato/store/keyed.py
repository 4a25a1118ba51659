"""Remember outside the store whether a deployment has ever had an API key.

A deployment without keys serves this machine's clients without one. A store that was deleted,
damaged or replaced by an empty one has no keys either. A file beside the store and one in the state
folder tell the two cases apart.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path

from sqlalchemy import URL

from cato.config.places import state_dir
from cato.core.tenancy import KeyHistory

log = logging.getLogger("cato.store")


def history(url: URL) -> KeyHistory:
    """The key history of the store at `url`; `KEYED` if either file says so or is unreadable."""
    found = {_read(path) for path in _files(url)}
    for answer in (KeyHistory.KEYED, KeyHistory.OPENED):
        if answer in found:
            return answer
    return KeyHistory.NEVER


def remember(url: URL, what: KeyHistory) -> bool:
    """Write `what` to both files; whether it is the history now.

    One file is enough for `KEYED`. A file that still says `KEYED` outweighs `OPENED`.
    """
    for path in _files(url):
        _write(path, what)
    if history(url) is what:
        return True
    log.error("cannot record the key history `%s` in %s", what.value, _files(url)[-1].parent)
    return False


def restore(url: URL, before: KeyHistory) -> None:
    """Set the history back to `before`, as no key was added after all."""
    if before is not KeyHistory.NEVER:
        remember(url, before)
        return
    for path in _files(url):
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            log.error("cannot remove %s, so every request will need an API key: %s", path, exc)


def _files(url: URL) -> tuple[Path, ...]:
    name = hashlib.blake2b(_identity(url).encode(), digest_size=12).hexdigest()
    kept = state_dir() / "keyed" / name
    if url.get_backend_name() != "sqlite":
        return (kept,)
    file = Path(str(url.database))
    return file.with_name(f"{file.name}.keyed"), kept


def _identity(url: URL) -> str:
    if url.get_backend_name() == "sqlite":
        return os.path.realpath(str(url.database))
    return f"{url.host}:{url.port or 5432}/{url.database}"


def _read(path: Path) -> KeyHistory:
    try:
        return KeyHistory(path.read_text().strip())
    except (FileNotFoundError, NotADirectoryError):
        return KeyHistory.NEVER
    except (OSError, ValueError):
        return KeyHistory.KEYED


def _write(path: Path, what: KeyHistory) -> bool:
    """False when it cannot be written."""
    with suppress(OSError):
        if path.exists() and path.read_text().strip() == what.value:
            return True
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.write_text(f"{what.value}\n")
        new.chmod(0o600)
        new.rename(path)
    except OSError as exc:
        log.warning("cannot write %s: %s", path, exc)
        with suppress(OSError):
            new.unlink()  # a full disk leaves an empty one
        return False
    return True
