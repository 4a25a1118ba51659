"""Every error is an OpenAI error object, with the status that clients treat right."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ingress_kit import (
    COMPLETION,
    MAX_BODY_BYTES,
    SLOW,
    a_fast_pool,
    a_pool,
    a_slow_pool,
    running,
    sse_events,
    until,
    until_busy,
)
from starlette.exceptions import HTTPException

from cato.core.errors import (
    CapacityError,
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    ExpressionError,
    InputError,
    NodeError,
    NotLoadedError,
    ReplicaLostError,
    UnknownNameError,
)
from cato.core.ids import ReplicaId
from cato.serve.ingress.errors import failure_of_error

BROKEN = """
name: broken
description: Its last node cannot work.
sla: {metric: ttft, target: 10s}
inputs: {instruction: {type: str}}
nodes:
  draft: {type: llm, model: fast, prompt: "{{ instruction }}", max_tokens: 4}
  parsed: {type: transform, needs: [draft], text: "{{ draft.text }} {", as_json: true}
stream: draft
output: parsed
"""

SHORT = """
name: short
description: Has 60 ms for what takes longer.
sla: {metric: e2e, target: 50ms, deadline: 60ms}
inputs: {instruction: {type: str}}
nodes:
  draft:
    type: llm
    model: slow
    prompt: "{{ instruction }}"
    max_tokens: 100
    extra: {ignore_eos: true}
output: draft
"""


def check_error_object(response: httpx.Response) -> dict[str, Any]:
    """The error, after checking that it has exactly OpenAI's four keys and a text for a code."""
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str | None)
    assert isinstance(error["message"], str)
    assert "overloaded" not in error["message"]
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UnknownNameError("model", "m", ()), 404, "model_not_found"),
        (UnknownNameError("task", "t", ()), 404, "task_not_found"),
        (UnknownNameError("node", "n", ()), 500, "node_failed"),
        (InputError("bad", "prompt"), 400, None),
        (ContextLengthError("too long by 7"), 400, "context_length_exceeded"),
        (DeadlineError(2.0), 504, "deadline_exceeded"),
        (CapacityError("full", "9 wait", 1.5), 429, "rate_limit_exceeded"),
        (CapacityError("down", "9 wait", 1.5), 503, "no_replica"),
        (NotLoadedError("full", "no config.json", 4.0), 503, "model_not_loaded"),
        (EngineError("temperature must be positive", 400), 400, None),
        (EngineError("Not Found", 404), 404, "not_supported"),
        (EngineError("cuda error"), 502, "engine_failed"),
        (EngineDeadError("killed", 503), 503, "engine_lost"),
        (ReplicaLostError("r1", "gone"), 503, "engine_lost"),
        (NodeError("check", "no code"), 500, "node_failed"),
        (ExpressionError("a.b", "a is undefined"), 500, "node_failed"),
        (HTTPException(404), 404, "not_found"),
        (HTTPException(405), 405, "method_not_allowed"),
        (HTTPException(413), 413, "request_too_large"),
        (RuntimeError("a defect"), 500, "internal_error"),
    ],
)
def test_each_error_has_its_status_and_code(
    error: Exception, status: int, code: str | None
) -> None:
    failure = failure_of_error(error, lambda pool: pool != "down")
    assert (failure.status, failure.code) == (status, code)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (CapacityError("a", "9 wait", 1.5), CapacityError("b", "1 waits", 9.0)),
        (ContextLengthError("1 too many"), ContextLengthError("2 too many")),
        (DeadlineError(1.0), DeadlineError(2.0)),
        (ReplicaLostError("r1", "x"), EngineDeadError("y", 503)),
        (NodeError("a", "x"), NodeError("b", "y")),
    ],
)
def test_the_text_of_a_kind_of_error_is_constant(one: Exception, other: Exception) -> None:
    first, second = (failure_of_error(e, lambda _: True) for e in (one, other))
    assert first.as_json() == second.as_json()


def test_only_what_cannot_get_better_forbids_a_retry() -> None:
    deadline = failure_of_error(DeadlineError(1.0), lambda _: True)
    full = failure_of_error(CapacityError("p", "full", 1.5), lambda _: True)
    assert deadline.headers == {"x-should-retry": "false"}
    assert full.headers == {"Retry-After": "2", "retry-after-ms": "1500"}


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b'{"model": NaN}', 400),
        ("POST", "/v1/completions", b"\xff", 400),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/completions", b"[1]", 400),
        ("POST", "/v1/completions", b"[" * 50_000, 400),
        ("POST", "/v1/completions", b"x" * (MAX_BODY_BYTES + 1), 413),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/v1/models/", b"", 404),
    ],
)
async def test_bad_requests_are_answered_in_the_same_form(
    tmp_path: Path, method: str, path: str, content: bytes, status: int
) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        response = await http.request(method, path, content=content)
    check_error_object(response)
    assert response.status_code == status


