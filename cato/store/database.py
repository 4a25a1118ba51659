"""Open the database: connection settings, migrations, and handling of a damaged file.

SQLite runs in WAL mode, so that readers and a writer do not block each other. A writer takes its
lock at once (BEGIN IMMEDIATE), because a transaction that first reads and then writes cannot wait
for it. With `synchronous` at NORMAL a killed process loses no committed data; a host that loses
power may lose the last commits, but the file stays intact.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError

from cato.store.errors import (
    StoreCorruptError,
    StoreError,
    StoreMissingError,
    StoreTooNewError,
    StoreUnavailableError,
    translated,
)
from cato.store.files import check_is_store, is_there
from cato.store.location import shown

log = logging.getLogger("cato.store")

WRITES = {"cato_writes": True}
"""Execution options of a connection that will write."""

_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "foreign_keys = ON",
    "journal_size_limit = 4194304",  # WAL size after a checkpoint; it grows while readers lag
)

# libpq's settings: a connection to a host that vanished ends in seconds. Without them a call would
# wait for minutes, or for ever. A URL may set others.
_LIVENESS = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

# Lock shared by all processes that migrate one PostgreSQL database; "CATO" in ASCII.
_MIGRATION_LOCK = 0x4341544F
_LOCK_POLL_S = 0.02
# Alembic has one context per process.
_migrating = threading.Lock()


def open_engine(
    url: URL, busy_timeout_s: float, *, creates: bool = True, sets_aside: bool = False
) -> Engine:
    """An engine with the current schema. `creates`: make a missing file; `sets_aside`: replace a
    damaged one.

    Raise `StoreUnavailableError`; or, without changing anything, `StoreForeignError`,
    `StoreMissingError`, `StoreCorruptError` or `StoreTooNewError`.
    """
    if url.get_backend_name() != "sqlite":
        engine = _postgresql(url, busy_timeout_s)
        _or_dispose(engine, _migrate)
        return engine
    path = Path(str(url.database))
    check_is_store(path)
    if not creates and not is_there(url):
        raise StoreMissingError(str(path), "`cato serve` and `cato keys create` make one")
    with _opening(path, busy_timeout_s):
        engine = _sqlite(url, busy_timeout_s)
        try:
            _or_dispose(engine, _prepare_file)
        except StoreCorruptError as exc:
            if not sets_aside:
                rule = "restore a copy, or let `cato serve` rename it and begin a new one"
                raise StoreCorruptError(
                    str(path), f"it is damaged ({exc.problem}); {rule}"
                ) from exc
            set_aside(path, exc.problem)
            engine = _sqlite(url, busy_timeout_s)
            _or_dispose(engine, _prepare_file)
    return engine


def set_aside(path: Path, problem: str) -> None:
    """Rename a damaged file and its journal; nothing is deleted.

    Raise `StoreUnavailableError` when it cannot be renamed.
    """
    at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    name, n = f"{path.name}.corrupt-{at}", 1
    while path.with_name(name).exists():
        name, n = f"{path.name}.corrupt-{at}-{n}", n + 1
    try:
        for suffix in ("", "-wal", "-shm"):
            old = path.with_name(path.name + suffix)
            if old.exists():
                old.rename(path.with_name(name + suffix))
    except OSError as exc:
        raise StoreUnavailableError(
            str(path), f"it is damaged ({problem}) and cannot be renamed ({exc}): move it away"
        ) from exc
    log.error(
        "metadata store %s is damaged (%s): it was renamed to %s and a new one created; learnt "
        "values start from nothing",
        path, problem, name,
    )  # fmt: skip


def _sqlite(url: URL, busy_timeout_s: float) -> Engine:
    engine = create_engine(url, connect_args={"timeout": busy_timeout_s})

    def configure(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver's own BEGIN excludes DDL
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").close()

    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().keys() & WRITES.keys()
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", begin)
    return engine


def _postgresql(url: URL, busy_timeout_s: float) -> Engine:
    asked = {"connect_timeout": max(1, round(busy_timeout_s))}
    asked |= {name: value for name, value in _LIVENESS.items() if name not in url.query}
    try:
        engine = create_engine(url, pool_pre_ping=True, connect_args=asked)
    except ModuleNotFoundError as exc:
        raise StoreError(shown(url), "PostgreSQL needs: pip install 'cato[postgres]'") from exc

    def configure(connection: Any, _: object) -> None:
        # Not as a startup option, which connection poolers refuse.
        connection.execute(f"SET lock_timeout = {max(1, round(busy_timeout_s * 1000))}")
        connection.commit()

    event.listen(engine, "connect", configure)
    return engine


def _or_dispose(engine: Engine, prepare: Callable[[Engine], None]) -> None:
    try:
        prepare(engine)
    except SQLAlchemyError as exc:
        engine.dispose()
        raise translated(shown(engine.url), exc) from exc
    except BaseException:
        engine.dispose()
        raise


def _prepare_file(engine: Engine) -> None:
    with engine.begin() as connection:
        health = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if health != "ok":
        raise StoreCorruptError(shown(engine.url), " ".join(health.split()))
    _migrate(engine)


def _migrate(engine: Engine) -> None:
    config = Config()
    folder = Path(__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    with _migrating, engine.execution_options(**WRITES).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
        _refuse_newer(connection, config)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _refuse_newer(connection: Connection, config: Config) -> None:
    found = MigrationContext.configure(connection).get_current_revision()
    if found is None:
        return
    scripts = ScriptDirectory.from_config(config)
    try:
        scripts.get_revision(found)
    except CommandError as exc:
        raise StoreTooNewError(
            shown(connection.engine.url),
            f"its schema is version {found}, and this CATO supports up to "
            f"{scripts.get_current_head()}: run the CATO that wrote it, or name another store",
        ) from exc


@contextmanager
def _opening(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock under which one process at a time creates, checks or migrates `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as exc:
        raise StoreUnavailableError(str(path), f"its folder cannot be used ({exc})") from exc
    try:
        give_up_s = time.monotonic() + timeout_s
        while not _is_locked(lock):
            if time.monotonic() >= give_up_s:
                raise StoreUnavailableError(str(path), "another process is opening it")
            time.sleep(_LOCK_POLL_S)
        try:
            # Receipts say who asked for what and when: readable by this user only.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as exc:
            raise StoreUnavailableError(str(path), f"it cannot be opened ({exc})") from exc
        yield
    finally:
        os.close(lock)


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
