"""Batches: OpenAI's files and batches end to end, a restart in the middle, and their bounds."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ingress_kit import COMPLETION, Kit, a_fast_pool, a_pool, an_access, running, until
from sign_in_kit import SPEC, Provider

from cato.core.tenancy import Access, ApiKey, Role, Tenant
from cato.core.topology import BatchLimits
from cato.serve.access.control import AccessControl
from cato.serve.access.keys import new_key
from cato.serve.batches import folder, runner
from cato.serve.batches.folder import LEAST_BYTES, BatchRoom, TenantFolder
from cato.serve.batches.lines import Line, checked, done_in
from cato.serve.batches.runner import BatchRunner
from cato.serve.ingress.dialects import batches

MAX_LINE_BYTES = 100_000


def a_line(id: str, **body: Any) -> dict[str, Any]:
    asked = {"model": "fast", "prompt": f"def {id}(", "max_tokens": 3} | body
    return {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": asked}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def a_room(tmp_path: Path, **limits: Any) -> BatchRoom:
    return BatchRoom(tmp_path / "batches", replace(BatchLimits(), **limits), at_once=2)


def a_runner(
    kit: Kit, room: BatchRoom, access: AccessControl | None = None, **settings: Any
) -> BatchRunner:
    rights = (access or an_access()).renewed
    return BatchRunner(
        room, kit.app.state.inside, rights, max_line_bytes=MAX_LINE_BYTES, **settings
    )


@asynccontextmanager
async def at_work(working: BatchRunner) -> AsyncIterator[None]:
    task = asyncio.create_task(working.run())
    try:
        yield
    finally:
        task.cancel()
        await working.close()


async def uploaded(http: httpx.AsyncClient, content: bytes, **fields: Any) -> httpx.Response:
    data = {"purpose": "batch"} | fields
    headers = {"Authorization": http.headers.get("Authorization", "Bearer none")}
    request = httpx.Request(
        "POST", "http://localhost/v1/files", files={"file": ("in.jsonl", content)}, data=data,
        headers=headers,
    )  # fmt: skip
    return await http.send(request)


async def begun(http: httpx.AsyncClient, content: bytes, **changes: Any) -> dict[str, Any]:
    file = (await uploaded(http, content)).json()
    body = {
        "input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h",
    }  # fmt: skip
    answer = await http.post("/v1/batches", json=body | changes)
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    return batch


async def over(http: httpx.AsyncClient, id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def is_over() -> bool:
        found.update((await http.get(f"/v1/batches/{id}")).json())
        return found["status"] in ("completed", "failed", "expired", "cancelled")

    await until(is_over, within_s=20)
    return found


async def results(http: httpx.AsyncClient, file_id: str) -> dict[str, dict[str, Any]]:
    text = (await http.get(f"/v1/files/{file_id}/content")).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len({r["custom_id"] for r in found}) == len(found)
    return {r["custom_id"]: r for r in found}


async def test_openais_sdk_runs_a_batch(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.server() as url,
        at_work(a_runner(kit, room)),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        content = jsonl(*(a_line(f"f{n}") for n in range(9)), a_line("bad", model="nope"))
        file = await sdk.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await sdk.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"who": "me"},
        )
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            batch = await sdk.batches.retrieve(batch.id)
        counts = batch.request_counts
        assert counts is not None
        assert (batch.status, counts.total, counts.completed, counts.failed) == (
            "completed", 10, 9, 1,
        )  # fmt: skip
        assert batch.output_file_id
        assert batch.error_file_id
        good = (await sdk.files.content(batch.output_file_id)).text.splitlines()
        bad = json.loads((await sdk.files.content(batch.error_file_id)).text)
        listed = await sdk.batches.list()
        await sdk.files.delete(file.id)
        kept = {f.id for f in (await sdk.files.list()).data}
    assert {json.loads(line)["custom_id"] for line in good} == {f"f{n}" for n in range(9)}
    body = json.loads(good[0])["response"]["body"]
    assert body["object"] == "text_completion"
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 404)
    assert [b.id for b in listed.data] == [batch.id]
    assert kept == {batch.output_file_id, batch.error_file_id}


async def test_a_line_is_of_the_class_batch_and_its_callers(tmp_path: Path) -> None:
    secret, id, digest = new_key()
    access, room = an_access(Access((ApiKey(id, digest, "team-a"),))), a_room(tmp_path)
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access, batches=room
        ) as kit,
        kit.http() as http,
        at_work(a_runner(kit, room, access)),
    ):
        http.headers["Authorization"] = f"Bearer {secret}"
        batch = await begun(http, jsonl(a_line("one"), a_line("two")))
        assert (await over(http, batch["id"]))["request_counts"]["completed"] == 2
        (used,) = (await http.get("/v1/usage")).json()["data"]
        receipts = list(kit.records.receipts.values())
    assert (used["tenant"], used["key"], used["requests"]) == ("team-a", id, 2)
    assert {(r.tenant, r.target_s > 1.5) for r in receipts} == {("team-a", True)}


async def test_a_restart_goes_on_with_what_has_no_result(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    slow = a_pool("sim-fast", "fast", step_s=0.02)
    async with (
        running(tmp_path, slow, workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        batch = await begun(http, jsonl(*(a_line(f"f{n}") for n in range(12))))
        folder = TenantFolder.of(room.root, "")

        def some_done() -> bool:
            path = folder.content(next(b for b in folder.batches()).output_file_id)
            return path.exists() and path.read_bytes().count(b"\n") >= 3

        first = a_runner(kit, room)
        async with at_work(first):
            await until(some_done, within_s=20)
        found = folder.batches()[0]
        before = folder.content(found.output_file_id).read_bytes()
        assert not found.is_over
        with folder.content(found.output_file_id).open("ab") as file:
            file.write(b'{"id": "cut sh')
        asked = len(kit.records.receipts)
        async with at_work(a_runner(kit, room)):
            ended = await over(http, batch["id"])
        found_results = await results(http, ended["output_file_id"])
        text = (await http.get(f"/v1/files/{ended['output_file_id']}/content")).content
    assert ended["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    assert set(found_results) == {f"f{n}" for n in range(12)}
    assert text.startswith(before)
    assert len(kit.records.receipts) - asked <= 12 - before.count(b"\n")


async def test_one_runner_at_a_time_has_a_batch(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
        at_work(a_runner(kit, room)),
        at_work(a_runner(kit, room)),
    ):
        batch = await begun(http, jsonl(*(a_line(f"f{n}") for n in range(30))))
        ended = await over(http, batch["id"])
        assert len(await results(http, ended["output_file_id"])) == 30
        assert len(kit.records.receipts) == 30


async def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    slow = a_pool("sim-fast", "fast", prefill_s=0.1)
    async with (
        running(tmp_path, slow, workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
        at_work(a_runner(kit, room)),
    ):
        batch = await begun(http, jsonl(*(a_line(f"f{n}") for n in range(500))))
        await until(lambda: len(kit.records.receipts) >= 2, within_s=20)
        answer = (await http.post(f"/v1/batches/{batch['id']}/cancel")).json()
        ended = await over(http, batch["id"])
        found = await results(http, ended["output_file_id"])
    assert answer["status"] == "cancelling"
    assert ended["status"] == "cancelled"
    assert 2 <= len(found) == ended["request_counts"]["completed"] < 500


async def test_a_full_pool_makes_a_batch_wait(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    full = a_pool("sim-fast", "fast", step_s=0.05, slots=1, max_queued=0)
    async with (
        running(tmp_path, full, workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
        at_work(a_runner(kit, room)),
    ):
        batch = await begun(http, jsonl(*(a_line(f"f{n}") for n in range(4))))
        ended = await over(http, batch["id"])
    assert ended["request_counts"] == {"total": 4, "completed": 4, "failed": 0}


async def test_a_batch_ends_with_its_key(tmp_path: Path) -> None:
    secret, id, digest = new_key()
    access, room = an_access(Access((ApiKey(id, digest, "team-a"),))), a_room(tmp_path)
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access, batches=room
        ) as kit,
        kit.http() as http,
    ):
        http.headers["Authorization"] = f"Bearer {secret}"
        batch = await begun(http, jsonl(a_line("one")))
        access.learn(Access((ApiKey("other", digest, "team-a"),)))
        async with at_work(a_runner(kit, room, access)):
            folder = TenantFolder.of(room.root, "team-a")
            await until(lambda: folder.batches()[0].is_over, within_s=20)
        (found,) = folder.batches()
        (line,) = folder.content(found.error_file_id).read_text().splitlines()
    assert (found.id, found.failed) == (batch["id"], 1)
    assert json.loads(line)["error"]["code"] == "key_revoked"
    assert kit.records.receipts == {}


async def test_the_batch_of_a_person_ends_a_while_after_its_token(tmp_path: Path) -> None:
    provider, now_s = Provider(), [time.time()]
    spec = replace(SPEC, after_s=3600.0)
    access = an_access(Access(), sign_in=provider.sign_in(spec), clock=lambda: now_s[0])
    room = a_room(tmp_path)
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access, batches=room
        ) as kit,
        kit.http() as http,
    ):
        http.headers["Authorization"] = f"Bearer {provider.token()}"  # valid for 300 s
        first = await begun(http, jsonl(a_line("one")))
        async with at_work(a_runner(kit, room, access)):
            now_s[0] += 3600.0
            assert (await over(http, first["id"]))["status"] == "completed"
        await begun(http, jsonl(a_line("two")))
        now_s[0] += 300.0 + spec.skew_s + 60.0
        async with at_work(a_runner(kit, room, access)):
            folder = TenantFolder.of(room.root, "red")
            await until(lambda: all(b.is_over for b in folder.batches()), within_s=20)
        (late,) = (b for b in folder.batches() if b.id != first["id"])
        (line,) = folder.content(late.error_file_id).read_text().splitlines()
    assert json.loads(line)["error"]["code"] == "key_revoked"


async def test_a_batch_of_a_person_has_the_rights_that_its_group_has_now(tmp_path: Path) -> None:
    provider = Provider()
    access = an_access(Access(), sign_in=provider.sign_in())
    person = await access.person(provider.token())
    caller = access.caller("", is_local=False, person=person)
    assert access.renewed(caller) == caller
    red = SPEC.of_group("red")
    assert red is not None
    for groups, tasks in (
        ((replace(red, tasks=("summary",)),), ("summary",)),
        ((replace(red, tenant="blue"),), None),
        ((replace(red, group="other"),), None),
    ):
        changed = an_access(Access(), sign_in=provider.sign_in(replace(SPEC, groups=groups)))
        again = changed.renewed(caller)
        assert (None if again is None else again.tasks) == tasks
    assert an_access(Access()).renewed(caller) is None, "nobody signs in any more"


async def test_a_paused_server_begins_nothing(tmp_path: Path) -> None:
    room, paused = a_room(tmp_path), [True]
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        batch = await begun(http, jsonl(a_line("one")))
        runner = a_runner(kit, room, is_paused=lambda: paused[0])
        await runner.look()
        assert kit.records.receipts == {}
        paused[0] = False
        async with at_work(runner):
            assert (await over(http, batch["id"]))["status"] == "completed"


async def test_tenants_see_their_own_files_and_batches_and_operators_no_content(
    tmp_path: Path,
) -> None:
    keys = [new_key() for _ in range(3)]
    roles = (Role.USER, Role.USER, Role.OPERATOR)
    known = tuple(
        ApiKey(k[1], k[2], tenant, role=role)
        for k, tenant, role in zip(keys, ("a", "b", "ops"), roles, strict=True)
    )
    room = a_room(tmp_path)
    access = an_access(Access(known, (Tenant("a"), Tenant("b"))))
    async with (
        running(
            tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access, batches=room
        ) as kit,
        kit.http() as http,
    ):
        http.headers["Authorization"] = f"Bearer {keys[0][0]}"
        batch = await begun(http, jsonl(a_line("one")))
        file_id, batch_id = batch["input_file_id"], batch["id"]
        order = {
            "input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h",
        }  # fmt: skip
        for secret, status, files, batches in (
            (keys[1][0], 404, [], []),
            (keys[2][0], 200, [file_id], [batch_id]),
        ):
            http.headers["Authorization"] = f"Bearer {secret}"
            refused = [
                await http.get(f"/v1/files/{file_id}/content"),
                await http.delete(f"/v1/files/{file_id}"),
                await http.post("/v1/batches", json=order),
            ]
            assert [r.status_code for r in refused] == [404] * 3
            assert [f["id"] for f in (await http.get("/v1/files")).json()["data"]] == files
            assert [b["id"] for b in (await http.get("/v1/batches")).json()["data"]] == batches
            found = [
                await http.get(f"/v1/files/{file_id}"),
                await http.get(f"/v1/batches/{batch_id}"),
                await http.post(f"/v1/batches/{batch_id}/cancel"),
            ]
            assert [r.status_code for r in found] == [status] * 3
            assert TenantFolder.of(room.root, "a").is_cancelled(batch_id) is (status == 200)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "line 1: not valid JSON"),
        (b"[1]\n", "line 1: not a JSON object"),
        (jsonl(a_line("a"), a_line("a")), "line 2: custom_id 'a'"),
        (jsonl(a_line("a") | {"url": "/v1/embeddings"}), "line 1: url must be /v1/completions"),
        (jsonl(a_line("a") | {"method": "GET"}), "method must be POST"),
        (jsonl(a_line("a", stream=True)), "leave `stream` out"),
        (jsonl(a_line("a", prompt="x" * MAX_LINE_BYTES)), "longer than 100000 bytes"),
        (jsonl(*(a_line(f"f{n}") for n in range(6))), "more than 5 lines"),
        (b"\n\n", "the file has no line"),
        (b"\xff\xfe\n", "line 1: not valid JSON"),
        (b'{"custom_id": "a", "body": ' + b"[" * 90_000, "line 1: not valid JSON"),
    ],
)
async def test_a_file_that_is_wrong_fails_with_the_line(
    tmp_path: Path, content: bytes, said: str
) -> None:
    room = a_room(tmp_path, lines=5)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        batch = await begun(http, content)
    assert batch["status"] == "failed"
    assert said in batch["errors"]["data"][0]["message"]
    assert TenantFolder.of(room.root, "").open_ids() == []


async def test_what_a_tenant_keeps_is_bounded(tmp_path: Path) -> None:
    room = a_room(tmp_path, file_bytes=1000, total_bytes=2 * LEAST_BYTES, open_batches=1)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        assert (await uploaded(http, b"x" * 1001)).status_code == 413
        assert (await uploaded(http, b"x" * 200_000)).status_code == 413
        for _ in range(2):
            assert (await uploaded(http, b"x" * 1000)).status_code == 200
        full = await uploaded(http, b"")
        (newest, *_) = (await http.get("/v1/files")).json()["data"]
        await http.delete(f"/v1/files/{newest['id']}")
        first = await begun(http, jsonl(a_line("one")))
        body = {
            "input_file_id": first["input_file_id"], "endpoint": "/v1/completions",
            "completion_window": "24h",
        }  # fmt: skip
        second = await http.post("/v1/batches", json=body)
        needed = await http.delete(f"/v1/files/{first['input_file_id']}")
    assert (full.status_code, "delete some" in full.text) == (400, True)
    assert (second.status_code, "in progress" in second.text) == (400, True)
    assert (needed.status_code, "cancel the batch first" in needed.text) == (400, True)
    assert TenantFolder.of(room.root, "").size() <= 2 * LEAST_BYTES


async def test_orders_with_wrong_files_push_out_the_oldest_of_those_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "KEPT_BATCHES", 3)
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        open_ = await begun(http, jsonl(a_line("one")))
        for _ in range(5):
            last = await begun(http, b"{")
        kept = [b["id"] for b in (await http.get("/v1/batches")).json()["data"]]
    assert len(kept) == 3
    assert {open_["id"], last["id"]} <= set(kept)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"endpoint": "/v1/files"}, 400),
        ({"completion_window": "1000h"}, 400),
        ({"completion_window": 24}, 400),
        ({"input_file_id": "../../etc/passwd"}, 404),
        ({"input_file_id": f"file-{'0' * 32}"}, 404),
        ({"metadata": {"a": 1}}, 400),
        ({"more": 1}, 400),
    ],
)
async def test_an_order_for_a_batch_is_checked(
    tmp_path: Path, body: dict[str, Any], status: int
) -> None:
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        file = (await uploaded(http, jsonl(a_line("a")))).json()
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        wanted |= {"completion_window": "24h"}
        answer = await http.post("/v1/batches", json=wanted | body)
        assert (await uploaded(http, b"x", purpose="fine-tune")).status_code == 400
    assert answer.status_code == status, answer.text


async def test_what_is_not_there_is_the_clients_error_and_named(tmp_path: Path) -> None:
    order = {
        "input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h",
    }  # fmt: skip
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=a_room(tmp_path)) as kit,
        kit.http() as http,
    ):
        answers = [
            await http.get("/v1/files/file-0"),
            await http.post("/v1/batches", json=order),
            await http.get("/v1/batches/batch-0"),
        ]
    errors = [a.json()["error"] for a in answers]
    assert [a.status_code for a in answers] == [404] * 3
    assert [(e["type"], e["code"], e["param"]) for e in errors] == [
        ("invalid_request_error", "file_not_found", "file_id"),
        ("invalid_request_error", "file_not_found", "input_file_id"),
        ("invalid_request_error", "batch_not_found", "batch_id"),
    ]


async def test_openais_sdk_pages_through_lists(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
        kit.server() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        order = [(await begun(http, b"{"))["id"] for _ in range(5)]
        files = [f.id async for f in sdk.files.list()]
        page = await sdk.files.list(limit=2)
        assert (page.has_more, [f.id for f in page.data]) == (True, files[:2])
        rest = await page.get_next_page()
        assert [f.id for f in rest.data] == files[2:4]
        assert not (await rest.get_next_page()).has_more
        assert [f.id async for f in sdk.files.list(limit=2)] == files
        assert [f.id async for f in sdk.files.list(limit=2, order="asc")] == files[::-1]
        assert [f async for f in sdk.files.list(purpose="batch_output")] == []
        assert [f.id async for f in sdk.files.list(purpose="batch")] == files
        assert {b.id async for b in sdk.batches.list(limit=2)} == {*order}
        batches = (await http.get("/v1/batches?limit=2")).json()
    assert batches["has_more"] is True
    assert [batches["first_id"], batches["last_id"]] == [b["id"] for b in batches["data"]]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("files?limit=0", "limit"),
        ("files?limit=10001", "limit"),
        ("files?limit=x", "limit"),
        ("files?order=up", "order"),
        ("files?after=file-0", "after"),
        ("batches?limit=101", "limit"),
        ("batches?after=batch-0", "after"),
    ],
)
async def test_a_wrong_page_is_refused_by_parameter(tmp_path: Path, query: str, param: str) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=a_room(tmp_path)) as kit,
        kit.http() as http,
    ):
        answer = await http.get(f"/v1/{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_deployment_without_batches_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        answers = [await uploaded(http, b"x"), await http.get("/v1/batches")]
    assert [a.json()["error"]["code"] for a in answers] == ["batches_off"] * 2
    assert {a.json()["error"]["type"] for a in answers} == {"invalid_request_error"}
    assert [a.status_code for a in answers] == [404] * 2


async def upload_of_headers(tmp_path: Path, headers: dict[str, str]) -> httpx.Response:
    """The answer to an upload with nothing but these headers and those of its form."""
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        request = httpx.Request(
            "POST", "http://localhost/v1/files", files={"file": ("a", b"x")},
            data={"purpose": "batch"}, headers=headers,
        )  # fmt: skip
        return await http.send(request)


async def test_a_form_of_a_foreign_page_uploads_nothing(tmp_path: Path) -> None:
    assert (await upload_of_headers(tmp_path, {})).status_code == 415


async def test_a_compressed_upload_is_refused(tmp_path: Path) -> None:
    headers = {"Content-Encoding": "gzip", "Authorization": "Bearer none"}
    answer = await upload_of_headers(tmp_path, headers)
    assert (answer.status_code, "uncompressed" in answer.text) == (415, True)


async def test_a_file_that_is_deleted_while_it_is_checked_begins_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = a_room(tmp_path)
    folder = TenantFolder.of(room.root, "")

    def checked_and_deleted(*args: Any) -> tuple[int, str]:
        found = checked(*args)
        for file in folder.files():
            folder.delete_file(file.id)
        return found

    monkeypatch.setattr(batches, "checked", checked_and_deleted)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        file = (await uploaded(http, jsonl(a_line("one")))).json()
        order = {"endpoint": "/v1/completions", "completion_window": "24h"}
        answer = await http.post("/v1/batches", json=order | {"input_file_id": file["id"]})
    assert (answer.status_code, folder.open_ids()) == (404, [])


async def test_what_killed_processes_left_is_deleted_and_counts_no_longer(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        batch = await begun(http, jsonl(a_line("one")))
    kept = TenantFolder.of(room.root, "")
    size = kept.size()
    (found,) = kept.batches()
    output = kept.content(found.output_file_id)  # of a batch that runs: it has no facts yet
    left = [
        kept.content(folder.new_id("file")),
        kept.path / "files" / f"{folder.new_id('file')}.json.00ff.new",
        kept.path / "batches" / f"{folder.new_id('batch')}.json.00ff.new",
        kept.path / "open" / f"{folder.new_id('batch')}.cancel",
    ]
    new = kept.content(folder.new_id("file"))
    for path in (output, new, *left):
        path.write_bytes(b"x")
    for path in (output, *left):
        os.utime(path, (1.0, 1.0))
    kept.sweep(before_s=0)
    assert not [path for path in left if path.exists()]
    assert [b["id"] for b in map(asdict, kept.batches())] == [batch["id"]]
    assert output.exists()
    assert kept.size() == size + 2 * LEAST_BYTES, "the output, and the new file of an upload"


async def test_old_files_go_but_none_that_an_open_batch_needs(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        batch = await begun(http, jsonl(a_line("one")))
        await uploaded(http, b"x")
        folder = TenantFolder.of(room.root, "")
        folder.sweep(before_s=0)
        assert len(folder.files()) == 2
        folder.sweep(before_s=4e9)
    assert [f.id for f in folder.files()] == [batch["input_file_id"]]
    assert [b.id for b in folder.batches()] == [batch["id"]]


async def test_a_batch_ends_when_its_window_does(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        batch = await begun(http, jsonl(a_line("one")))
        folder = TenantFolder.of(room.root, "")
        folder.write(replace(folder.batches()[0], expires_at=1))
        async with at_work(a_runner(kit, room)):
            ended = await over(http, batch["id"])
    assert (ended["status"], ended["output_file_id"]) == ("expired", None)
    assert kit.records.receipts == {}


def test_a_result_that_was_cut_short_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(jsonl({"custom_id": "a"}) + b'{"custom_id": "b"')
    assert done_in(path) == {"a"}
    assert path.read_bytes() == jsonl({"custom_id": "a"})
    for damaged in (b"\0" * 9 + b"\n", b"[]\n", b'{"custom_id": 1}\n'):
        path.write_bytes(jsonl({"custom_id": "a"}) + damaged + jsonl({"custom_id": "c"}))
        assert done_in(path) == {"a"}
        assert path.read_bytes() == jsonl({"custom_id": "a"})
    assert checked(path, "/v1/completions", 5, 100)[0] == 0


async def test_a_line_that_is_no_clean_json_has_a_result_like_any_other(tmp_path: Path) -> None:
    room = a_room(tmp_path)
    good = jsonl(*(a_line(f"f{n}") for n in range(4)))
    odd = [
        json.dumps(a_line("nan", temperature=float("nan"))),
        json.dumps(a_line("surrogate", prompt="cut \ud800")),
    ]
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
        at_work(a_runner(kit, room)),
    ):
        batch = await begun(http, "\n".join(odd).encode() + b"\n" + good)
        ended = await over(http, batch["id"])
        bad = await results(http, ended["error_file_id"])
        done = await results(http, ended["output_file_id"])
    assert bad["nan"]["response"]["status_code"] == 400
    assert {*bad, *done} == {"nan", "surrogate", "f0", "f1", "f2", "f3"}
    assert {"f0", "f1", "f2", "f3"} <= done.keys()


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/messages"])
async def test_the_error_file_has_the_problem_that_a_header_tells(
    tmp_path: Path, endpoint: str
) -> None:
    room = a_room(tmp_path)
    said = [{"role": "user", "content": "x"}]
    line = a_line("bad", temperature=-1, messages=said) | {"url": endpoint}
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
        at_work(a_runner(kit, room)),
    ):
        ended = await over(http, (await begun(http, jsonl(line), endpoint=endpoint))["id"])
        bad = await results(http, ended["error_file_id"])
        direct = await http.post(endpoint, json=line["body"])
    message = bad["bad"]["response"]["body"]["error"]["message"]
    problem = direct.headers["X-CATO-Problem"]
    assert "-1" in problem
    told = direct.json()["error"]["message"]
    assert message == (told if problem in told else f"{told} X-CATO-Problem: {problem}")
    assert message.count(problem) == 1


async def test_a_line_on_which_the_runner_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = BatchRunner._ask

    async def failing(self: BatchRunner, run: Any, line: Line, caller: Any) -> Any:
        if line.custom_id == "bad":
            raise RuntimeError("a defect")
        return await asked(self, run, line, caller)

    monkeypatch.setattr(BatchRunner, "_ask", failing)
    monkeypatch.setattr(runner, "MIN_WAIT_S", 0.01)
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
        at_work(a_runner(kit, room)),
    ):
        batch = await begun(http, jsonl(a_line("bad"), a_line("f0"), a_line("f1")))
        counts = (await over(http, batch["id"]))["request_counts"]
    assert counts == {"total": 3, "completed": 2, "failed": 1}


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (b"{", "line 3: not valid JSON"),
        (b"", "it had 3 lines when the batch began, and now 2"),
    ],
)
async def test_a_file_that_was_changed_fails_the_batch_and_says_how(
    tmp_path: Path, rest: bytes, said: str
) -> None:
    room = a_room(tmp_path)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        lines = [a_line("one"), a_line("two"), a_line("three")]
        batch = await begun(http, jsonl(*lines))
        content = TenantFolder.of(room.root, "").content(batch["input_file_id"])
        content.write_bytes(jsonl(*lines[:2]) + rest)
        async with at_work(a_runner(kit, room)):
            ended = await over(http, batch["id"])
        done = await results(http, ended["output_file_id"])
    assert (ended["status"], ended["completed_at"]) == ("failed", None)
    assert ended["failed_at"] >= batch["created_at"]
    assert ended["errors"]["data"][0]["message"] == said
    assert ended["request_counts"] == {"total": 3, "completed": 2, "failed": 0}
    assert done.keys() == {"one", "two"}


async def test_limits_hold_for_requests_that_come_at_once(tmp_path: Path) -> None:
    room = a_room(tmp_path, open_batches=2, file_bytes=100_000, total_bytes=200_000)
    content = jsonl(*(a_line(f"f{n}", prompt="x" * 9_000) for n in range(8)))
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), batches=room) as kit,
        kit.http() as http,
    ):
        answers = await asyncio.gather(*(uploaded(http, content) for _ in range(12)))
        folder = TenantFolder.of(room.root, "")
        assert folder.size() <= 200_000
        kept = [a.json()["id"] for a in answers if a.status_code == 200]
        assert len(kept) == 2
        body = {
            "input_file_id": kept[0], "endpoint": "/v1/completions", "completion_window": "24h",
        }  # fmt: skip
        begun = await asyncio.gather(*(http.post("/v1/batches", json=body) for _ in range(20)))
    assert sorted(b.status_code for b in begun) == [200] * 2 + [400] * 18
    assert len(folder.open_ids()) == 2
