"""The store's writer when things go wrong: nothing is lost but what it says."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event
from store_kit import a_mean, a_sample, rows

from cato.core.administration import AddKey
from cato.core.estimates import PoolErrors
from cato.core.ids import PoolName
from cato.core.tenancy import ApiKey, Usage
from cato.core.usage_outbox import UsageParcel
from cato.store.errors import (
    StoreCorruptError,
    StoreError,
    StoreForeignError,
    StoreMissingError,
    StoreTooNewError,
    StoreUnavailableError,
)
from cato.store.records import Learnt, Limits
from cato.store.store import MetadataStore
from cato.store.writer import StoreWriter, WriterSettings

IMPATIENT = WriterSettings(
    gather_s=0.0, retry_s=0.01, max_retry_s=0.05, busy_timeout_s=0.02, prune_every_s=1e9
)
PATIENCE_S = 60.0

TOKENS = "SELECT output_tokens FROM length_samples ORDER BY id"


def ignore(_: MetadataStore) -> None:
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metadata.db"


@pytest.fixture
def begin() -> Iterator[Callable[..., StoreWriter]]:
    """Start writers that end with the test."""
    writers: list[StoreWriter] = []

    def start(
        path: Path | str,
        settings: WriterSettings = IMPATIENT,
        on_open: Callable[[MetadataStore], None] = ignore,
        limits: Limits | None = None,
    ) -> StoreWriter:
        writer = StoreWriter(path, on_open, settings, limits)
        writer.start()
        writers.append(writer)
        return writer

    yield start
    for writer in writers:
        writer.close()


def wait_until_degraded(writer: StoreWriter) -> str:
    """Why, once a write has failed."""
    for _ in range(int(PATIENCE_S / 0.01)):
        if not writer.state().is_ok:
            return writer.state().why
        assert not writer.flush(0.01), "it was written after all"
    raise AssertionError("the writer never noticed")


def tokens(path: Path) -> list[object]:
    return [n for (n,) in rows(path, TOKENS)]


# Patience


def test_a_locked_database_delays_records_and_loses_none(
    path: Path, begin: Callable[..., StoreWriter], caplog: pytest.LogCaptureFixture
) -> None:
    writer = begin(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with caplog.at_level(logging.INFO, "cato.store"):
        writer.put([a_sample(1)])
        assert "locked" in wait_until_degraded(writer)
        writer.put([a_sample(2)])
        assert writer.state().queued == 2
        other.execute("ROLLBACK")
        assert writer.flush(PATIENCE_S)
    assert writer.state().is_ok
    assert tokens(path) == [1, 2]
    said = [r.message for r in caplog.records]
    assert sum("locked; serving continues" in line for line in said) == 1, "once, not once a retry"
    assert said[-1].endswith("is open")
    other.close()


def test_a_full_queue_drops_the_oldest_and_counts_them(
    path: Path, begin: Callable[..., StoreWriter]
) -> None:
    writer = begin(path, WriterSettings(capacity=5, **_impatient()))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writer.put([a_sample(0)])
    wait_until_degraded(writer)
    writer.put([a_sample(n) for n in range(1, 21)])
    assert writer.state().dropped == 15
    other.execute("ROLLBACK")
    other.close()
    assert writer.flush(PATIENCE_S)
    assert tokens(path) == [0, 16, 17, 18, 19, 20]


def test_a_full_queue_drops_no_usage(path: Path, begin: Callable[..., StoreWriter]) -> None:
    writer = begin(path, WriterSettings(capacity=5, **_impatient()))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    used = Usage("2026-11-30", "a", "k", "t", "m", 1, 10, 0, 5)
    writer.put([a_sample(0)])
    wait_until_degraded(writer)
    for n in range(1, 21):
        writer.put([UsageParcel("ingress", n, (used,)), a_sample(n)])
    assert writer.kept_usage == {}
    other.execute("ROLLBACK")
    other.close()
    assert writer.flush(PATIENCE_S)
    assert rows(path, "SELECT requests, output_tokens FROM usage") == [(20, 100)]
    assert writer.kept_usage == {"ingress": 20}
    assert tokens(path) == [0, 16, 17, 18, 19, 20]


def test_a_full_disk_delays_records_and_loses_none(
    path: Path, begin: Callable[..., StoreWriter]
) -> None:
    connections: list[Any] = []

    def limit(connection: Any, _: object) -> None:
        connection.execute("PRAGMA max_page_count = 60")
        connections.append(connection)

    event.listen(Engine, "connect", limit)
    try:
        writer = begin(path)
        for n in range(40):
            writer.put([a_sample(n * 500 + i) for i in range(500)])
        assert "full" in wait_until_degraded(writer)
        kept_so_far = len(tokens(path))
        assert 0 < kept_so_far < 20_000
        for connection in connections:
            connection.execute("PRAGMA max_page_count = 1000000")
        assert writer.flush(PATIENCE_S)
    finally:
        event.remove(Engine, "connect", limit)
    assert writer.state().is_ok
    assert tokens(path) == list(range(20_000))


def test_a_store_that_cannot_be_opened_at_first_is_opened_later(
    tmp_path: Path, begin: Callable[..., StoreWriter]
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("in the way")
    opened: list[Learnt] = []
    writer = begin(folder / "metadata.db", on_open=lambda store: opened.append(store.learnt()))
    assert "its folder cannot be used" in writer.state().why
    with pytest.raises(StoreUnavailableError):
        writer.read(lambda store: store.learnt())
    writer.put([a_sample(1)])
    folder.unlink()
    assert writer.flush(PATIENCE_S)
    assert opened == [Learnt()], "once, before anything was written"
    assert writer.read(lambda store: store.learnt()).samples == (a_sample(1),)


def test_a_store_that_comes_late_is_opened_although_nothing_is_put(
    tmp_path: Path, begin: Callable[..., StoreWriter]
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("in the way")
    opened = threading.Event()
    begin(folder / "metadata.db", on_open=lambda _: opened.set())
    assert not opened.is_set()
    folder.unlink()
    assert opened.wait(PATIENCE_S)


def test_a_newer_schema_is_refused_by_name(path: Path, begin: Callable[..., StoreWriter]) -> None:
    MetadataStore.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    writer = begin(path)
    assert "its schema is version 9999" in writer.state().why
    with pytest.raises(StoreTooNewError):
        MetadataStore.open(path)


def test_no_message_holds_a_password(
    begin: Callable[..., StoreWriter], caplog: pytest.LogCaptureFixture
) -> None:
    writer = begin("postgresql://me:hush@127.0.0.1:many/cato")
    with pytest.raises(StoreError) as caught:
        writer.read(lambda store: store.learnt())
    assert "hush" not in f"{caught.value}{writer.state().why}{caplog.text}"
    assert "not a URL" in writer.state().why


def test_one_bad_record_costs_itself_only(path: Path, begin: Callable[..., StoreWriter]) -> None:
    writer = begin(path)
    writer.put([a_sample(1), a_sample(2**70), a_sample(3)])
    assert writer.flush(PATIENCE_S)
    assert tokens(path) == [1, 3]
    assert writer.state().dropped == 1
    assert writer.state().is_ok


def test_closing_writes_what_waits(path: Path) -> None:
    writer = StoreWriter(path, ignore, WriterSettings(gather_s=3600.0))
    writer.start()
    writer.put([a_sample(1)])
    writer.close(PATIENCE_S)
    assert tokens(path) == [1]


def test_tables_stay_bounded_while_writing(path: Path, begin: Callable[..., StoreWriter]) -> None:
    settings = WriterSettings(prune_every_s=0.0, **_impatient(but="prune_every_s"))
    writer = begin(path, settings, limits=Limits(samples_per_node=3))
    for n in range(20):
        writer.put([a_sample(n)])
    assert writer.flush(PATIENCE_S)
    assert tokens(path) == [17, 18, 19]


# Damage


def test_a_damaged_file_is_set_aside_and_a_new_one_begun(
    path: Path, begin: Callable[..., StoreWriter], caplog: pytest.LogCaptureFixture
) -> None:
    damaged = b"SQLite format 3\0" + b"this is no database " * 500
    path.write_bytes(damaged)
    writer = begin(path)
    writer.put([a_sample(1)])
    assert writer.flush(PATIENCE_S)
    assert tokens(path) == [1]
    (aside,) = path.parent.glob("metadata.db.corrupt-*Z")
    assert aside.read_bytes() == damaged
    assert f"was renamed to {aside.name} and a new one created" in caplog.text


@pytest.mark.parametrize("content", [b"a: 1\n", b"this is no database " * 500, b"S"])
def test_a_file_that_never_was_a_store_is_left_alone_and_serving_goes_on(
    path: Path, begin: Callable[..., StoreWriter], content: bytes
) -> None:
    path.write_bytes(content)
    writer = begin(path)
    writer.put([a_sample(1)])
    assert f"{path} is not a CATO metadata store" in writer.state().why
    with pytest.raises(StoreForeignError):
        MetadataStore.open(path, sets_aside=True)
    assert [(p.name, p.read_bytes()) for p in path.parent.iterdir()] == [(path.name, content)]
    path.unlink()
    assert writer.flush(PATIENCE_S)
    assert tokens(path) == [1]


def test_the_database_of_another_program_is_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE places (name)")
    connection.commit()
    connection.close()
    content = path.read_bytes()
    with pytest.raises(StoreForeignError, match="another program wrote this database"):
        MetadataStore.open(path, sets_aside=True)
    assert [(p.name, p.read_bytes()) for p in path.parent.iterdir()] == [(path.name, content)]


def test_a_missing_store_is_made_only_by_a_caller_that_creates(tmp_path: Path) -> None:
    path = tmp_path / "none" / "metadata.db"
    with pytest.raises(StoreMissingError, match=f"there is no metadata store at {path}"):
        MetadataStore.open(path, creates=False)
    assert list(tmp_path.iterdir()) == []
    MetadataStore.open(path).close()
    MetadataStore.open(path, creates=False).close()


def test_a_file_damaged_inside_is_found_when_it_is_opened(path: Path) -> None:
    store = MetadataStore.open(path)
    store.write([a_sample(n) for n in range(5_000)])
    store.close()
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 8192] = b"\xff" * 8192
    path.write_bytes(bytes(content))
    with pytest.raises(StoreCorruptError, match=r"it is damaged .*restore a copy"):
        MetadataStore.open(path)
    assert path.read_bytes() == content, "only a control plane sets it aside"
    store = MetadataStore.open(path, sets_aside=True)
    assert store.learnt() == Learnt()
    assert len(list(path.parent.glob("metadata.db.corrupt-*Z"))) == 1
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "INSERT INTO dag_runs (task, stages) VALUES ('t', '[[1]]')",
        "INSERT INTO dag_runs (task, stages) VALUES ('t', '[[[], null, null], [[], 1, 1.0]]')",
        "INSERT INTO length_samples VALUES (9, 't', 'n', 'm', 1, 0, 'stop', '[]')",
        "INSERT INTO length_samples VALUES (9, 't', 'n', 'm', 1, 'many', 'stop', '[]')",
        "INSERT INTO length_samples VALUES (9, 't', 'n', 'm', 1, 1, 'stop', 'none')",
        "INSERT INTO length_samples VALUES (9, 't', 'n', 'm', 1, 1, 'stop', '[NaN]')",
        "INSERT INTO node_means VALUES ('t', 'n', '', 'service_s', 9e999, 5)",
        "INSERT INTO node_means VALUES ('t', 'n', '', 'service_s', 1.0, 0)",
        "INSERT INTO pool_errors VALUES ('p', 0.0, 0.0, 9e999, 1.0, 5)",
        "INSERT INTO rollouts (name, document) VALUES ('r', '{}')",
    ],
)
def test_a_learnt_value_that_makes_no_sense_is_left_out_and_all_else_stays(
    path: Path, begin: Callable[..., StoreWriter], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    sound = [a_sample(7), a_mean(), PoolErrors(PoolName("p2"), 0.0, 0.0, 1.0, 1.0, 1)]
    with closing(MetadataStore.open(path)) as store:
        store.write(sound)
        store.administer(AddKey(ApiKey(id="k", digest="k", tenant="a", created_at_s=1.0)), "o")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(damage)
    opened: list[Learnt] = []
    writer = begin(path, on_open=lambda store: opened.append(store.learnt()))
    (learnt,) = opened
    assert [*learnt.samples, *learnt.means, *learnt.errors] == sound
    assert (learnt.runs, learnt.rollouts) == ((), ())
    assert caplog.text.count("skipping 1 unreadable") == 1
    assert writer.read(lambda store: len(store.api_keys())) == 1
    assert not list(path.parent.glob("metadata.db.corrupt-*Z"))


def test_a_file_damaged_in_use_is_set_aside_and_the_batch_goes_to_the_new_one(
    path: Path, begin: Callable[..., StoreWriter]
) -> None:
    writer = begin(path)
    writer.put([a_sample(1)])
    assert writer.flush(PATIENCE_S)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("UPDATE length_samples SET output_tokens = 2")  # the writer must read again
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    writer.put([a_sample(3)])
    assert writer.flush(PATIENCE_S)
    assert writer.state().is_ok
    assert tokens(path) == [3]
    assert len(list(path.parent.glob("metadata.db.corrupt-*Z"))) == 1
    other.close()


def test_a_file_that_was_moved_away_is_begun_anew_at_its_place(
    path: Path, begin: Callable[..., StoreWriter]
) -> None:
    writer = begin(path)
    writer.put([a_sample(1)])
    assert writer.flush(PATIENCE_S)
    path.rename(path.with_name("backup.db"))
    writer.put([a_sample(2)])
    assert writer.flush(PATIENCE_S)
    assert tokens(path) == [2]


# Processes

WRITE_AND_TELL = """
import sys
sys.path[:0] = {tests!r}
from store_kit import a_sample
from cato.store.writer import StoreWriter, WriterSettings
writer = StoreWriter({path!r}, lambda store: None, WriterSettings(gather_s=0.001, batch=37))
writer.start()
n = 0
while {limit} is None or n < {limit}:
    writer.put([a_sample(n + i + 1, task={task!r}) for i in range(10)])
    n += 10
    if n % 100 == 0:
        assert writer.flush(60.0)
        print(n, flush=True)
