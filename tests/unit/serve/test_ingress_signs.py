"""A stream that stays silent for long shows that it lives, in the words of each dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from ingress_kit import COMPLETION, SLOW, a_pool, running, until_busy, until_idle

from cato.core.ids import ReplicaId
from cato.lab.chaos.local_pools import LocalPool
from cato.serve.ingress import exchange

AFTER_S, EVERY_S = 0.1, 0.05
LONG_S = 0.4
# Where the clock decides: a busy machine is late by a second.
VERY_LONG_S = 3.0
MESSAGES = [{"role": "user", "content": "x"}]
CHAT = ("/v1/chat/completions", {"model": "slow", "messages": MESSAGES, "max_tokens": 4})
RESPONSES = ("/v1/responses", {"model": "slow", "input": "x", "max_output_tokens": 4})
MESSAGE = ("/v1/messages", {"model": "slow", "messages": MESSAGES, "max_tokens": 4})
RESPONSES_OF_TASK = ("/v1/responses", {**RESPONSES[1], "model": "cato-slow"})
WORKFLOW = ("/v1/chat/completions", {"model": "cato-slow", "messages": MESSAGES, "max_tokens": 4})
TASK = ("/v1/tasks/slow", {"inputs": {"instruction": "x"}})
COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
DIALECTS = [(*CHAT, COMMENT), (*RESPONSES, COMMENT), (*MESSAGE, PING), (*WORKFLOW, COMMENT)]


@pytest.fixture(autouse=True)
def quick_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SIGN_AFTER_S", AFTER_S)
    monkeypatch.setattr(exchange, "SIGN_EVERY_S", EVERY_S)


def a_thoughtful_pool(prefill_s: float = LONG_S) -> LocalPool:
    """Its first token takes long, and then 10 ms each."""
    return a_pool("sim-slow", "slow", prefill_s=prefill_s, step_s=0.01)


@asynccontextmanager
async def served(folder: Path, pool: LocalPool) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running(folder, pool, workflows=(SLOW, COMPLETION)) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        yield http


@asynccontextmanager
async def asked(
    folder: Path, pool: LocalPool, path: str, body: dict[str, Any]
) -> AsyncIterator[httpx.Response]:
    """The answer to `body`, streamed, from its head on."""
    async with (
        served(folder, pool) as http,
        http.stream("POST", path, json={**body, "stream": True}) as response,
    ):
        yield response


def without(sign: bytes, data: bytes) -> list[bytes]:
    """The events of `data` that are no signs; all are whole."""
    assert data.endswith(b"\n\n")
    return [e + b"\n\n" for e in data.split(b"\n\n") if e and e + b"\n\n" != sign]


@pytest.mark.parametrize(("path", "body", "sign"), DIALECTS)
async def test_the_head_and_signs_come_before_a_late_first_token(
    tmp_path: Path, path: str, body: dict[str, Any], sign: bytes
) -> None:
    loop = asyncio.get_running_loop()
    async with served(tmp_path, a_thoughtful_pool(VERY_LONG_S)) as http:
        began_s = loop.time()
        async with http.stream("POST", path, json={**body, "stream": True}) as response:
            head_s = loop.time() - began_s
            data = b"".join([part async for part in response.aiter_raw()])
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert head_s < VERY_LONG_S  # of which the first token needs all
    assert data.startswith(sign + sign)
    assert all(event.startswith((b"data: ", b"event: ")) for event in without(sign, data))


async def test_a_task_shows_that_it_lives_until_a_node_streams(tmp_path: Path) -> None:
    async with asked(tmp_path, a_thoughtful_pool(VERY_LONG_S), *TASK) as response:
        parts = response.aiter_raw()
        seen = await anext(parts)
        assert seen.startswith(COMMENT)
        while b"event: " not in seen:
            seen += await anext(parts)
    assert set(seen.partition(b"event: ")[0].split(b"\n\n")) == {COMMENT.strip(), b""}


@pytest.mark.parametrize(("path", "body", "sign"), DIALECTS)
async def test_a_stream_that_does_not_wait_has_no_signs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    sign: bytes,
) -> None:
    monkeypatch.setattr(exchange, "SIGN_AFTER_S", 10.0)
    async with asked(tmp_path, a_thoughtful_pool(0.0), path, body) as response:
        assert sign not in await response.aread()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "slow", "prompt": "x", "max_tokens": 4}),
        ("/v1/completions", {"model": "cato-slow", "prompt": "x", "max_tokens": 4}),
        ("/v1/fim/completions", {"model": "slow", "prompt": "x", "max_tokens": 4}),
        ("/infill", {"model": "cato-slow", "prompt": "x", "n_predict": 4}),
    ],
)
async def test_completions_have_none_however_long_they_wait(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asked(tmp_path, a_thoughtful_pool(), path, body) as response:
        assert loop.time() - began_s >= LONG_S
        data = await response.aread()
    assert b"keep-alive" not in data
    assert b": ping" not in data


@pytest.mark.parametrize(("path", "body", "sign"), DIALECTS)
async def test_a_stream_that_stalls_in_the_middle_has_signs_between_whole_events(
    tmp_path: Path, path: str, body: dict[str, Any], sign: bytes
) -> None:
    pool = a_pool("sim-slow", "slow", step_s=0.02)
    body = {**body, "max_tokens": 50, "max_output_tokens": 50, "ignore_eos": True}
    async with asked(tmp_path, pool, path, body) as response:
        parts = response.aiter_raw()
        seen = await anext(parts)
        assert sign not in seen
        stalled = asyncio.create_task(pool.pause(ReplicaId("sim-slow#0"), LONG_S))
        while not stalled.done():
            seen += await anext(parts)
        assert seen.count(sign) >= 3
        seen += b"".join([part async for part in parts])
    assert all(event.startswith((b"data: ", b"event: ")) for event in without(sign, seen))


@pytest.mark.parametrize(
    ("path", "body", "sign", "words"),
    [
        (*CHAT, COMMENT, b'"code":"engine_lost"'),
        (*WORKFLOW, COMMENT, b'"code":"engine_lost"'),
        (*TASK, COMMENT, b'event: error\ndata: {"error":{'),
        (*RESPONSES, COMMENT, b"event: response.failed\n"),
        (*RESPONSES_OF_TASK, COMMENT, b"event: response.failed\n"),
        (*MESSAGE, PING, b"event: error\n"),
    ],
)
async def test_a_run_that_fails_after_the_head_went_out_ends_with_the_dialects_error_event(
    tmp_path: Path, path: str, body: dict[str, Any], sign: bytes, words: bytes
) -> None:
    pool = a_thoughtful_pool(60.0)
    async with asked(tmp_path, pool, path, body) as response:
        parts = response.aiter_raw()
        seen = await anext(parts)
        assert seen.startswith(sign)
        killing = asyncio.create_task(_kill_again_and_again(pool))
        try:
            seen += b"".join([part async for part in parts])
        finally:
            killing.cancel()
    assert response.status_code == 200
    opening = [b"created", b"in_progress"] if path == "/v1/responses" else []
    events = without(sign, seen)
    for kind in opening:  # OpenAI's SDK reads no stream that does not begin with it
        assert events.pop(0).startswith(b"event: response." + kind + b"\n")
    error, *rest = events
    assert words in error
    assert b"The model's engine was lost" in error
    assert rest in ([], [b"data: [DONE]\n\n"])


async def _kill_again_and_again(pool: LocalPool) -> None:
    """Engines die under the call until it is given up."""
    replica = ReplicaId("sim-slow#0")
    while True:
        await until_busy(pool)
        await pool.kill(replica)
        await pool.revive(replica)


async def test_a_client_that_leaves_between_signs_frees_the_engine(tmp_path: Path) -> None:
    pool = a_thoughtful_pool(60.0)
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit, kit.server() as url:
        path, body = CHAT
        async with (
            httpx.AsyncClient(base_url=url) as http,
            http.stream("POST", path, json={**body, "stream": True}) as response,
        ):
            await anext(response.aiter_raw())
            assert await pool.running() == 1
        await until_idle(pool, within_s=0.5)


async def test_a_refusal_before_the_first_sign_keeps_its_status(tmp_path: Path) -> None:
    path, body = CHAT
    too_long = {**body, "messages": [{"role": "user", "content": "x" * 50_000}]}
    async with asked(tmp_path, a_thoughtful_pool(), path, too_long) as response:
        await response.aread()
    assert response.status_code == 400


async def test_the_sdks_read_over_signs(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_thoughtful_pool(), workflows=(SLOW,)) as kit,
        kit.server() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as of_openai,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as of_anthropic,
    ):
        chat = await of_openai.chat.completions.create(
            model="slow", messages=[{"role": "user", "content": "x"}], max_tokens=4, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in chat if c.choices])
        answer = await of_openai.responses.create(
            model="slow", input="x", max_output_tokens=4, stream=True
        )
        kinds = [event.type async for event in answer]
        message = await of_anthropic.messages.create(
            model="slow", messages=[{"role": "user", "content": "x"}], max_tokens=4, stream=True
        )
        events = [event.type async for event in message]
    assert text
    assert kinds[-1] == "response.completed"
    assert events[-1] == "message_stop"
