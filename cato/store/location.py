"""Where the metadata store is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from cato.config.places import run_dir, state_dir
from cato.store.errors import StoreError

log = logging.getLogger("cato.store")

STORE_VARIABLE = "CATO_STORE"
"""Environment variable that names another store than `metadata.db` in the state folder: a path or
a `postgresql://` URL."""

_FILE = "metadata.db"
_WHAT = "name a file, or a URL such as postgresql://user:password@host/database"


def default_location() -> str:
    """The store that `CATO_STORE` names, otherwise a file in the state folder.

    Earlier versions kept it in the run folder. A store found there is used until it is moved, so
    that its keys are not forgotten.
    """
    named = os.environ.get(STORE_VARIABLE)
    if named:
        return named
    new, old = state_dir() / _FILE, run_dir() / _FILE
    if old.exists() and not new.exists():
        log.warning("the metadata store is %s: move it to %s, with its .keyed file", old, new)
        return str(old)
    return str(new)


def store_url(location: str | Path) -> URL:
    """The database at `location`; a path means a SQLite file. Raise `StoreError`."""
    text = str(location)
    if "://" not in text:
        path = Path(text).expanduser().absolute()
        return URL.create("sqlite", database=str(path))
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # ValueError: the port is not a number
        # From None: the library's error quotes the URL, including the password.
        raise StoreError(text.split("://")[0] + "://", f"not a URL; {_WHAT}") from None
    match url.get_backend_name():
        case "sqlite":
            if url.database in (None, "", ":memory:"):
                raise StoreError(shown(url), f"a store in memory keeps nothing; {_WHAT}")
            return url
        case "postgresql":
            return url.set(drivername="postgresql+psycopg")
        case other:
            raise StoreError(shown(url), f"{other} is not supported; {_WHAT}")


def shown(url: URL) -> str:
    """The store's name for messages: a path, or a URL without its password."""
    return str(url.database) if url.get_backend_name() == "sqlite" else url.render_as_string()
