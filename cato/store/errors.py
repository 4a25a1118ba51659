"""Errors of the metadata store.

StoreError                 the store cannot be used; `problem` says what to do
├── StoreUnavailableError  locked, full, unreachable: the same call may work later
│   ├── StoreMovedError    the file was moved or removed: open the store again
│   └── StoreForeignError  the file is not a store: move it away
├── StoreMissingError      there is no store yet, and none may be made
├── StoreCorruptError      the file is damaged: a control plane that opens it sets it aside
├── StoreTooNewError       a later version of CATO wrote it
└── StoreRecordError       a record does not fit the schema
"""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from cato.core.errors import CatoError


class StoreError(CatoError):
    """The metadata store at `location` cannot be used because of `problem`."""

    def __init__(self, location: str, problem: str) -> None:
        super().__init__(location, problem)
        self.location = location
        self.problem = problem

    def __str__(self) -> str:
        return f"metadata store {self.location}: {self.problem}"


class StoreUnavailableError(StoreError):
    """Locked, full, read-only or unreachable now."""


class StoreMovedError(StoreUnavailableError):
    """The file that was opened is no longer at its path."""


class StoreForeignError(StoreUnavailableError):
    """The file belongs to somebody else; CATO never changes it."""

    def __str__(self) -> str:
        return f"{self.location} is not a CATO metadata store: {self.problem}"


class StoreMissingError(StoreError):
    """There is no store at `location`, and this caller makes none."""

    def __str__(self) -> str:
        return f"there is no metadata store at {self.location}; {self.problem}"


class StoreCorruptError(StoreError):
    """The file is damaged."""


class StoreTooNewError(StoreError):
    """The schema is newer than this version of CATO supports."""


class StoreRecordError(StoreError):
    """A record does not fit the schema; the others of its batch may."""


# Primary result codes, https://sqlite.org/rescode.html
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_RECORD = frozenset({sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG})


def translated(location: str, error: SQLAlchemyError) -> StoreError:
    """The database's error as a `StoreError` that says whether a retry may help."""
    cause = getattr(error, "orig", None) or error  # the driver's own error, if any
    problem = " ".join(str(cause).split())  # PostgreSQL's have several lines
    code = getattr(cause, "sqlite_errorcode", None)
    if code is not None:
        primary = code & 0xFF
        if primary in _CORRUPT:
            return StoreCorruptError(location, problem)
        if primary in _RECORD:
            return StoreRecordError(location, problem)
        return StoreUnavailableError(location, problem)
    if isinstance(error, DataError | IntegrityError):
        return StoreRecordError(location, problem)
    return StoreUnavailableError(location, problem)
