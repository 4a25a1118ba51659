"""The metadata store: small typed reads and writes over one database. Calls block."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, assert_never

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, Engine, delete, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

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
from cato.core.arrival_rates import UsualArrivals
from cato.core.estimates import NodeMean, PoolErrors
from cato.core.ids import ModelName, NodeId, PoolName, TaskName
from cato.core.rollout import Rollout
from cato.core.tenancy import (
    LAST_DAY,
    Access,
    ApiKey,
    CardTime,
    KeyHistory,
    Role,
    Tenant,
    TurnUsage,
    Usage,
    turn_usage,
)
from cato.core.topology import AdapterSpec, HostedModel
from cato.estimators.stages import FinishedStages
from cato.profiles.load import profile_name
from cato.profiles.schema import ProfileFile
from cato.store import keyed
from cato.store.database import WRITES, open_engine, set_aside
from cato.store.errors import (
    StoreCorruptError,
    StoreError,
    StoreMovedError,
    StoreRecordError,
    StoreUnavailableError,
    translated,
)
from cato.store.location import shown, store_url
from cato.store.records import (
    AddedAdapter,
    Learnt,
    Limits,
    Reaction,
    Record,
    RegisteredModel,
)
from cato.store.rows import (
    ROLLOUT,
    Rows,
    adapter_of,
    audited,
    graph_of,
    keep_newest,
    key_row,
    readable_rollouts,
    sample_of,
    upsert,
)
from cato.store.schema import (
    added_adapters,
    api_keys,
    audit,
    card_time,
    dag_runs,
    hosted_models,
    length_samples,
    node_means,
    pool_errors,
    profiles,
    reactions,
    receipts,
    rollouts,
    tenants,
    usage,
    usual_arrivals,
)

log = logging.getLogger("cato.store")

BUSY_TIMEOUT_S = 5.0
"""How long a call waits for another process that is writing."""

_HOSTED = TypeAdapter(HostedModel)


class MetadataStore:
    """Typed access to the database. Safe to share between threads; make one with `open`.

    Every call raises `StoreError`; `StoreUnavailableError` if a retry may succeed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writing = engine.execution_options(**WRITES)
        self._file: Path | None = None
        self._inode = 0
        if engine.dialect.name == "sqlite":
            self._file = Path(str(engine.url.database))
            self._inode = _inode(self._file)

    @classmethod
    def open(cls, location: str | Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> MetadataStore:
        """The store at a path or URL, created or migrated if needed.

        A damaged SQLite file is renamed and replaced by a new one. Raise `StoreTooNewError` for a
        schema of a later version.
        """
        return cls(open_engine(store_url(location), busy_timeout_s))

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

    # Learnt values

    def write(self, records: Sequence[Record]) -> None:
        """Write all of `records` or none, in one transaction."""
        try:
            rows = Rows()
            for record in records:
                rows.add(record)
            with self._transaction() as connection:
                rows.write(connection)
        except (OverflowError, TypeError, ValueError) as exc:
            # A number beyond 64 bits or invalid Unicode: rejected before the database sees it.
            raise StoreRecordError(self.name, str(exc)) from exc

    def prune(self, limits: Limits, now_s: float) -> None:
        """Delete records beyond `limits`; `now_s` in seconds since the epoch."""
        samples = length_samples.c
        with self._transaction() as connection:
            keep_newest(connection, length_samples, limits.samples_per_node,
                         (samples.task, samples.node, samples.model))  # fmt: skip
            keep_newest(connection, dag_runs, limits.runs_per_task, (dag_runs.c.task,))
            for at_s, kept in (
                (receipts.c.ended_at_s, limits.receipts),
                (reactions.c.at_s, limits.reactions),
            ):
                newest = select(at_s).order_by(at_s.desc()).limit(1).offset(kept)
                connection.execute(delete(at_s.table).where(at_s <= newest.scalar_subquery()))
            too_old = receipts.c.ended_at_s < now_s - limits.receipt_age_s
            connection.execute(delete(receipts).where(too_old))

    def learnt(self) -> Learnt:
        """All learnt values; an unreadable row counts as damage."""
        with self._reading() as connection:
            means = tuple(
                NodeMean(TaskName(r.task), NodeId(r.node), r.quantity, r.value, r.samples)
                for r in connection.execute(select(node_means))
            )
            errors = tuple(
                PoolErrors(
                    PoolName(r.pool), r.predicted_queue_s, r.queue_s, r.predicted_service_s,
                    r.service_s, r.samples,
                )
                for r in connection.execute(select(pool_errors))
            )  # fmt: skip
            answers = connection.execute(select(length_samples).order_by(length_samples.c.id)).all()
            stages = connection.execute(select(dag_runs).order_by(dag_runs.c.id)).all()
            kept = connection.execute(select(rollouts.c.document)).scalars().all()
        try:
            runs = tuple(FinishedStages(TaskName(r.task), graph_of(r.stages)) for r in stages)
            samples = tuple(map(sample_of, answers))
        except (TypeError, ValueError) as exc:
            raise StoreCorruptError(self.name, f"a learnt value is unreadable ({exc})") from exc
        return Learnt(means, errors, samples, runs, tuple(readable_rollouts(kept)))

    def receipt(self, request_id: str, tenant: str | None) -> Mapping[str, object] | None:
        """A receipt of `tenant` (None: the newest of any tenant) as plain values, without its free
        text; None when it is not kept."""
        query = select(receipts.c.document).where(receipts.c.request_id == request_id)
        if tenant is not None:
            query = query.where(receipts.c.tenant == tenant)
        with self._reading() as connection:
            newest = query.order_by(receipts.c.ended_at_s.desc()).limit(1)
            document = connection.execute(newest).scalar_one_or_none()
        if document is None:
            return None
        try:
            plain: dict[str, object] = json.loads(document)
        except ValueError as exc:
            raise StoreCorruptError(self.name, f"receipt {request_id} is unreadable") from exc
        return plain

    def reactions(self, request_id: str) -> tuple[Reaction, ...]:
        """Reactions to the completion of a request, in order."""
        query = select(reactions).where(reactions.c.request_id == request_id)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(reactions.c.at_s, reactions.c.reaction))
            return tuple(Reaction(*row) for row in rows)

    # Keys and tenants

    def administer(
        self, change: Change, by: str, within: str | None = None
    ) -> ApiKey | Tenant | None:
        """Apply `change` and log it as `by`'s, both or neither; returns its object afterwards.

        None when there is no such key, or it is not of the tenant `within`. After its first key a
        deployment counts as having had one, even if its store is lost.
        """
        if isinstance(change, AddKey | RotateKey):
            self._remember(KeyHistory.KEYED, "cannot record that the deployment has keys")
        with self._transaction() as connection:
            known = self._known_key(connection, change, within)
            if known is None and isinstance(change, EndKey | RotateKey | DeleteKey):
                return None
            match change:
                case AddKey(key):
                    self._add_key(connection, by, key)
                    about: ApiKey | Tenant | None = key
                case EndKey(_, at_s):
                    assert known is not None
                    about = self._end_key(connection, by, known, at_s)
                case RotateKey(_, key, at_s):
                    assert known is not None
                    self._end_key(connection, by, known, at_s)
                    self._add_key(connection, by, key)
                    about = key
                case DeleteKey(id):
                    assert known is not None
                    connection.execute(delete(api_keys).where(api_keys.c.id == id))
                    self._log(connection, by, "key.delete", id, known, None, known.tenant)
                    about = known
                case SetTenant(tenant):
                    self._set_tenant(connection, by, tenant)
                    about = tenant
                case OpenWithoutKeys():
                    connection.execute(delete(api_keys))
                    self._log(connection, by, "keys.open", "", None, None)
                    about = None
                case _:
                    assert_never(change)
        if isinstance(change, OpenWithoutKeys):
            self._remember(KeyHistory.OPENED, "cannot record that no key is needed")
        return about

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

    def log_rollout(self, by: str, action: str, before: Rollout | None, after: Rollout) -> None:
        """Log `by`'s change to a rollout; the rollout itself is kept as a record."""
        with self._transaction() as connection:
            old = None if before is None else ROLLOUT.dump_json(before).decode()
            new = ROLLOUT.dump_json(after).decode()
            self._log(connection, by, action, after.name, old, new)

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
        query = select(api_keys).order_by(api_keys.c.created_at_s, api_keys.c.id)
        with self._reading() as connection:
            return tuple(self._key(row) for row in connection.execute(query))

    def tenants(self) -> tuple[Tenant, ...]:
        """All tenants with limits, by name."""
        with self._reading() as connection:
            rows = connection.execute(select(tenants).order_by(tenants.c.name))
            return tuple(Tenant(*row) for row in rows)

    def access(self, month: str) -> Access:
        """Keys, tenants and used tokens for an ingress; `month` as 2026-11."""
        tokens = func.sum(usage.c.prompt_tokens + usage.c.output_tokens)
        query = (
            select(usage.c.tenant, tokens)
            .where(usage.c.day >= f"{month}-01", usage.c.day <= f"{month}-31")
            .group_by(usage.c.tenant)
        )
        with self._reading() as connection:
            spent = {tenant: int(n) for tenant, n in connection.execute(query)}
        keys, history = self.api_keys(), keyed.history(self._engine.url)
        if keys and history is not KeyHistory.KEYED:  # created by an earlier version
            self.remember_keys()
            history = KeyHistory.KEYED
        return Access(keys, self.tenants(), spent, history)

    def usage(
        self, tenant: str | None, since: str = "", until: str = LAST_DAY
    ) -> tuple[Usage, ...]:
        """Usage of `tenant` (None: all tenants) from one day to another, by name."""
        query = select(usage).order_by(*usage.primary_key.columns)
        query = query.where(usage.c.day.between(since, until))
        if tenant is not None:
            query = query.where(usage.c.tenant == tenant)
        with self._reading() as connection:
            return tuple(Usage(*row) for row in connection.execute(query))

    def card_time(self, since: str = "", until: str = LAST_DAY) -> tuple[CardTime, ...]:
        """Accelerator time that models held, by day and model."""
        query = select(card_time).where(card_time.c.day.between(since, until))
        with self._reading() as connection:
            rows = connection.execute(query.order_by(*card_time.primary_key.columns))
            return tuple(CardTime(*row) for row in rows)

    def turns(self, session: str, tenant: str | None) -> tuple[TurnUsage, ...]:
        """Usage of the kept turns of `session`, oldest first: `tenant`'s (None: all tenants')."""
        query = select(receipts.c.document).where(receipts.c.session == session)
        if tenant is not None:
            query = query.where(receipts.c.tenant == tenant)
        with self._reading() as connection:
            found = connection.execute(query.order_by(receipts.c.ended_at_s)).scalars().all()
        try:
            return tuple(map(turn_usage, map(json.loads, found)))
        except (LookupError, TypeError, ValueError) as exc:
            raise StoreCorruptError(self.name, f"a receipt of {session} is unreadable") from exc

    def _key(self, row: Any) -> ApiKey:
        try:
            tasks, models = tuple(json.loads(row.tasks)), tuple(json.loads(row.models))
            role, bounds = Role(row.role), tuple((n, int(v)) for n, v in json.loads(row.bounds))
        except (TypeError, ValueError) as exc:
            raise StoreCorruptError(self.name, f"API key {row.id} is unreadable") from exc
        parsed = {"tasks": tasks, "models": models, "role": role, "bounds": bounds}
        return ApiKey(**{**row._asdict(), **parsed})

    # Profiles

    def save_profile(self, profile: ProfileFile, limits: Limits | None = None) -> None:
        """Keep a measured profile with its provenance; earlier ones stay for a while."""
        name = profile_name(profile.model, profile.accelerator)
        row = {
            "name": name,
            "measured_at_s": time.time(),
            "document": profile.model_dump_json(exclude_none=True),
        }
        kept = (limits or Limits()).documents_per_profile
        oldest_s = (
            select(profiles.c.measured_at_s)
            .where(profiles.c.name == name)
            .order_by(profiles.c.measured_at_s.desc())
            .limit(1)
            .offset(kept)
            .scalar_subquery()
        )
        with self._transaction() as connection:
            connection.execute(insert(profiles), row)
            connection.execute(
                delete(profiles).where(
                    profiles.c.name == name, profiles.c.measured_at_s <= oldest_s
                )
            )

    def profiles(self) -> dict[str, ProfileFile]:
        """The newest measured profile of each name."""
        query = select(profiles.c.name, profiles.c.document).order_by(profiles.c.measured_at_s)
        with self._reading() as connection:
            rows = connection.execute(query).all()
        try:
            return {name: ProfileFile.model_validate_json(document) for name, document in rows}
        except ValidationError as exc:
            raise StoreError(
                self.name, f"a profile of another format, measure again: {exc}"
            ) from exc

    # Models of shared pools

    def add_model(
        self, pool: PoolName, hosted: HostedModel, profile: ProfileFile, by: str = ""
    ) -> RegisteredModel:
        """Keep a newly measured model as the next version of its name."""
        columns, name = hosted_models.c, hosted.model.name
        mine = (columns.pool == pool, columns.name == name)
        with self._transaction() as connection:
            last = connection.execute(select(func.max(columns.version)).where(*mine)).scalar()
            added = RegisteredModel(pool, (last or 0) + 1, time.time(), hosted, profile)
            row = {
                "pool": pool,
                "name": name,
                "version": added.version,
                "added_at_s": added.added_at_s,
                "model": _HOSTED.dump_json(hosted).decode(),
                "profile": profile.model_dump_json(exclude_none=True),
            }
            connection.execute(insert(hosted_models), row)
            self._log(connection, by, "model.add", name, None, str(row["model"]))
        return added

    def models(self) -> tuple[RegisteredModel, ...]:
        """All versions of all models, by pool and name, newest version last."""
        query = select(hosted_models).order_by(*hosted_models.primary_key.columns)
        with self._reading() as connection:
            rows = connection.execute(query).all()
        try:
            return tuple(
                RegisteredModel(
                    PoolName(r.pool), r.version, r.added_at_s, _HOSTED.validate_json(r.model),
                    ProfileFile.model_validate_json(r.profile),
                )
                for r in rows
            )  # fmt: skip
        except ValidationError as exc:
            raise StoreError(self.name, f"a model of another format, add it again: {exc}") from exc

    def remove_model(self, pool: PoolName, name: ModelName, by: str = "") -> bool:
        """Delete all versions; False when there was none."""
        columns = hosted_models.c
        mine = (columns.pool == pool, columns.name == name)
        query = select(columns.model).where(*mine).order_by(columns.version.desc()).limit(1)
        with self._transaction() as connection:
            newest = connection.execute(query).scalar_one_or_none()
            if newest is None:
                return False
            connection.execute(delete(hosted_models).where(*mine))
            self._log(connection, by, "model.remove", name, newest, None)
            return True

    def save_arrivals(self, pool: PoolName, slices: Sequence[UsualArrivals]) -> None:
        """Save arrivals; the newest per model and time of day replaces earlier ones."""
        rows = [{"pool": pool, **asdict(s)} for s in slices]
        if rows:
            with self._transaction() as connection:
                connection.execute(upsert(connection, usual_arrivals), rows)

    def arrivals_of(self, pool: PoolName) -> tuple[UsualArrivals, ...]:
        """Learnt arrival times of the models of `pool`."""
        columns = usual_arrivals.c
        query = (
            select(usual_arrivals)
            .where(columns.pool == pool)
            .order_by(*usual_arrivals.primary_key.columns)
        )
        with self._reading() as connection:
            rows = connection.execute(query).all()
        return tuple(
            UsualArrivals(ModelName(r.model), r.is_weekend, r.slice, r.arrivals, r.days)
            for r in rows
        )

    # Adapters added to a base model

    def add_adapter(self, base: ModelName, adapter: AdapterSpec, by: str = "") -> None:
        """Keep an adapter, replacing one of the same name."""
        row = {
            "name": adapter.name,
            "version": adapter.version,
            "base": base,
            "source": adapter.source,
            "aliases": json.dumps(adapter.aliases),
        }
        with self._transaction() as connection:
            columns = added_adapters.c
            former = connection.execute(
                select(added_adapters).where(columns.name == adapter.name)
            ).one_or_none()
            connection.execute(delete(added_adapters).where(columns.name == adapter.name))
            connection.execute(insert(added_adapters), row)
            before = None if former is None else adapter_of(former).adapter
            self._log(connection, by, "adapter.add", adapter.name, before, adapter)

    def adapters(self) -> tuple[AddedAdapter, ...]:
        """Added adapters, oldest first."""
        query = select(added_adapters).order_by(added_adapters.c.version)
        with self._reading() as connection:
            rows = connection.execute(query).all()
        return tuple(map(adapter_of, rows))

    def remove_adapter(self, name: ModelName, by: str = "") -> bool:
        """Delete the adapter; False when there was none."""
        is_it = added_adapters.c.name == name
        with self._transaction() as connection:
            known = connection.execute(select(added_adapters).where(is_it)).one_or_none()
            if known is None:
                return False
            connection.execute(delete(added_adapters).where(is_it))
            self._log(connection, by, "adapter.remove", name, adapter_of(known).adapter, None)
            return True

    # Connections

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


def _inode(file: Path) -> int:
    """0 when there is no such file."""
    try:
        return file.stat().st_ino
    except OSError:
        return 0
