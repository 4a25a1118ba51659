"""What is put into the metadata store comes out of it again, and not more than was agreed."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from kits.builders import a_parcel
from sqlalchemy import Connection, create_engine, event, insert, literal, make_url, select, update
from sqlalchemy.exc import OperationalError
from store_kit import NODE, TASK, a_mean, a_receipt, a_sample, an_execution, facts, rows

from cato.config.places import RUN_DIR_VARIABLE, STATE_VARIABLE
from cato.core.administration import SetTenant
from cato.core.arrival_rates import UsualArrivals
from cato.core.estimates import PoolErrors
from cato.core.ids import ModelName, PoolName, TaskName
from cato.core.receipt import WITHHELD
from cato.core.tenancy import CardTime, Tenant, Usage
from cato.core.topology import AdapterSpec
from cato.core.usage_outbox import UsageParcel
from cato.estimators.dag_match import FROM_USER, SuperGraph, SuperNode
from cato.estimators.stages import FinishedStages
from cato.profiles.schema import DecodeSection, PrefillSection, ProfileFile, Provenance
from cato.store.database import WRITES
from cato.store.errors import (
    StoreError,
    StoreRecordError,
    StoreTooNewError,
    StoreUnavailableError,
)
from cato.store.location import STORE_VARIABLE, default_location, store_url
from cato.store.records import AddedAdapter, KeptReceipt, Learnt, Limits
from cato.store.schema import audit, metadata, usage_senders
from cato.store.store import MetadataStore

POSTGRES_VARIABLE = "CATO_TEST_POSTGRES"
"""A `postgresql://` URL of a server where the tests may make databases; without it they skip."""

STORE_OF_0011 = Path(__file__).with_name("store_of_0011.sql")

ERRORS = PoolErrors(PoolName("p"), 0.1, 0.2, 1.0, 2.0, 7)
STAGES = FinishedStages(
    TASK,
    SuperGraph((SuperNode(((FROM_USER, 100),), 20, 1.5), SuperNode(((FROM_USER, 30),), 40, 0.5))),
)


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty place for a store, on each kind of database."""
    if request.param == "sqlite":
        yield str(tmp_path / "metadata.db")
        return
    server = os.environ.get(POSTGRES_VARIABLE)
    if server is None:
        pytest.skip(f"{POSTGRES_VARIABLE} names no server")
    pytest.importorskip("psycopg")
    name = f"cato_test_{uuid.uuid4().hex[:12]}"
    admin = create_engine(store_url(server), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
        admin.dispose()


@pytest.fixture
def store(location: str) -> Iterator[MetadataStore]:
    store = MetadataStore.open(location)
    yield store
    store.close()


def a_profile_file(*, max_running: int = 8) -> ProfileFile:
    return ProfileFile(
        model="org/m",
        accelerator="cpu",
        engine="vllm",
        prefill=PrefillSection(base_s=0.1),
        decode=DecodeSection(base_s=0.01),
        kv_capacity_tokens=1000,
        max_running=max_running,
        context_tokens=2048,
        load_s=3.0,
        provenance=Provenance(command="cato profile FILE", samples=12),
    )


def kept(id: str, ended_at_s: float) -> KeptReceipt:
    return KeptReceipt(a_receipt(id=id), ended_at_s)


# What goes in comes out


def test_what_was_learnt_is_there_after_a_restart(location: str) -> None:
    store = MetadataStore.open(location)
    told = a_sample(10, features=(4.6052, 0.0, -1.0))
    store.write([told, a_mean(1.5), ERRORS, STAGES])
    store.close()
    store = MetadataStore.open(location)
    assert store.learnt() == Learnt((a_mean(1.5),), (ERRORS,), (told,), (STAGES,))
    store.close()


def test_usual_arrivals_are_kept_by_pool_the_newest_of_each(store: MetadataStore) -> None:
    first, other = (UsualArrivals(ModelName(m), True, 18, 2.5, 3) for m in ("a", "b"))
    store.save_arrivals(PoolName("cards"), [first, other])
    newer = replace(first, arrivals=4.0, days=4)
    store.save_arrivals(PoolName("cards"), [newer])
    store.save_arrivals(PoolName("empty"), [])
    assert store.arrivals_of(PoolName("cards")) == (newer, other)
    assert store.arrivals_of(PoolName("empty")) == ()


def test_samples_come_back_in_the_order_of_writing(store: MetadataStore) -> None:
    store.write([a_sample(n) for n in (5, 3)])
    store.write([a_sample(n) for n in (4, 9)])
    assert [s.output_tokens for s in store.learnt().samples] == [5, 3, 4, 9]


def test_a_mean_is_replaced_by_its_newer_value(store: MetadataStore) -> None:
    store.write([a_mean(1.0), a_mean(2.0, node="other")])
    store.write([a_mean(3.0, samples=2), a_mean(4.0, samples=3)])
    assert {(m.node, m.value, m.samples) for m in store.learnt().means} == {
        (NODE, 4.0, 3),
        ("other", 2.0, 1),
    }


def test_a_receipt_comes_back_as_plain_values_and_the_newer_of_one_id_wins(
    store: MetadataStore,
) -> None:
    receipt = a_receipt(an_execution(llm=facts(slack_s=float("inf"))), id="a")
    store.write([KeptReceipt(a_receipt(id="a", met=False), 1.0), KeptReceipt(receipt, 2.0)])
    found = store.receipt("a", None)
    assert found is not None
    assert found["met"] is True
    (node,) = found["nodes"]  # type: ignore[misc]
    assert node["llm"]["slack_s"] == float("inf")
    assert store.receipt("b", None) is None


def test_a_profile_comes_back_with_its_provenance_and_the_newest_counts(
    store: MetadataStore,
) -> None:
    for max_running in (4, 8, 16):
        store.save_profile(a_profile_file(max_running=max_running), Limits(documents_per_profile=2))
    assert store.profiles() == {"org--m@cpu": a_profile_file(max_running=16)}


def test_free_text_of_a_receipt_is_withheld(store: MetadataStore) -> None:
    node = an_execution(llm=facts(), status="failed", problem="cannot parse 'my secret'")
    receipt = a_receipt(node, id="a", problem="node 'x': my secret", notes=["x: my secret", "y"])
    store.write([KeptReceipt(receipt, 1.0)])
    found = store.receipt("a", None)
    assert found is not None
    assert "secret" not in str(found)
    assert found["problem"] == WITHHELD
    assert found["notes"] == [WITHHELD]


# All or nothing


def test_a_batch_with_a_record_that_does_not_fit_leaves_nothing_behind(
    store: MetadataStore,
) -> None:
    with pytest.raises(StoreRecordError):
        store.write([a_sample(1), a_sample(2**70)])
    assert store.learnt() == Learnt()


# Bounded


def test_only_the_newest_samples_runs_and_receipts_are_kept(store: MetadataStore) -> None:
    store.write([a_sample(n, task=task) for n in range(6) for task in ("a", "b")])
    store.write([FinishedStages(TaskName(t), STAGES.graph) for t in ("a", "b") for _ in range(4)])
    store.write([kept(f"r{n}", 100.0 + n) for n in range(5)])
    store.prune(Limits(receipts=3, samples_per_node=2, runs_per_task=3), now_s=105.0)
    learnt = store.learnt()
    assert [(s.task, s.output_tokens) for s in learnt.samples] == [
        ("a", 4),
        ("b", 4),
        ("a", 5),
        ("b", 5),
    ]
    assert [run.task for run in learnt.runs] == ["a"] * 3 + ["b"] * 3
    assert [n for n in range(5) if store.receipt(f"r{n}", None) is not None] == [2, 3, 4]


def test_samples_of_names_that_are_gone_make_room_for_newer_ones(store: MetadataStore) -> None:
    for task in ("gone", "b", "c"):
        store.write([a_sample(n, task=task) for n in (1, 2, 3)])
    store.prune(Limits(samples_per_node=3, samples=5), now_s=0.0)
    found = [(s.task, s.output_tokens) for s in store.learnt().samples]
    assert found == [("b", 2), ("b", 3), ("c", 1), ("c", 2), ("c", 3)]


def test_old_receipts_go_however_few_there_are(store: MetadataStore) -> None:
    store.write([kept("old", 10.0), kept("new", 50.0)])
    store.prune(Limits(receipt_age_s=60.0), now_s=100.0)
    assert store.receipt("old", None) is None
    assert store.receipt("new", None) is not None


def test_old_usage_goes_in_small_steps_once_its_days_are_known(store: MetadataStore) -> None:
    for day in ("2025-10-25", "2025-10-26", "2025-10-27", "2026-11-30"):
        used, held = Usage(day, "a", "k", "t", "m", 1, 10), CardTime(day, "m", 60.0)
        store.write([a_parcel(used, held=(held,))])
    now_s = datetime(2026, 11, 30, tzinfo=UTC).timestamp()
    store.prune(Limits(), now_s)
    assert len(store.usage(None)) == len(store.card_time()) == 4
    limits = Limits(usage_days=400, old_rows=1)
    store.prune(limits, now_s)
    assert [u.day for u in store.usage(None)] == ["2025-10-26", "2025-10-27", "2026-11-30"]
    assert store.access("2025-10").spent_tokens == {"a": 30}
    for _ in range(3):
        store.prune(replace(limits, usage_days=100), now_s)
    assert store.access("2025-10").spent_tokens == {}
    assert [u.day for u in store.usage(None)] == ["2026-11-30"]
    assert [held.day for held in store.card_time()] == ["2026-11-30"]
    assert store.access("2026-11").spent_tokens == {"a": 10}


def test_the_audit_log_is_kept_for_its_days_and_a_year_whatever_they_are(location: str) -> None:
    now_s = time.time()
    with closing(MetadataStore.open(location)) as store:
        for tenant in ("old", "middle", "new"):
            store.administer(SetTenant(Tenant(tenant)), "test")
        with store._transaction() as connection:
            for entry, days in ((1, 1_200), (2, 800)):
                at_s = now_s - days * 86_400.0
                copied = select(literal(entry + 10), literal(at_s), *audit.c[2:])
                found = copied.where(audit.c.id == entry)
                connection.execute(insert(audit).from_select(list(audit.c), found))
        store.prune(Limits(audit_days=1_100), now_s)
        assert sorted(e.id for e in store.audit()) == [1, 2, 3, 12]
        with pytest.raises(StoreError, match="append-only"):
            store.prune(Limits(audit_days=0), now_s + 1.0)
        with pytest.raises(StoreError, match="append-only"), store._transaction() as connection:
            connection.execute(update(audit).values(who="nobody"))
        assert sorted(e.id for e in store.audit()) == [1, 2, 3, 12]


# Schema


def test_the_migrations_make_the_tables_that_the_code_uses(location: str) -> None:
    MetadataStore.open(location).close()
    engine = create_engine(store_url(location))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_a_store_of_the_first_release_opens_with_all_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    connection = sqlite3.connect(path)
    connection.executescript(STORE_OF_0011.read_text(encoding="utf-8"))
    for day in ("2026-10-31", "2026-11-01", "2026-11-30"):
        day_of_usage = (day, "a", "k", "t", "m", 1, 10, 2, 5)
        connection.execute(f"INSERT INTO usage VALUES {day_of_usage}")
    connection.commit()
    connection.close()
    with closing(MetadataStore.open(path)) as store:
        assert store.learnt() == Learnt((a_mean(1.5),), (ERRORS,), (a_sample(),), (STAGES,))
        receipt = store.receipt("req", None)
        assert receipt is not None
        assert receipt["status"] == "done"
        assert [k.tenant for k in store.api_keys()] == ["blue"]
        assert [a.adapter.source for a in store.adapters()] == ["/lora/a"]
        assert [e.action for e in store.audit()] == ["adapter.add", "key.create", "tenant.limit"]
        assert store.access("2026-11").spent_tokens == {"a": 30}
        store.write([a_parcel(Usage("2026-11-30", "a", "k", "t", "m", 1, 4, 0, 3))])
        assert store.access("2026-11").spent_tokens == {"a": 37}
        store.write([a_sample(11)])
        assert len(store.learnt().samples) == 2
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        rows(path, "DELETE FROM audit RETURNING id")
    tables = "SELECT type, name, tbl_name FROM sqlite_master WHERE sql IS NOT NULL ORDER BY 1, 2"
    with closing(MetadataStore.open(tmp_path / "fresh.db")):
        assert rows(path, tables) == rows(tmp_path / "fresh.db", tables)


def test_a_newer_schema_is_refused_and_left_alone(location: str) -> None:
    store = MetadataStore.open(location)
    store.write([a_sample()])
    store.close()
    engine = create_engine(store_url(location))
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreTooNewError, match=r"version 9999.*supports up to 0016.*name another"):
        MetadataStore.open(location)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM length_samples").scalar() == 1
    engine.dispose()