writer.close(60.0)
"""


def a_process(path: Path, task: str, limit: int | None) -> subprocess.Popen[str]:
    code = WRITE_AND_TELL.format(
        tests=[str(Path(__file__).parents[n]) for n in (1, 2)],
        path=str(path),
        task=task,
        limit=limit,
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_killed_process_loses_at_most_what_was_not_yet_written(path: Path) -> None:
    with a_process(path, "t", None) as process:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        process.kill()
        rest = process.stdout.read().split()
    told = max([500, *(int(n) for n in rest)])
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    store = MetadataStore.open(path)
    found = [s.output_tokens for s in store.learnt().samples]
    store.write([a_mean()])
    store.close()
    assert len(found) >= told
    assert found == list(range(1, len(found) + 1)), "in order, without a gap"


def test_two_processes_make_and_write_one_file_at_the_same_time(path: Path) -> None:
    processes = [a_process(path, task, 1_000) for task in ("a", "b")]
    for process in processes:
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        assert out.split()[-1] == "1000"
    for task in ("a", "b"):
        mine = rows(path, f"{TOKENS.replace('ORDER', f'WHERE task = {task!r} ORDER')}")
        assert mine == [(n,) for n in range(1, 1_001)]
    assert list(path.parent.glob("*.corrupt*")) == []


def _impatient(but: str = "") -> dict[str, Any]:
    fields = ("gather_s", "retry_s", "max_retry_s", "busy_timeout_s", "prune_every_s")
    return {name: getattr(IMPATIENT, name) for name in fields if name != but}
