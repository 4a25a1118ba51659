"""Whether a file may be opened as a metadata store; changes nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import URL

from cato.store.errors import StoreForeignError, StoreUnavailableError

# The first bytes of every SQLite file, https://sqlite.org/fileformat.html
_HEADER = b"SQLite format 3\0"
_ADVICE = "move it away, or name another store"


def is_there(url: URL) -> bool:
    """False for a SQLite file that does not exist. A PostgreSQL server says so when it is asked."""
    try:
        return url.get_backend_name() != "sqlite" or Path(str(url.database)).exists()
    except OSError:  # no permission to look: opening it says so
        return True


def check_is_store(path: Path) -> None:
    """Raise `StoreForeignError` if `path` is anything but a store. A file that is missing, empty or
    damaged passes."""
    try:
        if not path.exists():
            return
        if not path.is_file():
            raise StoreForeignError(str(path), f"it is not a file; {_ADVICE}")
        with path.open("rb") as file:
            found = file.read(len(_HEADER))
    except OSError as exc:
        raise StoreUnavailableError(str(path), f"it cannot be opened ({exc})") from exc
    if found and found != _HEADER:
        raise StoreForeignError(str(path), f"it is not a SQLite file; {_ADVICE}")
    if found and _has_only_foreign_tables(path):
        raise StoreForeignError(str(path), f"another program wrote this database; {_ADVICE}")


def _has_only_foreign_tables(path: Path) -> bool:
    # `immutable` takes no lock and writes no file beside the database. A store whose tables are
    # still in its WAL seems to have none.
    uri = f"{path.absolute().as_uri()}?immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {name for (name,) in rows}
    except sqlite3.Error:  # damaged, or another process is writing
        return False
    return bool(tables) and "alembic_version" not in tables
