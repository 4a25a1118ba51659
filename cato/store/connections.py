"""Transactions and reads of the metadata store; errors become `StoreError`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, insert
from sqlalchemy.exc import SQLAlchemyError

from cato.core.tenancy import ApiKey, Tenant
from cato.core.topology import AdapterSpec
from cato.store.database import WRITES, set_aside
from cato.store.errors import StoreMovedError, translated
from cato.store.location import shown
from cato.store.rows import audited
from cato.store.schema import audit


class Connections:
    """One database, shared by threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writing = engine.execution_options(**WRITES)
        self._file: Path | None = None
        self._inode = 0
        if engine.dialect.name == "sqlite":
            self._file = Path(str(engine.url.database))
            self._inode = _inode(self._file)

    @property
    def name(self) -> str:
        """The path or URL for messages, without a password."""
        return shown(self._engine.url)

    def close(self) -> None:
        self._engine.dispose()

    def set_aside(self, problem: str) -> None:
        """Rename a damaged file; the next `open` creates a new one."""
        self.close()
        if self._file is not None and not self._has_moved():
            set_aside(self._file, problem)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        if self._has_moved():
            raise StoreMovedError(self.name, "the file was moved or removed while in use")
        with self._translating(), self._writing.begin() as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._translating(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as exc:
            raise translated(self.name, exc) from exc

    def _has_moved(self) -> bool:
        """Whether the file was moved: SQLite would keep writing to the old one."""
        return self._file is not None and _inode(self._file) != self._inode

    def _log(
        self,
        connection: Connection,
        by: str,
        action: str,
        target: str,
        before: ApiKey | Tenant | AdapterSpec | str | None,
        after: ApiKey | Tenant | AdapterSpec | str | None,
        tenant: str = "",
    ) -> None:
        """Add an entry to the audit log; a `str` is already JSON."""
        row = {
            "at_s": time.time(),
            "who": by,
            "action": action,
            "tenant": tenant,
            "target": target,
            "before": audited(before),
            "after": audited(after),
        }
        connection.execute(insert(audit), row)


def _inode(file: Path) -> int:
    """0 when there is no such file."""
    try:
        return file.stat().st_ino
    except OSError:
        return 0