# SQLite


def test_the_file_is_for_its_owner_in_wal_mode_with_foreign_keys(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metadata.db"
    store = MetadataStore.open(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert rows(path, "PRAGMA journal_mode") == [("wal",)]
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    store.close()


# Adapters that were added to a base


def test_adapters_are_there_after_a_restart_until_they_are_removed(tmp_path: Path) -> None:
    base = ModelName("base")
    first = AdapterSpec(ModelName("a"), "/lora/a", ("alias",), version=5)
    other = AdapterSpec(ModelName("b"), "org/b", version=6)
    again = AdapterSpec(ModelName("a"), "/lora/new", version=7)
    with closing(MetadataStore.open(tmp_path / "m.db")) as store:
        assert store.adapters() == ()
        store.add_adapter(base, first)
        assert store.adapters() == (AddedAdapter(base, first),)
        store.add_adapter(base, other)
    with closing(MetadataStore.open(tmp_path / "m.db")) as store:
        assert [a.adapter for a in store.adapters()] == [first, other]
        store.add_adapter(base, again)
        assert [a.adapter for a in store.adapters()] == [other, again]
        assert store.remove_adapter(ModelName("a"))
        assert not store.remove_adapter(ModelName("a"))
        assert [a.adapter for a in store.adapters()] == [other]


# Where


def test_the_default_is_a_file_in_the_state_folder_unless_the_environment_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, state = tmp_path / "run", tmp_path / "state"
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(run))
    monkeypatch.setenv(STATE_VARIABLE, str(state))
    assert default_location() == str(state / "cato" / "metadata.db")
    (run / "metadata.db").write_bytes(b"")  # of an earlier version: its keys count
    assert default_location() == str(run / "metadata.db")
    (state / "cato").mkdir(parents=True)
    (state / "cato" / "metadata.db").write_bytes(b"")
    assert default_location() == str(state / "cato" / "metadata.db")
    monkeypatch.setenv(STORE_VARIABLE, "postgresql://db/cato")
    assert default_location() == "postgresql://db/cato"


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("sqlite://", "keeps nothing"),
        ("sqlite:///:memory:", "keeps nothing"),
        ("mysql://me:hush@db/cato", "mysql is not supported"),
        ("postgresql://me:hush@db:many/cato", "not a URL"),
    ],
)
def test_a_wrong_location_is_refused_with_what_to_do_and_without_its_password(
    location: str, problem: str
) -> None:
    with pytest.raises(StoreError, match=problem) as caught:
        MetadataStore.open(location)
    assert "name a file, or a URL" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_turns_of_a_session_are_found_oldest_first_and_by_tenant(tmp_path: Path) -> None:
    store = MetadataStore.open(tmp_path / "m.db")
    turns = [
        KeptReceipt(replace(a_receipt(id=id), tenant=who, session="s", turn=n), float(n))
        for id, who, n in (("b", "x", 2), ("a", "x", 1), ("c", "y", 3))
    ]
    store.write([*turns, KeptReceipt(a_receipt(id="d"), 4.0)])
    assert [t.request_id for t in store.turns("s", None)] == ["a", "b", "c"]
    assert [(t.request_id, t.turn) for t in store.turns("s", "x")] == [("a", 1), ("b", 2)]
    assert store.turns("none", None) == ()
    store.close()


