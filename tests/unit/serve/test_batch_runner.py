"""The batch runner without the HTTP API: retries, a folder that fails, and odd files in it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from ingress_kit import until
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from test_batches import MAX_LINE_BYTES, a_line, a_room, at_work, jsonl

from cato.serve.access.caller import ANYBODY
from cato.serve.batches import runner
from cato.serve.batches.folder import LEAST_BYTES, Batch, BatchRoom, TenantFolder, new_id, tenants
from cato.serve.batches.lines import Line, lines_of
from cato.serve.batches.runner import BatchRunner


class Answers:
    """An API that answers lines with `statuses`, then with 200; `asked` are their prompts."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = iter(statuses)
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).json()
        self.asked.append(body["prompt"])
        await JSONResponse({}, next(self._statuses, 200))(scope, receive, send)


def opened(room: BatchRoom, *lines: dict[str, Any]) -> tuple[TenantFolder, str]:
    """The folder and id of a batch that was opened without the API."""
    return opened_for("team", room, *lines)


def opened_for(tenant: str, room: BatchRoom, *lines: dict[str, Any]) -> tuple[TenantFolder, str]:
    folder = TenantFolder.of(room.root, tenant)
    folder.make()
    source = new_id("file")
    folder.content(source).write_bytes(jsonl(*lines))
    folder.keep(source, "in.jsonl", "batch")
    now_s = int(time.time())
    batch = Batch(
        new_id("batch"), "/v1/completions", source, asdict(ANYBODY), new_id("file"),
        new_id("file"), "validating", now_s, now_s + 3600, len(lines),
    )  # fmt: skip
    folder.open(batch)
    return folder, batch.id


def a_runner_of(room: BatchRoom, api: Answers) -> BatchRunner:
    return BatchRunner(room, api, lambda caller: caller, max_line_bytes=MAX_LINE_BYTES)


async def ended_batch(folder: TenantFolder, id: str) -> Batch:
    def found() -> Batch:
        batch = folder.batch(id)
        assert batch is not None
        return batch

    await until(lambda: found().is_over, within_s=20)
    return found()


def in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_WAIT_S", "LOOK_S", "RESTART_S"):
        monkeypatch.setattr(runner, name, 0.01)


@pytest.mark.parametrize(
    ("statuses", "asked", "completed"),
    [((429, 503, 429, 502), 5, 1), ((502, 429, 502, 429), 5, 1), ((500, 502, 429, 504), 4, 0)],
)
async def test_waits_do_not_count_as_failures(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    statuses: tuple[int, ...],
    asked: int,
    completed: int,
) -> None:
    in_haste(monkeypatch)
    room, api = a_room(tmp_path), Answers(*statuses)
    folder, id = opened(room, a_line("one"))
    async with at_work(a_runner_of(room, api)):
        ended = await ended_batch(folder, id)
    assert (len(api.asked), ended.completed, ended.failed) == (asked, completed, 1 - completed)


async def test_a_file_that_cannot_be_read_for_a_while_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_haste(monkeypatch)
    room, api, failures = a_room(tmp_path), Answers(), iter(range(2))

    def failing(*args: Any) -> Iterator[tuple[int, Line]]:
        for number, line in lines_of(*args):
            if number == 4 and next(failures, None) is not None:
                raise OSError(5, "Input/output error")
            yield number, line

    monkeypatch.setattr(runner, "lines_of", failing)
    folder, id = opened(room, *(a_line(f"f{n}") for n in range(6)))
    async with at_work(a_runner_of(room, api)):
        ended = await ended_batch(folder, id)
    assert (ended.status, ended.completed, ended.failed) == ("completed", 6, 0)
    assert sorted(api.asked) == [f"def f{n}(" for n in range(6)], "each line once"
    assert caplog.text.count("it is started again") == 2


async def test_a_batch_that_cannot_be_read_is_cancelled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_haste(monkeypatch)
    room = a_room(tmp_path)
    folder, id = opened(room, a_line("one"))
    (source,) = folder.files()
    folder.delete_file(source.id)
    async with at_work(a_runner_of(room, Answers())):
        await until(lambda: "it is started again" in caplog.text, within_s=20)
        folder.cancel(id)
        assert (await ended_batch(folder, id)).status == "cancelled"


async def test_files_of_other_programs_in_the_folder_are_ignored(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    folder, id = opened(room, a_line("one"))
    for path in (room.root / ".DS_Store", room.root / ("0" * 32)):
        path.write_bytes(b"\xff")
    (room.root / "lost+found" / "open").mkdir(parents=True)
    (room.root / "lost+found" / "open" / id).touch()
    for part in ("files", "batches", "open"):
        for name in (".DS_Store", f"._{id}.json", "._x.jsonl", "notes.json"):
            (folder.path / part / name).write_bytes(b"\xff")
    size = folder.size()
    async with at_work(a_runner_of(room, Answers())):
        assert (await ended_batch(folder, id)).status == "completed"
    assert [f.name for f in tenants(room.root)] == [folder.name]
    assert ([b.id for b in folder.batches()], len(folder.files())) == ([id], 2)
    assert size == LEAST_BYTES


async def test_a_broken_folder_of_a_tenant_does_not_stop_the_others(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    folder, id = opened(room, a_line("one"))
    broken = TenantFolder(room.root, "0" * 32)
    broken.make()
    (broken.path / "batches" / f"{new_id('batch')}.json").write_bytes(b"\xff")
    async with at_work(a_runner_of(room, Answers())):
        assert (await ended_batch(folder, id)).status == "completed"


@pytest.mark.parametrize("other", [{"since": 1}, {"errors": None}])
async def test_a_batch_of_another_version_does_not_stop_the_others(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """After an update is taken back the folder may have batches with other fields."""
    room = a_room(tmp_path)
    folder, id = opened(room, a_line("one"))
    path = folder.path / "batches" / f"{new_id('batch')}.json"
    written = json.loads((folder.path / "batches" / f"{id}.json").read_text())
    path.write_text(json.dumps({**written, **other}))
    second, second_id = opened_for("other team", room, a_line("two"))
    async with at_work(a_runner_of(room, Answers())):
        assert (await ended_batch(folder, id)).completed == 1
        assert (await ended_batch(second, second_id)).completed == 1


async def test_lines_that_a_window_leaves_without_an_answer_have_an_error(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    folder, id = opened(room, *(a_line(f"f{n}") for n in range(4)))
    batch = folder.batch(id)
    assert batch is not None
    answered = {"custom_id": "f0", "response": {"status_code": 200}}
    folder.content(batch.output_file_id).write_bytes(jsonl(answered))
    folder.write(replace(batch, expires_at=1))
    async with at_work(a_runner_of(room, Answers())):
        ended = await ended_batch(folder, id)
    assert (ended.status, ended.completed, ended.failed) == ("expired", 1, 3)
    written = folder.content(batch.error_file_id).read_text().splitlines()
    errors = [json.loads(line) for line in written]
    assert [(e["custom_id"], e["response"], e["error"]["code"]) for e in errors] == [
        ("f1", None, "batch_expired"), ("f2", None, "batch_expired"), ("f3", None, "batch_expired"),
    ]  # fmt: skip
    assert len({e["id"] for e in errors}) == 3
    assert folder.file(batch.error_file_id) is not None
