"""The ingress's client of the Profiler: no usage is lost or counted twice, whatever is lost."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from store_kit import a_receipt

from cato.control import actors
from cato.control.profiler import Profiler
from cato.core.administration import AddKey
from cato.core.tenancy import ApiKey, Usage
from cato.serve import ray_records
from cato.serve.access.administration import with_secret
from cato.serve.access.control import AccessControl
from cato.serve.ray_pools import RayPools
from cato.serve.ray_records import RayRecords
from cato.store.errors import StoreUnavailableError
from cato.store.writer import StoreWriter, WriterSettings


class Handle:
    """A handle of the Profiler `now`; every call passes through `lose`, which may raise."""

    def __init__(self, now: Profiler) -> None:
        self.now = now
        self.lose: Callable[[str], None] = lambda _: None
        self.held: dict[str, asyncio.Event] = {}  # methods whose answers wait
        self.waiting: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *args: object) -> Awaitable[Any]:
        return asyncio.ensure_future(self._call(args))

    async def _call(self, args: tuple[object, ...]) -> Any:
        self._handle.lose(f"before {self._name}")
        answer = await getattr(self._handle.now, self._name)(*args)
        self._handle.lose(f"after {self._name}")
        if (may_come := self._handle.held.get(self._name)) is not None:
            self._handle.waiting.append(self._name)
            await may_come.wait()
        return answer


async def killed(profiler: Profiler, path: Path) -> None:
    """The Profiler is gone, and all that it had not written yet."""
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    await asyncio.to_thread(profiler._writer.close, 0.0)
    await asyncio.to_thread(profiler._writer._thread.join)
    lock.execute("ROLLBACK")
    lock.close()


async def test_usage_is_whole_after_lost_calls_lost_answers_and_killed_profilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, path = Random(1), tmp_path / "m.db"
    impatient = partial(StoreWriter, settings=WriterSettings(busy_timeout_s=0.2))
    monkeypatch.setattr("cato.control.profiler.StoreWriter", impatient)
    handle = Handle(Profiler(path))
    monkeypatch.setattr(actors, "get", lambda _: handle)
    monkeypatch.setattr(ray_records, "RECORD_WITHIN_S", 0.001)
    monkeypatch.setattr(ray_records, "REFRESH_S", 0.01)
    records = RayRecords(RayPools({}), {}, AccessControl())
    expected: dict[tuple[str, str], int] = {}

    def lose(when: str) -> None:
        if when.endswith("record") and random.random() < 0.3:
            raise ActorUnavailableError("the connection is lost", None)

    handle.lose = lose
    records.start()
    for n in range(1, 301):
        tenant, tokens = random.choice(("red", "blue", "")), random.randrange(10_000)
        used = Usage("2026-11-30", tenant, "k", "t", random.choice("mn"), 1, tokens, 0, 1)
        expected[tenant, used.model] = expected.get((tenant, used.model), 0) + tokens
        records.record(a_receipt(id=f"r{n}"), [used])
        await asyncio.sleep(0)
        if n % 10 == 0:
            await asyncio.sleep(0.01)
        if n % 100 == 0:
            await killed(handle.now, path)
            handle.now = Profiler(path)
    handle.lose = lambda _: None

    async def found() -> dict[tuple[str, str], int]:
        try:
            used = await records.usage(None)
        except StoreUnavailableError:  # the store is still being opened
            return {}
        return {(u.tenant, u.model): u.prompt_tokens for u in used}

    for _ in range(1_000):
        if await found() == expected:
            break
        await asyncio.sleep(0.01)
    assert await found() == expected
    await asyncio.sleep(0.1)  # nothing is sent again
    assert await found() == expected
    assert sum(u.requests for u in await records.usage(None)) == 300
    records._refresher.cancel()  # type: ignore[union-attr]
    await handle.now.close()


def a_new_key() -> tuple[str, ApiKey]:
    return with_secret(ApiKey("new", "", "red"), 0.0)


async def test_news_asked_for_before_a_change_made_here_does_not_undo_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle(Profiler(tmp_path / "m.db"))
    monkeypatch.setattr(actors, "get", lambda _: handle)
    monkeypatch.setattr(ray_records, "REFRESH_S", 1000.0)  # no other news comes
    handle.held["news"] = asyncio.Event()
    access = AccessControl()
    records = RayRecords(RayPools({}), {}, access)
    records.start()
    while not handle.waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)
    secret, key = a_new_key()
    await records.administer(AddKey(key), "ops", None)
    assert access.caller(secret, is_local=False).tenant == "red"
    handle.held.pop("news").set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert access.caller(secret, is_local=False).tenant == "red"
    assert records._refresher is not None
    records._refresher.cancel()
    await handle.now.close()


async def test_a_change_that_was_made_is_told_though_the_profiler_is_lost_right_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle(Profiler(tmp_path / "m.db"))
    records = RayRecords(RayPools({}), {}, AccessControl())
    records._profiler = handle

    def lose(when: str) -> None:
        if when == "before access":
            raise ActorUnavailableError("the connection is lost", None)

    handle.lose = lose
    _, key = a_new_key()
    assert await records.administer(AddKey(key), "ops", None) == key
    await handle.now.close()


async def test_a_store_whose_folder_is_closed_does_not_keep_the_keys_unknown_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "closed" / "m.db").parent.mkdir()
    handle = Handle(Profiler(path))
    exists, asked = Path.exists, list[Path]()

    def found(file: Path) -> bool:
        if file == path:  # this process, unlike the test's, may not look into the folder
            asked.append(file)
            raise PermissionError(13, "Permission denied", str(file))
        return exists(file)

    def none(_: str) -> Handle:
        raise ValueError("there is no profiler yet")

    monkeypatch.setattr(ray_records, "REFRESH_S", 0.01)
    monkeypatch.setattr(ray_records.ray_private, "is_on_head_node", lambda: True)
    monkeypatch.setattr(RayPools, "deployed_args", {"store": str(path)})
    monkeypatch.setattr(Path, "exists", found)
    monkeypatch.setattr(actors, "get", none)
    access = AccessControl()
    records = RayRecords(RayPools({}), {}, access)
    records.start()
    async with asyncio.timeout(10):
        while not asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        monkeypatch.setattr(actors, "get", lambda _: handle)
        while access.why_not_ready():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert records._refresher is not None
    records._refresher.cancel()
    await handle.now.close()


async def test_a_receipt_asked_for_while_the_profiler_is_being_restarted_may_come_later(
    tmp_path: Path,
) -> None:
    def lose(when: str) -> None:
        if when == "before receipt":
            raise ActorUnavailableError("the actor is being restarted", None)

    handle = Handle(Profiler(tmp_path / "m.db"))
    records = RayRecords(RayPools({}), {}, AccessControl())
    with pytest.raises(StoreUnavailableError, match="no profiler yet"):
        await records.receipt("r", None)
    records._profiler, handle.lose = handle, lose
    records.record(a_receipt(id="r"), [])
    with pytest.raises(StoreUnavailableError, match="being restarted"):
        await records.receipt("r", None)
    handle.lose = lambda _: None
    found = await records.receipt("r", None)
    assert found is not None
    assert found["request_id"] == "r"
    assert await records.receipt("unknown", None) is None
    await handle.now.close()


async def test_the_fleet_is_measured_while_the_profiler_is_being_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: str) -> Handle:
        raise ValueError("no such actor")

    def lose(when: str) -> None:
        if when == "before metrics":
            raise ActorUnavailableError("the actor is being restarted", None)

    handle = Handle(Profiler(tmp_path / "m.db"))
    monkeypatch.setattr(actors, "get", none)
    records = RayRecords(RayPools({}), {}, AccessControl())
    records._profiler = handle
    with_runs = (await records.metrics()).decode()
    handle.lose = lose
    without = (await records.metrics()).decode()
    silent = "cato_control_actors_silent"
    assert f"\n{silent} 2.0\n" in with_runs
    assert f"\n{silent} 3.0\n" in without
    assert "cato_store_up" in with_runs
    assert "cato_store_up" not in without
    await handle.now.close()
