"""A newer completion of a buffer takes the place of the older one, and of no other."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_kit import (
    COMPLETION,
    SLOW,
    Kit,
    a_pool,
    a_slow_pool,
    an_access,
    running,
    until,
    until_busy,
    until_idle,
    workflows_of,
)
from kits.builders import an_invocation

from cato.core.errors import SupersededError
from cato.core.ids import RunId
from cato.core.pool.buffers import MAX_HEAD_START_S
from cato.core.runs import RunCancelled
from cato.core.snapshot import Invocation
from cato.engines.simulated import simulated_text
from cato.lab.chaos.local_pools import LocalPool, LocalPools, LocalRecords
from cato.serve.ingress.app import create_app
from cato.serve.nodes.runner import NodeRunner
from cato.serve.service import Origin, TaskService
from cato.workflows.fim import render_fim

# 5 ms a token, 10 ms a prompt, and few places: editors that type faster than this wait.
TOKEN_S, PROMPT_S, SLOTS = 0.005, 0.01, 2
EDITORS, BURSTS, KEYSTROKES, KEY_S = 10, 2, 6, 0.02


async def test_a_newer_completion_of_a_session_ends_the_older_one(tmp_path: Path) -> None:
    pool = a_slow_pool()
    headers = {"x-session-id": "editor-1"}
    body = {"model": "slow", "prompt": "def f(", "suffix": "\n", "max_tokens": 3000}
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        older = asyncio.create_task(http.post("/v1/fim/completions", json=body, headers=headers))
        await until_busy(pool)
        newer = await http.post(
            "/v1/fim/completions", json={**body, "max_tokens": 2}, headers=headers
        )
        refused = await older
        await until_idle(pool, within_s=1)
    assert newer.status_code == 200
    assert refused.status_code == 499
    assert refused.json()["error"]["code"] == "superseded"
    assert refused.headers["x-should-retry"] == "false"


async def test_a_queued_completion_is_replaced_even_when_the_queue_is_full(tmp_path: Path) -> None:
    pool = a_slow_pool(slots=1, max_queued=1)
    headers = {"x-session-id": "editor-1"}
    body = {"model": "slow", "prompt": "x", "suffix": "\n", "max_tokens": 20}
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        # The local replica has no standby place: one runs, one waits.
        first = asyncio.create_task(http.post("/v1/fim/completions", json=body))
        await until_busy(pool)
        queued = [asyncio.create_task(http.post("/v1/fim/completions", json=body, headers=headers))]
        for _ in range(3):
            await until(lambda: pool.orchestrator.picture(0.0).queued == 1, within_s=2)
            queued.append(
                asyncio.create_task(http.post("/v1/fim/completions", json=body, headers=headers))
            )
            await asyncio.wait_for(queued[-2], 2)
        statuses = [(await answer).status_code for answer in queued]
        assert (await first).status_code == 200
    assert statuses == [499, 499, 499, 200]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"x-session-id": "a"}, {"x-session-id": "b"}),
        ({}, {}),
        ({"x-session-id": "a", "user-agent": "x"}, {"x-session-id": "a", "user-agent": "y"}),
    ],
)
async def test_other_buffers_are_left_alone(
    tmp_path: Path, older: dict[str, str], newer: dict[str, str]
) -> None:
    body = {"model": "slow", "prompt": "x", "suffix": "\n", "max_tokens": 10}
    async with (
        running(tmp_path, a_slow_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        answers = await asyncio.gather(
            http.post("/v1/fim/completions", json=body, headers=older),
            http.post("/v1/fim/completions", json=body, headers=newer),
        )
    assert [a.status_code for a in answers] == [200, 200]


async def test_tabby_names_its_buffer_by_the_path_of_the_file(tmp_path: Path) -> None:
    slow = COMPLETION.replace("model: fast", "model: slow")

    def body(path: str) -> dict[str, Any]:
        segments = {"prefix": "def f(", "filepath": path}
        return {"language": "python", "segments": segments, "user": "ann"}

    async with running(tmp_path, a_slow_pool(), workflows=(slow,)) as kit, kit.http() as http:
        posts = [http.post("/v1/completions", json=body(p)) for p in ("a.py", "b.py", "a.py")]
        answers = await asyncio.gather(*posts)
    assert sorted(a.status_code for a in answers) == [200, 200, 499]
    assert answers[1].status_code == 200


async def test_people_behind_one_address_do_not_end_each_others_completions(
    tmp_path: Path,
) -> None:
    slow = COMPLETION.replace("model: fast", "model: slow")
    segments = {"prefix": "def f(", "filepath": "main.py"}
    async with running(tmp_path, a_slow_pool(), workflows=(slow,)) as kit, kit.http() as http:
        users: list[dict[str, str]] = [{}, {}, {}, {"user": "ann"}, {"user": "bob"}]
        posts = [http.post("/v1/completions", json={"segments": segments, **u}) for u in users]
        answers = await asyncio.gather(*posts)
    assert [a.status_code for a in answers] == [200] * 5


async def test_a_conversation_may_ask_twice_at_once(tmp_path: Path) -> None:
    headers = {"x-session-id": "a"}
    body = {"model": "slow", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    async with (
        running(tmp_path, a_slow_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        posts = [http.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2)]
        answers = await asyncio.gather(*posts)
    assert [a.status_code for a in answers] == [200, 200]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tasks/slow", {"inputs": {"instruction": "x"}}),
        ("/v1/completions", {"model": "slow", "prompt": "x", "max_tokens": 3000}),
        (
            "/v1/chat/completions",
            {"model": "slow", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3000},
        ),
    ],
)
async def test_any_request_can_name_its_buffer_itself(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    headers = {"X-CATO-Buffer": "scratch"}
    pool = a_slow_pool()
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit, kit.http() as http:
        older = asyncio.create_task(http.post(path, json=body, headers=headers))
        await until_busy(pool)
        newer = asyncio.create_task(http.post(path, json=body, headers=headers))
        assert (await older).json()["error"]["code"] == "superseded"
        newer.cancel()
        await asyncio.wait([newer])


async def test_a_request_that_cannot_start_replaces_nothing(tmp_path: Path) -> None:
    headers = {"X-CATO-Buffer": "scratch"}
    pool = a_slow_pool()
    body = {"model": "slow", "prompt": "x", "max_tokens": 10}
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        older = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
        await until_busy(pool)
        wrong = await http.post("/v1/tasks/code-completion", json={}, headers=headers)
        assert wrong.status_code == 400
        assert (await older).status_code == 200


async def test_a_chain_of_keystrokes_keeps_its_place_but_not_for_ever(tmp_path: Path) -> None:
    pool = a_slow_pool(slots=1)
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit:
        inputs = {"instruction": "x"}
        first = kit.service.run_task("slow", inputs, request_id="1")
        await asyncio.sleep(0.05)
        second = kit.service.run_task("slow", inputs, request_id="2", origin=Origin(replaces=first))
        gap_s = second.run.arrived_at_s - first.run.arrived_at_s
        assert second.head_start_s == pytest.approx(gap_s)
        second.head_start_s = 100.0
        third = kit.service.run_task("slow", inputs, request_id="3", origin=Origin(replaces=second))
        assert third.head_start_s == MAX_HEAD_START_S
        third.cancel("enough")
    assert first.run.handle(RunCancelled(time.monotonic(), "again")) == ()


@dataclass(frozen=True, slots=True)
class Typed:
    """What came of all bursts: tokens that engines generated, and the last keystrokes' TTFT."""

    tokens: int
    wasted_tokens: int
    last_ttft_s: list[float]
    misdelivered: int

    def __str__(self) -> str:
        p95_s = statistics.quantiles(self.last_ttft_s, n=20)[-1]
        return (
            f"{self.wasted_tokens} of {self.tokens} engine tokens wasted, TTFT of the last "
            f"keystroke p50 {statistics.median(self.last_ttft_s) * 1000:.0f} ms, "
            f"p95 {p95_s * 1000:.0f} ms"
        )


