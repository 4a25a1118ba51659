"""A deployment that has had an API key serves nobody without one until an operator says so."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner, Result

from cato.cli import app as cli
from cato.config.places import RUN_DIR_VARIABLE, STATE_VARIABLE, run_dir
from cato.control import access_book
from cato.control.profiler import Profiler
from cato.core.administration import AddKey, DeleteKey, OpenWithoutKeys, RotateKey
from cato.core.errors import AccessError, ConfigError
from cato.core.tenancy import Access, ApiKey, KeyHistory
from cato.serve.access.control import AccessControl
from cato.serve.access.early import stored_access
from cato.serve.access.keys import parts
from cato.store import keyed
from cato.store.database import WRITES
from cato.store.errors import StoreError
from cato.store.location import store_url
from cato.store.store import MetadataStore


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv(STATE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store" / "metadata.db"


def keys(store: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["keys", *words, "--store", str(store)])


def make_key(store: Path) -> str:
    result = keys(store, "create", "--tenant", "a")
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def damaged(store: Path) -> None:
    for file in store.parent.glob(f"{store.name}-*"):
        file.unlink()
    store.write_bytes(b"SQLite format 3\0" + b"no database" * 1000)


def deleted(store: Path) -> None:
    for file in store.parent.glob(f"{store.name}*"):
        if file.suffix != ".keyed":
            file.unlink()


def folder_deleted(store: Path) -> None:
    shutil.rmtree(store.parent)


LOSSES = [damaged, deleted, folder_deleted]


def is_served(control: AccessControl, key: str = "") -> bool:
    try:
        control.caller(key, is_local=True)
    except AccessError:
        return False
    return True


async def told(store: Path) -> Access:
    """What a Profiler that has just started says."""
    profiler = Profiler(store)
    access = await profiler.access()
    await profiler.close()
    assert access is not None
    return access


@pytest.mark.parametrize("lost", LOSSES)
async def test_after_a_restart_without_its_store_nobody_is_served_without_a_key(
    store: Path, lost: object
) -> None:
    make_key(store)
    assert callable(lost)
    lost(store)
    control = AccessControl()
    early = await stored_access({"store": str(store)}, is_on_head_node=True)
    assert early is None or early.needs_key
    control.learn(await told(store))
    with pytest.raises(AccessError) as refused:
        control.caller("", is_local=True)
    assert (refused.value.status, refused.value.code) == (503, "keys_lost")
    new = make_key(store)
    control.learn(await told(store))
    assert is_served(control, new)
    assert not is_served(control)


@pytest.mark.parametrize("lost", LOSSES)
async def test_a_running_deployment_whose_files_are_all_lost_stays_closed(
    store: Path, state: Path, lost: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_book, "ACCESS_AGE_S", 0.0)
    make_key(store)
    profiler, control = Profiler(store), AccessControl()
    control.learn(await profiler.access())
    assert callable(lost)
    lost(store)
    shutil.rmtree(state)
    # Opened again, as the writer does when it sees the loss.
    profiler._writer.close()
    profiler._writer = profiler._access._writer = Profiler(store)._writer
    access = await profiler.access()
    assert access is not None
    assert replace(access, month="") == Access(history=KeyHistory.KEYED)
    control.learn(access)
    assert not is_served(control)
    assert (await told(store)).needs_key  # it was written again
    control.learn(Access())  # by a Profiler that knows nothing
    assert not is_served(control)
    await profiler.close()


async def test_a_store_that_was_never_readable_is_closed_where_there_were_keys(
    store: Path,
) -> None:
    make_key(store)
    for file in store.parent.glob(f"{store.name}*"):
        file.unlink()
    store.mkdir()
    assert (await told(store)).needs_key


async def test_keys_of_an_earlier_version_are_remembered_when_they_are_read(
    store: Path, state: Path
) -> None:
    make_key(store)
    store.with_name("metadata.db.keyed").unlink()
    shutil.rmtree(state)
    opened = MetadataStore.open(store)
    assert opened.access("2026-11").needs_key
    opened.close()
    folder_deleted(store)
    assert (await told(store)).needs_key


async def test_a_deployment_without_keys_that_loses_its_store_serves_this_machine(
    store: Path,
) -> None:
    MetadataStore.open(store).close()
    folder_deleted(store)
    control = AccessControl()
    control.learn(await told(store))
    assert is_served(control)


async def test_revoking_and_deleting_the_last_key_opens_nothing_but_open_does(
    store: Path,
) -> None:
    control = AccessControl()
    found = parts(make_key(store))
    assert found is not None
    id = found[0]
    control.learn(await told(store))
    assert "revoke" in keys(store, "delete", id).stderr
    assert "revoke" in keys(store, "open").stderr
    control.learn(await told(store))
    assert not is_served(control)
    revoked = keys(store, "revoke", id)
    assert "every request is refused" in revoked.stderr
    assert "cato keys open" in revoked.stderr
    control.learn(await told(store))
    assert not is_served(control)
    assert keys(store, "delete", id).exit_code == 0
    access = await told(store)
    assert access.keys == ()
    control.learn(access)
    assert not is_served(control)
    assert keys(store, "open").exit_code == 0
    control.learn(await told(store))
    assert is_served(control)
    make_key(store)
    control.learn(await told(store))
    assert not is_served(control)


# A change that fails


@contextmanager
def full_disk(store: MetadataStore) -> Iterator[None]:
    """No change can be committed meanwhile."""

    def fail(connection: Connection) -> None:
        if connection.get_execution_options().keys() & WRITES.keys():
            raise OperationalError("COMMIT", {}, sqlite3.OperationalError("disk is full"))

    event.listen(store._engine, "commit", fail)
    try:
        yield
    finally:
        event.remove(store._engine, "commit", fail)


def a_key(id: str = "k") -> ApiKey:
    return ApiKey(id=id, digest=id, tenant="a", created_at_s=1.0)


@pytest.mark.parametrize("before", [KeyHistory.NEVER, KeyHistory.OPENED])
async def test_a_first_key_that_could_not_be_stored_shuts_nobody_out(
    store: Path, before: KeyHistory
) -> None:
    opened = MetadataStore.open(store)
    if before is KeyHistory.OPENED:
        opened.administer(OpenWithoutKeys(), "operator")
    with full_disk(opened), pytest.raises(StoreError):
        opened.administer(AddKey(a_key()), "operator")
    opened.close()
    access = await told(store)
    assert (access.keys, access.history) == ((), before)
    control = AccessControl()
    control.learn(access)
    assert is_served(control)
    make_key(store)
    control.learn(await told(store))
    assert not is_served(control)


async def test_a_further_key_that_could_not_be_stored_opens_nothing(store: Path) -> None:
    id = parts(make_key(store))
    assert id is not None
    opened = MetadataStore.open(store)
    opened.administer(DeleteKey(id[0]), "operator")
    with full_disk(opened), pytest.raises(StoreError):
        opened.administer(AddKey(a_key()), "operator")
    opened.close()
    assert (await told(store)).needs_key


async def test_a_key_of_another_process_keeps_the_mark_of_one_that_failed(store: Path) -> None:
    opened, other = MetadataStore.open(store), MetadataStore.open(store)

    def add(*_: object) -> None:
        other.administer(AddKey(a_key("other")), "operator")

    event.listen(opened._engine, "checkin", add, once=True)  # after the rollback
    with full_disk(opened), pytest.raises(StoreError):
        opened.administer(AddKey(a_key()), "operator")
    for one in (opened, other):
        one.close()
    assert keyed.history(store_url(store)) is KeyHistory.KEYED


def test_opening_just_after_a_profiler_read_the_keys_still_opens(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, profiler = MetadataStore.open(store), MetadataStore.open(store)
    opened.administer(AddKey(replace(a_key(), expires_at_s=2.0)), "operator")
    read = profiler.api_keys

    def read_and_then_open() -> tuple[ApiKey, ...]:
        keys = read()
        opened.administer(OpenWithoutKeys(), "operator")
        return keys

    monkeypatch.setattr(profiler, "api_keys", read_and_then_open)
    assert not profiler.access("2026-11").needs_key
    assert keyed.history(store_url(store)) is KeyHistory.OPENED
    for one in (opened, profiler):
        one.close()


def test_opening_while_a_profiler_reads_the_keys_still_opens(store: Path) -> None:
    opened, profiler = MetadataStore.open(store), MetadataStore.open(store)
    opened.administer(AddKey(replace(a_key(), expires_at_s=2.0)), "operator")
    reading = Thread(target=profiler.access, args=("2026-11",))

    def read_before_the_commit(_: Connection) -> None:
        if not reading.is_alive() and reading.ident is None:
            reading.start()
            reading.join(0.2)  # it waits for the end of the change

    event.listen(opened._engine, "commit", read_before_the_commit)
    opened.administer(OpenWithoutKeys(), "operator")
    reading.join()
    assert keyed.history(store_url(store)) is KeyHistory.OPENED
    for one in (opened, profiler):
        one.close()


def test_an_opening_that_could_not_be_stored_leaves_the_keys_in_force(store: Path) -> None:
    opened = MetadataStore.open(store)
    opened.administer(AddKey(a_key()), "operator")
    with full_disk(opened), pytest.raises(StoreError):
        opened.administer(OpenWithoutKeys(), "operator")
    assert opened.access("2026-11").needs_key
    assert keyed.history(store_url(store)) is KeyHistory.KEYED
    opened.close()


async def test_replacing_a_key_that_does_not_exist_shuts_nobody_out(store: Path) -> None:
    opened = MetadataStore.open(store)
    assert opened.administer(RotateKey("none", a_key(), 2.0), "operator") is None
    opened.close()
    assert (await told(store)).history is KeyHistory.NEVER


def test_a_mark_that_could_not_be_written_leaves_no_file(
    store: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MetadataStore.open(store).close()
    there = {file for folder in (store.parent, state) for file in folder.rglob("*")}

    def write(path: Path, _: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "no space is left")

    monkeypatch.setattr(Path, "write_text", write)
    assert not keyed.remember(store_url(store), KeyHistory.KEYED)
    left = {file for folder in (store.parent, state) for file in folder.rglob("*")}
    assert {file for file in left - there if file.is_file()} == set()


def test_a_deployment_is_not_said_to_be_open_while_one_file_still_says_keyed(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store_url(store)
    assert keyed.remember(url, KeyHistory.KEYED)
    write_text = Path.write_text

    def write(path: Path, text: str) -> int:
        if path.parent == store.parent:
            raise OSError(errno.ENOSPC, "no space is left")
        return write_text(path, text)

    monkeypatch.setattr(Path, "write_text", write)
    assert not keyed.remember(url, KeyHistory.OPENED)
    assert keyed.history(url) is KeyHistory.KEYED


# The run folder


def test_the_run_folder_is_made_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "run"))
    assert run_dir().stat().st_mode & 0o777 == 0o700


def test_a_run_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write"):
        run_dir()


def test_a_run_folder_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        monkeypatch.setenv(RUN_DIR_VARIABLE, str(folder))
        with pytest.raises(ConfigError, match="cannot be used"):
            run_dir()


def test_a_run_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="another user"):
        run_dir()
