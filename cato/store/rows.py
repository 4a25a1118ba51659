"""Convert records to rows of the store's tables, and back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple
from functools import cache
from math import isfinite
from typing import Any, TypeVar, assert_never

from pydantic import TypeAdapter
from sqlalchemy import Column, Connection, Table, delete, func, insert, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from cato.core.administration import shown_key
from cato.core.errors import InputError
from cato.core.estimates import NodeMean, PoolErrors
from cato.core.ids import ModelName, NodeId, PoolName, TaskName
from cato.core.rollout import Rollout
from cato.core.tenancy import ApiKey, CardTime, Tenant, Usage, add_card_time, add_usage
from cato.core.topology import AdapterSpec
from cato.core.usage_outbox import UsageParcel
from cato.estimators.dag_match import DagHistory, SuperGraph, SuperNode
from cato.estimators.output_lengths import LengthSample
from cato.estimators.stages import FinishedStages
from cato.store.records import AddedAdapter, KeptReceipt, Reaction, Record
from cato.store.schema import (
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

log = logging.getLogger("cato.store")

Row = dict[str, object]
T = TypeVar("T")

ROLLOUT = TypeAdapter(Rollout)


class Rows:
    """The rows of a batch, one per key: the last of several, or for usage their sum."""

    def __init__(self) -> None:
        self._new: dict[Table, list[Row]] = {}
        self._parcels: dict[str, list[UsageParcel]] = {}
        self._latest: dict[Table, dict[object, Row]] = {}

    def add(self, record: Record) -> None:
        match record:
            case LengthSample():
                self._append(length_samples, record)
            case FinishedStages(task, graph):
                self._new.setdefault(dag_runs, []).append(
                    {"task": task, "stages": stages_json(graph)}
                )
            case NodeMean(task, node, model, quantity):
                self._replace(node_means, (task, node, model, quantity), row_of(record))
            case PoolErrors(pool):
                self._replace(pool_errors, pool, row_of(record))
            case Reaction(request_id, reaction, choice, view_id, tenant=tenant):
                key = (request_id, reaction, choice, view_id, tenant)
                self._replace(reactions, key, asdict(record))
            case UsageParcel(sender):
                self._parcels.setdefault(sender, []).append(record)
            case Rollout():
                document = ROLLOUT.dump_json(record).decode()
                row: Row = {"name": record.name, "document": document}
                self._replace(rollouts, record.name, row)
            case KeptReceipt():
                name = (record.receipt.request_id, record.receipt.tenant)
                self._replace(receipts, name, receipt_row(record))
            case _:
                assert_never(record)

    def write(self, connection: Connection) -> None:
        for table, rows in self._new.items():
            connection.execute(insert(table), rows)
        used: dict[tuple[str, ...], Usage] = {}
        held: dict[tuple[str, str], CardTime] = {}
        for sender, parcels in self._parcels.items():
            for parcel in self._new_parcels(connection, sender, parcels):
                add_usage(used, parcel.usage)
                add_card_time(held, parcel.held)
        if used:
            rows = [asdict(one) for one in used.values()]
            connection.execute(upsert(connection, usage, is_sum=True), rows)
            connection.execute(upsert(connection, spent_tokens, is_sum=True), _spent(used.values()))
        if held:
            rows = [asdict(one) for one in held.values()]
            connection.execute(upsert(connection, card_time, is_sum=True), rows)
        for table, by_key in self._latest.items():
            connection.execute(upsert(connection, table), list(by_key.values()))

    def _new_parcels(
        self, connection: Connection, sender: str, parcels: Sequence[UsageParcel]
    ) -> list[UsageParcel]:
        """The parcels that are not stored yet; from now on they count as stored."""
        columns = usage_senders.c
        stored = select(columns.number).where(columns.sender == sender).with_for_update()
        number = connection.execute(stored).scalar_one_or_none() or 0
        new: list[UsageParcel] = []
        for parcel in parcels:
            if parcel.number > number:
                number = parcel.number
                new.append(parcel)
        if new:
            days = [used.day for parcel in new for used in parcel.usage]
            days += [held.day for parcel in new for held in parcel.held]
            row: Row = {"sender": sender, "number": number, "day": max(days)}
            connection.execute(upsert(connection, usage_senders), [row])
        return new

    def _append(self, table: Table, record: LengthSample) -> None:
        row = row_of(record)
        row["features"] = json.dumps(record.features, separators=(",", ":"))
        self._new.setdefault(table, []).append(row)

    def _replace(self, table: Table, key: object, row: Row) -> None:
        self._latest.setdefault(table, {})[key] = row


def _spent(used: Iterable[Usage]) -> list[Row]:
    """The tokens of each tenant, by month."""
    tokens: dict[tuple[str, str], int] = {}
    for one in used:
        name = one.day[:7], one.tenant
        tokens[name] = tokens.get(name, 0) + one.prompt_tokens + one.output_tokens
    return [{"month": m, "tenant": t, "tokens": n} for (m, t), n in sorted(tokens.items())]


def readable(what: str, parse: Callable[[Any], T], rows: Iterable[Any]) -> tuple[T, ...]:
    """What `parse` makes of `rows`, without those that it cannot read.

    They are damaged, or another version of CATO wrote them. They are logged and left out, because
    the same database holds keys and usage, which are worth more than one learnt value.
    """
    found: list[T] = []
    unread, problem = 0, ""
    for row in rows:
        try:
            found.append(parse(row))
        except (InputError, LookupError, TypeError, ValueError) as exc:
            unread, problem = unread + 1, str(exc)
    if unread:
        log.error("skipping %d unreadable %s in the store, such as: %s", unread, what, problem)
    return tuple(found)


def sample_of(row: Any) -> LengthSample:
    """Raise `TypeError` or `ValueError` for a damaged row."""
    features = tuple(map(float, json.loads(row.features)))
    if min(row.output_tokens - 1, row.prompt_tokens) < 0 or not all(map(isfinite, features)):
        raise ValueError(f"an answer of {row.output_tokens} tokens, features {features}")
    return LengthSample(
        TaskName(row.task), NodeId(row.node), row.model, row.prompt_tokens, row.output_tokens,
        row.finish_reason, features,
    )  # fmt: skip


def mean_of(row: Any) -> NodeMean:
    """Raise `TypeError` or `ValueError` for a damaged row."""
    _check(row.samples, row.value)
    task, node = TaskName(row.task), NodeId(row.node)
    return NodeMean(task, node, row.model, row.quantity, row.value, row.samples)


def errors_of(row: Any) -> PoolErrors:
    """Raise `TypeError` or `ValueError` for a damaged row."""
    times_s = (row.predicted_queue_s, row.queue_s, row.predicted_service_s, row.service_s)
    _check(row.samples, *times_s)
    return PoolErrors(PoolName(row.pool), *times_s, row.samples)


def _check(samples: int, *means: float) -> None:
    if samples < 1 or not all(map(isfinite, means)):
        raise ValueError(f"means {means} of {samples} samples")


def adapter_of(row: Any) -> AddedAdapter:
    aliases = tuple(json.loads(row.aliases))
    return AddedAdapter(
        ModelName(row.base), AdapterSpec(ModelName(row.name), row.source, aliases, row.version)
    )


def row_of(record: LengthSample | NodeMean | PoolErrors) -> Row:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def receipt_row(kept: KeptReceipt) -> Row:
    receipt = kept.receipt.without_text()
    return {
        "request_id": receipt.request_id,
        "task": receipt.task,
        "status": receipt.status,
        "met": receipt.met,
        "ended_at_s": kept.ended_at_s,
        "document": json.dumps(receipt.as_dict(), separators=(",", ":")),
        "tenant": receipt.tenant,
        "session": receipt.session,
    }


def audited(value: ApiKey | Tenant | AdapterSpec | str | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(shown_key(value) if isinstance(value, ApiKey) else asdict(value))


def key_row(key: ApiKey) -> Row:
    texts = {name: json.dumps(getattr(key, name)) for name in ("tasks", "models", "bounds")}
    return {**asdict(key), **texts}


def upsert(connection: Connection, table: Table, *, is_sum: bool = False) -> Any:
    """Insert rows; existing ones are replaced, or added to with `is_sum`."""
    return _upsert(connection.dialect.name, table, is_sum)


@cache  # to build a statement takes longer than to write a row
def _upsert(dialect_name: str, table: Table, is_sum: bool) -> Any:
    keys = [column.name for column in table.primary_key]
    dialect = sqlite if dialect_name == "sqlite" else postgresql
    statement = dialect.insert(table)
    changes = {
        c.name: c + statement.excluded[c.name] if is_sum else statement.excluded[c.name]
        for c in table.c
        if c.name not in keys
    }
    return statement.on_conflict_do_update(index_elements=keys, set_=changes)


def keep_newest(connection: Connection, table: Table, kept: int, per: Sequence[Any]) -> None:
    """Keep the `kept` rows with the highest ids for each value of `per`."""
    age = func.row_number().over(partition_by=per, order_by=table.c.id.desc()).label("age")
    ranked = select(table.c.id, age).subquery()
    old = select(ranked.c.id).where(ranked.c.age > kept)
    connection.execute(delete(table).where(table.c.id.in_(old)))


def drop_oldest(connection: Connection, column: Column[Any], first: object, most: int) -> None:
    """Delete up to `most` rows whose `column` is below `first`."""
    table = column.table
    names = list(table.primary_key.columns)
    old = select(*names).where(column < first).order_by(column).limit(most)
    connection.execute(delete(table).where(tuple_(*names).in_(old)))


def stages_json(graph: SuperGraph) -> str:
    return json.dumps([astuple(stage) for stage in graph.stages], separators=(",", ":"))


def stages_of_row(row: Any) -> FinishedStages:
    """Raise `InputError`, `TypeError` or `ValueError` for a damaged row."""
    graph = SuperGraph(
        tuple(
            SuperNode(tuple((source, tokens) for source, tokens in inputs), output, time_s)
            for inputs, output, time_s in json.loads(row.stages)
        )
    )
    DagHistory.of([graph])  # whether past runs can be made of it
    return FinishedStages(TaskName(row.task), graph)
