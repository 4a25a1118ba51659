"""API keys, tenants and the log of their changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, assert_never

from sqlalchemy import Connection, delete, insert, select, update

from cato.core.administration import (
    AddKey,
    AuditEntry,
    Change,
    DeleteKey,
    EndKey,
    OpenWithoutKeys,
    RotateKey,
    SetTenant,
)
from cato.core.tenancy import Access, ApiKey, KeyHistory, Role, Tenant
from cato.store import keyed
from cato.store.connections import Connections
from cato.store.errors import StoreCorruptError, StoreError, StoreUnavailableError
from cato.store.rows import key_row, upsert
from cato.store.schema import api_keys, audit, spent_tokens, tenants

# Lock on a PostgreSQL database for changes of keys; "KEYS" in ASCII.
_KEYS_LOCK = 0x4B455953


def month_of(at_s: float) -> str:
    """The month of budgets, as 2026-11, in UTC; `at_s` in seconds since the epoch."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m")


class KeyTables(Connections):
    def administer(
        self, change: Change, by: str, within: str | None = None
    ) -> ApiKey | Tenant | None:
        """Apply `change` and log it as `by`'s, both or neither; returns its object afterwards.

        None when there is no such key, or it is not of the tenant `within`. After its first key a
        deployment counts as having had one, even if its store is lost.
        """
        before = keyed.history(self._engine.url)
        try:
            with self._changing_keys() as connection:
                about = self._apply(connection, change, by, within)
                # Before the commit: no key is ever stored without the mark, and no other process
                # that still sees the deleted keys marks them again.
                if about is not None and isinstance(change, AddKey | RotateKey):
                    self._remember(KeyHistory.KEYED, "cannot record that the deployment has keys")
                if isinstance(change, OpenWithoutKeys):
                    self._remember(KeyHistory.OPENED, "cannot record that no key is needed")
        except BaseException:
            if isinstance(change, AddKey) and before is not KeyHistory.KEYED:
                self._take_back_mark(before)
            if isinstance(change, OpenWithoutKeys):
                keyed.restore(self._engine.url, before)
            raise
        return about

    @contextmanager
    def _changing_keys(self) -> Iterator[Connection]:
        """A transaction beside which no other process changes keys or their history."""
        with self._transaction() as connection:
            if connection.dialect.name == "postgresql":  # a transaction of SQLite is alone anyway
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_KEYS_LOCK})")
            yield connection

    def _take_back_mark(self, before: KeyHistory) -> None:
        """Undo the mark of a first key that was not stored: without any key, it would shut
        everybody out. It stays if there are keys after all, as from another process."""
        with suppress(StoreError):
            if self.api_keys():
                return
        keyed.restore(self._engine.url, before)

    def _apply(
        self, connection: Connection, change: Change, by: str, within: str | None
    ) -> ApiKey | Tenant | None:
        known = self._known_key(connection, change, within)
        if known is None and isinstance(change, EndKey | RotateKey | DeleteKey):
            return None
        match change:
            case AddKey(key):
                self._add_key(connection, by, key)
                return key
            case EndKey(_, at_s):
                assert known is not None
                return self._end_key(connection, by, known, at_s)
            case RotateKey(_, key, at_s):
                assert known is not None
                self._end_key(connection, by, known, at_s)
                self._add_key(connection, by, key)
                return key
            case DeleteKey(id):
                assert known is not None
                connection.execute(delete(api_keys).where(api_keys.c.id == id))
                self._log(connection, by, "key.delete", id, known, None, known.tenant)
                return known
            case SetTenant(tenant):
                self._set_tenant(connection, by, tenant)
                return tenant
            case OpenWithoutKeys():
                connection.execute(delete(api_keys))
                self._log(connection, by, "keys.open", "", None, None)
                return None
            case _:
                assert_never(change)

    def _known_key(
        self, connection: Connection, change: Change, within: str | None
    ) -> ApiKey | None:
        """The key that `change` is about, if it belongs to `within`."""
        if not isinstance(change, EndKey | RotateKey | DeleteKey):
            return None
        query = select(api_keys).where(api_keys.c.id == change.id)
        row = connection.execute(query).one_or_none()
        return None if row is None or within not in (None, row.tenant) else self._key(row)

    def _add_key(self, connection: Connection, by: str, key: ApiKey) -> None:
        connection.execute(insert(api_keys), key_row(key))
        self._log(connection, by, "key.create", key.id, None, key, key.tenant)

    def _end_key(self, connection: Connection, by: str, key: ApiKey, at_s: float) -> ApiKey:
        """The key after the change; it may already have had an earlier end."""
        if key.expires_at_s is not None and key.expires_at_s <= at_s:
            return key
        ended = replace(key, expires_at_s=at_s)
        connection.execute(
            update(api_keys).where(api_keys.c.id == key.id).values(expires_at_s=at_s)
        )
        self._log(connection, by, "key.end", key.id, key, ended, key.tenant)
        return ended

    def _set_tenant(self, connection: Connection, by: str, tenant: Tenant) -> None:
        query = select(tenants).where(tenants.c.name == tenant.name)
        row = connection.execute(query).one_or_none()
        before = None if row is None else Tenant(*row)
        connection.execute(upsert(connection, tenants), [asdict(tenant)])
        self._log(connection, by, "tenant.limit", tenant.name, before, tenant, tenant.name)

    def audit(
        self, tenant: str | None = None, limit: int = 100, below: int | None = None
    ) -> tuple[AuditEntry, ...]:
        """The newest changes (None: of all tenants); with `below`, only ids below it."""
        query = select(audit).order_by(audit.c.id.desc()).limit(limit)
        if tenant is not None:
            query = query.where(audit.c.tenant == tenant)
        if below is not None:
            query = query.where(audit.c.id < below)
        with self._reading() as connection:
            rows = connection.execute(query).all()
        try:
            return tuple(
                AuditEntry(*row[:6], *(None if t is None else json.loads(t) for t in row[6:]))
                for row in rows
            )
        except ValueError as exc:
            raise StoreCorruptError(self.name, "an entry of the audit log is unreadable") from exc

    def _remember(self, history: KeyHistory, problem: str) -> None:
        if not keyed.remember(self._engine.url, history):
            raise StoreUnavailableError(self.name, problem)

    def remember_keys(self) -> None:
        """Record outside the store that the deployment has keys."""
        keyed.remember(self._engine.url, KeyHistory.KEYED)

    def api_keys(self) -> tuple[ApiKey, ...]:
        """All keys, including ended ones, oldest first."""
        with self._reading() as connection:
            return self._keys_in(connection)

    def _keys_in(self, connection: Connection) -> tuple[ApiKey, ...]:
        query = select(api_keys).order_by(api_keys.c.created_at_s, api_keys.c.id)
        return tuple(self._key(row) for row in connection.execute(query))

    def tenants(self) -> tuple[Tenant, ...]:
        """All tenants with limits, by name."""
        with self._reading() as connection:
            rows = connection.execute(select(tenants).order_by(tenants.c.name))
            return tuple(Tenant(*row) for row in rows)

    def access(self, month: str) -> Access:
        """Keys, tenants and used tokens for an ingress; `month` as 2026-11."""
        columns = spent_tokens.c
        query = select(columns.tenant, columns.tokens).where(columns.month == month)
        with self._reading() as connection:
            spent = {tenant: int(n) for tenant, n in connection.execute(query)}
        keys, history = self.api_keys(), keyed.history(self._engine.url)
        if keys and history is not KeyHistory.KEYED:
            keys, history = self._marked()
        return Access(keys, self.tenants(), spent, history, month)

    def _marked(self) -> tuple[tuple[ApiKey, ...], KeyHistory]:
        """All keys and their history; keys of an earlier version of CATO are marked first.

        No other process changes keys meanwhile: `cato keys open` may just have deleted them.
        """
        with self._changing_keys() as connection:
            keys = self._keys_in(connection)
            if keys:
                self.remember_keys()
        return keys, keyed.history(self._engine.url)

    def _key(self, row: Any) -> ApiKey:
        try:
            tasks, models = tuple(json.loads(row.tasks)), tuple(json.loads(row.models))
            role, bounds = Role(row.role), tuple((n, int(v)) for n, v in json.loads(row.bounds))
        except (TypeError, ValueError) as exc:
            raise StoreCorruptError(self.name, f"API key {row.id} is unreadable") from exc
        parsed = {"tasks": tasks, "models": models, "role": role, "bounds": bounds}
        return ApiKey(**{**row._asdict(), **parsed})