async def type_bursts(kit: Kit, *, has_sessions: bool) -> Typed:
    """Editors type bursts, and ask at every keystroke without waiting for the last answer."""
    last_ttft_s: list[float] = []
    misdelivered = 0

    async def ask(http: httpx.AsyncClient, editor: int, prompt: str, id: str) -> dict[str, Any]:
        nonlocal misdelivered
        headers = {"x-request-id": id}
        if has_sessions:
            headers["x-session-id"] = f"editor-{editor}"
        body = {"model": "slow", "prompt": prompt, "suffix": "\n", "max_tokens": 12}
        response = await http.post("/v1/fim/completions", json=body, headers=headers)
        answer: dict[str, Any] = response.json()
        is_mine = response.headers["x-request-id"] == id
        if response.status_code == 200:
            mine = simulated_text(0, render_fim("starcoder", prompt, "\n"), 12)
            text = answer["choices"][0]["message"]["content"]
            is_mine = is_mine and text != "" and mine.startswith(text)
        misdelivered += not is_mine
        return answer

    async def edit(http: httpx.AsyncClient, editor: int) -> None:
        await asyncio.sleep(editor * KEY_S / EDITORS)
        for burst in range(BURSTS):
            asked = []
            for key in range(KEYSTROKES):
                name = f"{editor}.{burst}.{key}"
                asked.append(asyncio.create_task(ask(http, editor, f"file {name}", name)))
                await asyncio.sleep(KEY_S)
            answers = await asyncio.gather(*asked)
            last_ttft_s.append(answers[-1]["cato"]["ttft_s"])

    async with kit.http() as http:
        await asyncio.gather(*(edit(http, editor) for editor in range(EDITORS)))
    generated = sum(u.output_tokens for u in await kit.records.usage(None))
    wanted = sum(
        r.output_tokens
        for (_, id), r in kit.records.receipts.items()
        if r.status == "done" and id.endswith(f".{KEYSTROKES - 1}")
    )
    return Typed(generated, generated - wanted, last_ttft_s, misdelivered)