def test_a_call_waits_only_its_time_for_a_program_that_holds_the_tables(location: str) -> None:
    store = MetadataStore.open(location, busy_timeout_s=0.3)
    other = create_engine(store_url(location))
    with other.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SET idle_in_transaction_session_timeout = '5s'")
            connection.exec_driver_sql("LOCK TABLE usage")
        else:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="lock"):
            store.write([a_parcel(Usage("2026-11-30", "a", "k", "t", "m", 1))])
    assert store.usage(None) == ()
    store.write([a_parcel(Usage("2026-11-30", "a", "k", "t", "m", 1))])
    assert [u.requests for u in store.usage(None)] == [1]
    store.close()
    other.dispose()


def test_a_parcel_of_usage_is_counted_once_however_often_it_comes(store: MetadataStore) -> None:
    def parcel(number: int, tokens: int, sender: str = "one") -> UsageParcel:
        used = Usage("2026-11-30", "a", "k", "t", "m", 1, tokens, 0, 0)
        return UsageParcel(sender, number, (used, replace(used, key="other")))

    store.write([parcel(1, 1), parcel(2, 2), parcel(1, 1)])
    store.write([parcel(1, 1), parcel(2, 2), parcel(3, 4), parcel(1, 8, "two")])
    store.write([parcel(3, 4)])
    assert store.access("2026-11").spent_tokens == {"a": 30}
    assert [(u.key, u.requests, u.prompt_tokens) for u in store.usage(None)] == [
        ("k", 4, 15), ("other", 4, 15),
    ]  # fmt: skip


