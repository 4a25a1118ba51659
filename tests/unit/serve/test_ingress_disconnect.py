"""A client that leaves takes its run with it, down to the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_kit import (
    COMPLETION,
    SLOW,
    a_fast_pool,
    a_slow_pool,
    running,
    until,
    until_busy,
    until_idle,
)

FREE_WITHIN_S = 0.5
TASK = ("/v1/tasks/slow", {"inputs": {"instruction": "x"}})
VIRTUAL = (
    "/v1/chat/completions",
    {"model": "cato-slow", "messages": [{"role": "user", "content": "x"}]},
)
DIRECT = (
    "/v1/completions",
    {"model": "slow", "prompt": "x", "max_tokens": 3000, "ignore_eos": True},
)
RESPONSES = ("/v1/responses", {"model": "slow", "input": "x", "max_output_tokens": 3000})
MESSAGES = (
    "/v1/messages",
    {"model": "cato-slow", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3000},
)
FIM = ("/v1/fim/completions", {"model": "slow", "prompt": "x", "max_tokens": 3000})
INFILL = ("/infill", {"model": "cato-slow", "prompt": "x"})


@pytest.mark.parametrize(
    ("path", "body"), [TASK, VIRTUAL, DIRECT, RESPONSES, MESSAGES, FIM, INFILL]
)
async def test_leaving_a_stream_frees_the_engine(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    pool = a_slow_pool()
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit, kit.server() as url:
        body = {**body, "stream": True}
        async with (
            httpx.AsyncClient(base_url=url) as http,
            http.stream("POST", path, json=body) as response,
        ):
            await anext(response.aiter_lines())
            assert await pool.running() == 1
        await until_idle(pool, within_s=FREE_WITHIN_S)
        await until(lambda: len(kit.records.receipts) == 1, within_s=1)
        (receipt,) = kit.records.receipts.values()
    assert (receipt.status, receipt.problem) == ("cancelled", "the client left")
    assert pool.orchestrator.picture(0.0).replicas[0].held == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [TASK, DIRECT])
async def test_leaving_before_the_answer_frees_the_engine(
    tmp_path: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    # With a stream, the client leaves in the 10 s before the first token.
    pool = a_slow_pool()
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit, kit.server() as url:
        async with httpx.AsyncClient(base_url=url) as http:
            asked = asyncio.create_task(http.post(path, json={**body, "stream": stream}))
            await until_busy(pool)
            asked.cancel()
            await asyncio.wait([asked])
        await until_idle(pool, within_s=FREE_WITHIN_S)


async def test_leaving_the_queue_leaves_no_trace_in_it(tmp_path: Path) -> None:
    pool = a_slow_pool(slots=1)
    path, body = TASK
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit, kit.server() as url:
        async with (
            httpx.AsyncClient(base_url=url) as first,
            httpx.AsyncClient(base_url=url) as second,
        ):
            running_ = asyncio.create_task(first.post(path, json=body))
            await until_busy(pool)
            waiting = asyncio.create_task(second.post(path, json={**body, "stream": True}))
            await until(lambda: pool.orchestrator.picture(0.0).queued == 1, within_s=2)
            waiting.cancel()
            await asyncio.wait([waiting])
            await until(lambda: pool.orchestrator.picture(0.0).queued == 0, within_s=FREE_WITHIN_S)
            await until_busy(pool)  # the first may have yielded its slot for a moment
            assert not running_.done()
            running_.cancel()
            await asyncio.wait([running_])
        await until_idle(pool, within_s=FREE_WITHIN_S)


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/completions", {"model": "cato-completion", "prompt": "x"}, "data: [DONE]"),
        ("/v1/completions", {"model": "fast", "prompt": "x"}, "data: [DONE]"),
        ("/v1/responses", {"model": "fast", "input": "x"}, "event: response.completed"),
        ("/v1/responses", {"model": "cato-completion", "input": "x"}, "event: response.completed"),
        (
            "/v1/messages",
            {"model": "fast", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
            "event: message_stop",
        ),
    ],
)
async def test_leaving_after_the_last_event_is_no_cancellation(
    tmp_path: Path, path: str, body: dict[str, Any], last: str
) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.server() as url,
    ):
        async with (
            httpx.AsyncClient(base_url=url) as http,
            http.stream("POST", path, json={**body, "stream": True}) as response,
        ):
            async for line in response.aiter_lines():
                if line == last:
                    break
        await until(lambda: len(kit.records.receipts) == 1, within_s=1)
        (receipt,) = kit.records.receipts.values()
    assert receipt.status == "done"