async def test_superseding_spares_the_engines_and_serves_the_last_keystroke_sooner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = {}
    for has_sessions in (False, True):
        pool = a_pool("sim-slow", "slow", step_s=TOKEN_S, prefill_s=PROMPT_S, slots=SLOTS)
        async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
            typed[has_sessions] = await type_bursts(kit, has_sessions=has_sessions)
    with capsys.disabled():
        print(f"\nwithout supersede: {typed[False]}\nwith supersede:    {typed[True]}")
    assert typed[False].misdelivered == typed[True].misdelivered == 0
    assert len(typed[True].last_ttft_s) == EDITORS * BURSTS
    # Without it five of six answers are for a text that is no longer there.
    assert typed[True].wasted_tokens < typed[False].wasted_tokens / 2
    assert statistics.median(typed[True].last_ttft_s) < statistics.median(typed[False].last_ttft_s)


# Across ingress replicas: the pool's router knows the buffers of all


@contextlib.asynccontextmanager
async def two_ingresses(folder: Path, pool: LocalPool) -> AsyncIterator[tuple[Any, Any]]:
    """Clients of two ingress replicas that share nothing but `pool`."""
    async with LocalPools(pool) as pools:
        folders = [folder / name for name in ("a", "b")]
        apps = []
        for each in folders:
            each.mkdir()
            workflows = workflows_of(each, COMPLETION.replace("model: fast", "model: slow"))
            service = TaskService(workflows, pools, NodeRunner({}), LocalRecords(pools), seed=1)
            apps.append(
                create_app(
                    service,
                    max_body_bytes=10_000,
                    ready=lambda: (True, ""),
                    access=an_access(),
                )
            )
        transports = [httpx.ASGITransport(app) for app in apps]
        async with (
            httpx.AsyncClient(transport=transports[0], base_url="http://localhost") as a,
            httpx.AsyncClient(transport=transports[1], base_url="http://localhost") as b,
        ):
            yield a, b


@pytest.mark.parametrize("path", ["/v1/fim/completions", "/v1/completions"])
async def test_a_newer_completion_that_reaches_another_ingress_ends_the_running_one(
    tmp_path: Path, path: str
) -> None:
    pool = a_slow_pool(slots=1)
    body = {"model": "slow", "prompt": "def f(", "suffix": "\n"}
    headers = {"x-session-id": "editor-1"}
    async with two_ingresses(tmp_path, pool) as (a, b):
        older = asyncio.create_task(
            a.post(path, json={**body, "max_tokens": 3000, "stream": True}, headers=headers)
        )
        await until_busy(pool)
        newer = await b.post(path, json={**body, "max_tokens": 2}, headers=headers)
        ended = await asyncio.wait_for(older, 5)
        await until_idle(pool, within_s=1)
    assert newer.status_code == 200
    assert ended.status_code == 200, "its text had begun"
    assert '"code":"superseded"' in ended.text


async def test_what_waits_at_another_ingress_gives_its_place_to_the_newer_one(
    tmp_path: Path,
) -> None:
    pool = a_slow_pool(slots=1)
    body = {"model": "slow", "prompt": "x", "suffix": "\n", "max_tokens": 10}
    mine = {"x-session-id": "editor-1"}
    async with two_ingresses(tmp_path, pool) as (a, b):
        first = asyncio.create_task(a.post("/v1/fim/completions", json=body))
        await until_busy(pool)
        older = asyncio.create_task(a.post("/v1/fim/completions", json=body, headers=mine))
        await until(lambda: pool.orchestrator.picture(0.0).queued == 1, within_s=2)
        newer = asyncio.create_task(b.post("/v1/fim/completions", json=body, headers=mine))
        refused = await asyncio.wait_for(older, 2)
        assert [(await t).status_code for t in (first, newer)] == [200, 200]
    assert refused.status_code == 499
    assert refused.json()["error"]["code"] == "superseded"
    assert refused.headers["x-should-retry"] == "false"


async def test_the_older_one_loses_even_when_its_call_comes_later(tmp_path: Path) -> None:
    """Its retrieval took longer, say."""
    pool = a_slow_pool()
    async with LocalPools(pool):
        newer = an_offer("new", began_s=-0.1)
        lease = await pool.lease(newer)
        with pytest.raises(SupersededError, match="run new of the same buffer"):
            await pool.lease(an_offer("old", began_s=-0.2))
        assert lease.invocation_id == newer.id


def an_offer(run: str, *, began_s: float) -> Invocation:
    return replace(an_invocation(f"{run}.fill"), run_id=RunId(run), buffer="b", began_at_s=began_s)
