"""The metadata store: small typed reads and writes over one database. Calls block."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import delete, select

from cato.core.rollout import Rollout
from cato.core.tenancy import LAST_DAY, CardTime, TurnUsage, Usage, turn_usage
from cato.store.catalog import CatalogTables
from cato.store.database import open_engine
from cato.store.errors import StoreCorruptError, StoreRecordError
from cato.store.keys import KeyTables
from cato.store.location import store_url
from cato.store.records import Learnt, Limits, Reaction, Record
from cato.store.rows import (
    ROLLOUT,
    Rows,
    drop_oldest,
    errors_of,
    keep_newest,
    mean_of,
    readable,
    sample_of,
    stages_of_row,
)
from cato.store.schema import (
    audit,
    card_time,
    dag_runs,
    length_samples,
    node_means,
    pool_errors,
    reactions,
    receipts,
    rollouts,
    spent_tokens,
    usage,
    usage_senders,
)

BUSY_TIMEOUT_S = 5.0
"""How long a call waits for another process that is writing."""


class MetadataStore(KeyTables, CatalogTables):
    """Typed access to the database. Safe to share between threads; make one with `open`.

    Every call raises `StoreError`; `StoreUnavailableError` if a retry may succeed.
    """

    @classmethod
    def open(
        cls,
        location: str | Path,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        *,
        creates: bool = True,
        sets_aside: bool = False,
    ) -> MetadataStore:
        """The store at a path or URL, migrated if needed.

        A missing file is made if the caller `creates`, otherwise `StoreMissingError` is raised. A
        damaged one is renamed and replaced by a new one if the caller `sets_aside`, otherwise
        `StoreCorruptError` is raised. Raise `StoreForeignError` for any other file, and
        `StoreTooNewError` for a schema of a later version.
        """
        url = store_url(location)
        return cls(open_engine(url, busy_timeout_s, creates=creates, sets_aside=sets_aside))

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
            newest = select(samples.id).order_by(samples.id.desc()).limit(1).offset(limits.samples)
            connection.execute(delete(length_samples).where(samples.id <= newest.scalar_subquery()))
            keep_newest(connection, dag_runs, limits.runs_per_task, (dag_runs.c.task,))
            for at_s, kept in (
                (receipts.c.ended_at_s, limits.receipts),
                (reactions.c.at_s, limits.reactions),
            ):
                newest = select(at_s).order_by(at_s.desc()).limit(1).offset(kept)
                connection.execute(delete(at_s.table).where(at_s <= newest.scalar_subquery()))
            too_old = receipts.c.ended_at_s < now_s - limits.receipt_age_s
            connection.execute(delete(receipts).where(too_old))
            last_day = _days_before(now_s, limits.sender_days)
            connection.execute(delete(usage_senders).where(usage_senders.c.day < last_day))
            if limits.usage_days is not None:
                first_day = _days_before(now_s, limits.usage_days)
                for table in (usage, card_time):
                    drop_oldest(connection, table.c.day, first_day, limits.old_rows)
                drop_oldest(connection, spent_tokens.c.month, first_day[:7], limits.old_rows)
            if limits.audit_days is not None:
                first_s = now_s - limits.audit_days * 86_400.0
                drop_oldest(connection, audit.c.at_s, first_s, limits.old_rows)

    def learnt(self) -> Learnt:
        """All learnt values that can be read."""
        with self._reading() as connection:
            means = connection.execute(select(node_means)).all()
            errors = connection.execute(select(pool_errors)).all()
            answers = connection.execute(select(length_samples).order_by(length_samples.c.id)).all()
            stages = connection.execute(select(dag_runs).order_by(dag_runs.c.id)).all()
            kept = connection.execute(select(rollouts.c.document)).scalars().all()
        return Learnt(
            readable("means", mean_of, means),
            readable("prediction errors", errors_of, errors),
            readable("lengths", sample_of, answers),
            readable("runs", stages_of_row, stages),
            readable("rollouts", ROLLOUT.validate_json, kept),
        )

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

    def log_rollout(self, by: str, action: str, before: Rollout | None, after: Rollout) -> None:
        """Log `by`'s change to a rollout; the rollout itself is kept as a record."""
        with self._transaction() as connection:
            old = None if before is None else ROLLOUT.dump_json(before).decode()
            new = ROLLOUT.dump_json(after).decode()
            self._log(connection, by, action, after.name, old, new)

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


def _days_before(now_s: float, days: int) -> str:
    """The day that many days ago, as 2026-11-30."""
    return (datetime.fromtimestamp(now_s, UTC).date() - timedelta(days)).isoformat()