async def test_a_body_without_a_length_is_bounded_too(tmp_path: Path) -> None:
    async def endless() -> Any:
        for _ in range(200):
            yield b"x" * 1000

    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        response = await http.post("/v1/completions", content=endless())
    assert response.status_code == 413
    check_error_object(response)


async def test_a_prompt_beyond_the_context_says_so_in_the_words_clients_know(
    tmp_path: Path,
) -> None:
    body = {"model": "fast", "prompt": "x" * 50_000}
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        whole = await http.post("/v1/completions", json=body)
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
    for response in (whole, streamed):
        error = check_error_object(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length" in error["message"]
        assert "4096" in response.headers["X-CATO-Problem"]
        assert response.headers["X-CATO-Met"] == "false"


async def test_what_the_engine_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    body = {"model": "fast", "prompt": "x", "temperature": -1, "stream": True}
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "temperature" in check_error_object(response)["message"]


async def fill(http: httpx.AsyncClient, pool: Any, n: int) -> list[asyncio.Task[Any]]:
    """Ask `n` tasks of a pool with one slot: one runs, the others wait."""
    body = {"inputs": {"instruction": "x"}}
    asked = [asyncio.create_task(http.post("/v1/tasks/slow", json=body)) for _ in range(n)]
    await until_busy(pool)
    await until(lambda: pool.orchestrator.picture(0.0).queued == n - 1, within_s=2)
    return asked


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_refuses_with_429_and_says_when_to_come_again(
    tmp_path: Path, stream: bool
) -> None:
    pool = a_slow_pool(slots=1, max_queued=1)
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit, kit.http() as http:
        asked = await fill(http, pool, 2)
        body = {"model": "slow", "prompt": "x", "stream": stream}
        response = await http.post("/v1/completions", json=body)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
    error = check_error_object(response)
    assert (response.status_code, error["code"]) == (429, "rate_limit_exceeded")
    after_ms = int(response.headers["retry-after-ms"])
    assert after_ms >= 1000
    assert int(response.headers["Retry-After"]) == math.ceil(after_ms / 1000)


async def test_no_replica_and_no_room_to_wait_is_503(tmp_path: Path) -> None:
    pool = a_pool("sim-fast", "fast", replicas=0, max_queued=0)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        response = await http.post("/v1/completions", json={"model": "fast", "prompt": "x"})
    error = check_error_object(response)
    assert (response.status_code, error["code"]) == (503, "no_replica")
    assert int(response.headers["Retry-After"]) >= 1


async def test_a_passed_deadline_is_504_and_not_to_be_repeated(tmp_path: Path) -> None:
    async with running(tmp_path, a_slow_pool(), workflows=(SHORT,)) as kit, kit.http() as http:
        response = await http.post("/v1/tasks/short", json={"inputs": {"instruction": "x"}})
    error = check_error_object(response)
    assert (response.status_code, error["code"]) == (504, "deadline_exceeded")
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["X-CATO-Task"] == "short"


async def test_a_stream_that_fails_before_its_first_text_has_the_status_of_the_error(
    tmp_path: Path,
) -> None:
    body = {"inputs": {"instruction": "x"}, "stream": True}
    async with running(tmp_path, a_slow_pool(), workflows=(SHORT,)) as kit, kit.http() as http:
        response = await http.post("/v1/tasks/short", json=body)
    assert (response.status_code, check_error_object(response)["code"]) == (
        504,
        "deadline_exceeded",
    )


async def test_an_error_after_the_first_text_is_an_event_before_done(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(BROKEN,)) as kit, kit.http() as http:
        native = await http.post(
            "/v1/tasks/broken", json={"inputs": {"instruction": "x"}, "stream": True}
        )
        chat = await http.post(
            "/v1/completions", json={"model": "cato-broken", "prompt": "x", "stream": True}
        )
    *_, error, end = sse_events(native.text)
    assert (native.status_code, error[0], end) == (200, "error", ("", "[DONE]"))
    assert error[1]["error"]["code"] == "node_failed"
    *chunks, error, end = sse_events(chat.text)
    assert chunks
    assert error[1]["error"]["code"] == "node_failed"
    assert end == ("", "[DONE]")


async def test_a_lost_stream_that_cannot_go_on_ends_with_an_error_the_client_raises(
    tmp_path: Path,
) -> None:
    pool = a_slow_pool()
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit, kit.server() as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client:
            stream = await client.completions.create(
                model="slow", prompt="x", max_tokens=1000, stream=True, logprobs=1
            )
            await anext(aiter(stream))
            await pool.kill(ReplicaId("sim-slow#0"))
            with pytest.raises(openai.APIError, match="engine was lost"):
                async for _ in stream:
                    pass