def test_senders_of_usage_are_forgotten_when_they_are_long_gone(location: str) -> None:
    with closing(MetadataStore.open(location)) as store:
        for sender, day in (("old", "2026-10-01"), ("new", "2026-11-29")):
            store.write([UsageParcel(sender, 1, (Usage(day, "a", "k", "t", "m", 1),))])
        store.prune(Limits(), datetime(2026, 11, 30, tzinfo=UTC).timestamp())
        with store._reading() as connection:
            assert connection.execute(select(usage_senders.c.sender)).scalars().all() == ["new"]
        assert len(store.usage(None)) == 2


def test_usage_is_counted_once_when_the_answer_to_a_commit_is_lost(location: str) -> None:
    store = MetadataStore.open(location)
    parcel = UsageParcel("one", 1, (Usage("2026-11-30", "a", "k", "t", "m", 1, 10, 0, 5),))

    def lost_after_commit(connection: Connection) -> None:
        if connection.get_execution_options().keys() & WRITES.keys():
            connection.connection.commit()
            raise OperationalError("COMMIT", {}, Exception("the connection is lost"))

    event.listen(store._engine, "commit", lost_after_commit)
    with pytest.raises(StoreUnavailableError):
        store.write([parcel])
    event.remove(store._engine, "commit", lost_after_commit)
    store.write([parcel])
    assert [u.requests for u in store.usage(None)] == [1]
    store.close()
