"""Every error is an OpenAI error object, with the status that clients treat right."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ingress_kit import (
    COMPLETION,
    GENERATION,
    MAX_BODY_BYTES,
    OF_JSON,
    SLOW,
    a_fast_pool,
    a_pool,
    a_slow_pool,
    an_access,
    running,
    sse_events,
    until,
    until_busy,
    workflows_of,
)
from starlette.exceptions import HTTPException

from cato.core.commands import Dispatch
from cato.core.errors import (
    CapacityError,
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    ExpressionError,
    InputError,
    LinkCallError,
    NodeError,
    NotLoadedError,
    QuotaError,
    ReplicaLostError,
    RouterAwayError,
    StartingError,
    UnknownNameError,
)
from cato.core.ids import PoolName, ReplicaId
from cato.core.snapshot import Invocation
from cato.core.tenancy import Access, ApiKey, Tenant
from cato.lab.chaos.local_pools import LocalPools, LocalRecords
from cato.serve.access.caller import Caller
from cato.serve.access.keys import digest_of
from cato.serve.ingress.app import create_app
from cato.serve.ingress.failures import failure_of_error
from cato.serve.nodes.runner import NodeRunner
from cato.serve.service import TaskService

OF_ONE = [{"role": "user", "content": "x"}]
NO_THOUGHT = [{"type": "reasoning", "summary": []}]
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
        (CapacityError("down", "9 wait", 1.5), 429, "no_replica"),
        (NotLoadedError("full", "no config.json", 4.0), 429, "model_not_loaded"),
        (RouterAwayError("full", "its router does not answer", 5.0), 429, "router_away"),
        (StartingError("no pool is known yet"), 503, "starting"),
        (QuotaError("requests per minute", 12.0), 429, "rate_limit_exceeded"),
        (QuotaError("tokens per month", 9e5, is_budget=True), 429, "insufficient_quota"),
        (EngineError("temperature must be positive", 400), 400, None),
        (EngineError("Not Found", 404), 404, "not_supported"),
        (EngineError("cuda error"), 502, "engine_failed"),
        (EngineError("too many requests", 429), 429, "rate_limit_exceeded"),
        (EngineDeadError("killed", 503), 429, "engine_lost"),
        (LinkCallError("the call failed: KeyError('x')"), 500, "internal_error"),
        (ReplicaLostError("r1", "gone"), 429, "engine_lost"),
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
    full = failure_of_error(CapacityError("p", "full", 4.5), lambda _: True)
    assert deadline.headers == {"x-should-retry": "false"}
    assert full.headers == {"Retry-After": "5", "retry-after-ms": "4500"}


@pytest.mark.parametrize(
    ("error", "after_s"),
    [
        (CapacityError("p", "full", 0.2), 3),
        (CapacityError("p", "full", 300.0), 40),
        (CapacityError("down", "9 wait", 1.0), 3),
        (NotLoadedError("p", "no config.json", 600.0), 40),
        (RouterAwayError("p", "its router does not answer", 5.0), 5),
        (ReplicaLostError("r1", "gone"), 3),
        (EngineDeadError("killed", 503), 3),
    ],
)
def test_a_refusal_names_a_time_that_every_agent_waits_for(error: Exception, after_s: int) -> None:
    failure = failure_of_error(error, lambda pool: pool != "down")
    assert failure.headers == {"Retry-After": f"{after_s}", "retry-after-ms": f"{after_s}000"}


@pytest.mark.parametrize(
    ("path", "after_s"),
    [
        ("/v1/completions", 300),
        ("/v1/chat/completions", 40),
        ("/v1/responses", 40),
        ("/t/generation/v1/messages", 40),
    ],
)
async def test_agents_are_never_told_to_wait_for_longer_than_they_do(
    tmp_path: Path, path: str, after_s: int
) -> None:
    key = ApiKey("0123456789", digest_of("x" * 43), "team")
    access = an_access(Access((key,), (Tenant("team", tokens_per_minute=60),)))
    access.reserve(Caller(key.id, "team"), 310, 310)(
        310
    )  # one flows in each second, after a burst of 10
    body = {
        "model": "fast", "input": "x", "max_tokens": 1,
        "messages": [{"role": "user", "content": "x"}],
    }  # fmt: skip
    if path == "/v1/completions":
        body["prompt"] = "x"
    async with (
        running(tmp_path, a_fast_pool(), workflows=(GENERATION,), access=access) as kit,
        kit.http() as http,
    ):
        secret = f"cato_0123456789_{'x' * 43}"
        response = await http.post(path, json=body, headers={"x-api-key": secret})
    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) == pytest.approx(after_s, abs=5)
    assert re.search(r"retry in (29\d|300)", response.headers["X-CATO-Problem"])


def too_long(error: ContextLengthError) -> tuple[str, str, str]:
    """What completions, OpenAI's conversations and Anthropic's are told."""
    failure = failure_of_error(error, lambda _: True)
    constant: Any = failure.as_json()
    conversation: Any = failure.as_json(in_conversation=True)
    anthropic: Any = failure.as_anthropic()
    assert conversation["error"]["code"] == "context_length_exceeded"
    return tuple(v["error"]["message"] for v in (constant, conversation, anthropic))  # type: ignore[return-value]


def test_a_prompt_that_is_too_long_is_told_with_its_numbers_in_words_that_make_agents_compact() -> (
    None
):
    _, openai_words, anthropic_words = too_long(
        ContextLengthError("x", prompt_tokens=5000, max_tokens=100, context_tokens=4096)
    )
    assert openai_words == (
        "This model's maximum context length is 4096 tokens. However, your input has 5000 tokens, "
        "and you asked for 100 output tokens. Please shorten the input."
    )
    assert anthropic_words == "prompt is too long: 5000 tokens > 4096 maximum"


def test_a_prompt_that_leaves_no_room_for_the_answer_is_told_the_numbers_of_both() -> None:
    _, openai_words, anthropic_words = too_long(
        ContextLengthError("x", prompt_tokens=4000, max_tokens=100, context_tokens=4096)
    )
    assert "maximum context length is 4096 tokens" in openai_words
    assert "4100 tokens (4000 in the input, 100 for the output)" in openai_words
    assert anthropic_words.startswith(
        "input length and `max_tokens` exceed context limit: 4000 + 100 > 4096"
    )


@pytest.mark.parametrize(
    "error", [ContextLengthError("x"), ContextLengthError("x", max_tokens=9, context_tokens=5)]
)
def test_a_prompt_of_unknown_length_is_called_too_long_all_the_same(
    error: ContextLengthError,
) -> None:
    _, openai_words, anthropic_words = too_long(error)
    assert "maximum context length" in openai_words
    assert "prompt is too long" in anthropic_words
    assert "None" not in openai_words + anthropic_words


def test_completions_are_told_no_numbers_since_editors_show_each_text_once() -> None:
    one, other = (
        too_long(ContextLengthError("x", prompt_tokens=n, max_tokens=1, context_tokens=99))[0]
        for n in (100, 200)
    )
    assert one == other
    assert "maximum context length" in one


def test_the_numbers_of_a_prompt_that_is_too_long_survive_a_message_between_processes() -> None:
    sent = ContextLengthError("x", "prompt", prompt_tokens=7, max_tokens=1, context_tokens=5)
    come = pickle.loads(pickle.dumps(sent))
    numbers = (come.prompt_tokens, come.max_tokens, come.context_tokens)
    assert (str(come), come.param, numbers) == ("x", "prompt", (7, 1, 5))


class Uncounting(LocalPools):
    """Its engines say that a prompt is too long, and not how long it is."""

    async def lease(self, pool: PoolName, invocation: Invocation) -> Dispatch:
        raise ContextLengthError("at least 4097 input tokens", context_tokens=4096)


async def test_a_prompt_that_no_engine_counted_to_its_end_is_told_as_estimated(
    tmp_path: Path,
) -> None:
    messages = [{"role": "user", "content": "for item in items:\n" * 1_900}]
    async with Uncounting(a_fast_pool()) as pools:
        service = TaskService(
            workflows_of(tmp_path, COMPLETION), pools, NodeRunner({}), LocalRecords(pools), seed=1
        )
        app = create_app(
            service, max_body_bytes=99_999, ready=lambda: (True, ""), access=an_access()
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"model": "fast", "max_tokens": 9, "messages": messages}
            message = (await http.post("/v1/messages", json=body)).json()["error"]["message"]
    told = re.fullmatch(r"prompt is too long: (\d+) tokens > 4096 maximum", message)
    assert told is not None
    assert int(told[1]) == pytest.approx(10_000, rel=0.3)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_dialect_says_in_its_words_that_a_conversation_is_too_long(
    tmp_path: Path, stream: bool
) -> None:
    text = "x" * 50_000
    messages = [{"role": "user", "content": text}]
    body = {"model": "fast", "max_tokens": 100, "stream": stream}
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        chat = await http.post("/v1/chat/completions", json={**body, "messages": messages})
        anthropic = await http.post("/v1/messages", json={**body, "messages": messages})
        responses = await http.post("/v1/responses", json={**body, "input": text})
    for answer in (chat, responses):
        error = check_error_object(answer)
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert re.search(
            r"maximum context length is 4096 tokens\. .*\b1\d{4} tokens", error["message"]
        )
    message = anthropic.json()["error"]["message"]
    assert anthropic.status_code == 400
    assert re.fullmatch(r"prompt is too long: 1\d{4} tokens > 4096 maximum", message)


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


HALF = "the end \ud83d"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": HALF}),
        ("/v1/completions", {"prompt": "x", "stop": HALF}),
        ("/v1/completions", {"prompt": "x", "stop": ["\udd89"], "model": "cato-completion"}),
        ("/v1/completions", {"prompt": "x", HALF: 1}),
        ("/v1/completions", {"segments": {"prefix": HALF}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}),
        ("/v1/responses", {"input": HALF}),
        ("/v1/messages", {"messages": OF_ONE, "max_tokens": 3, "stop_sequences": [HALF]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": HALF}]}),
        ("/v1/fim/completions", {"prompt": HALF}),
        ("/infill", {"input_prefix": HALF}),
        ("/tokenize", {"prompt": HALF}),
        ("/v1/tasks/code-completion", {"inputs": {"prefix": HALF}}),
    ],
)
async def test_half_of_an_emoji_is_refused_before_any_engine(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    if not path.startswith("/v1/tasks"):
        body = {"model": "fast", **body}
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        written = json.dumps(body)
        for content in (written, written.replace("\\ud", "\\uD")):
            response = await http.post(path, content=content)
            assert response.status_code == 400, response.text
            assert "half of an emoji" in response.json()["error"]["message"]
        assert not kit.records.receipts


@pytest.mark.parametrize(
    "prompt", ["🦉", "\\ud83d", "\\ud83d\\", "한국어 ퟻ", "x" + "🦉" * 9, "\ufeff", "\U00010000"]
)
async def test_whole_characters_pass_however_they_are_written(tmp_path: Path, prompt: str) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        body = {"model": "fast", "prompt": prompt, "stop": prompt}
        for is_ascii in (True, False):
            written = json.dumps(body, ensure_ascii=is_ascii)
            for content in (written.encode(), b"\xef\xbb\xbf" + written.encode()):
                response = await http.post("/v1/completions", content=content)
                assert response.status_code == 200, response.text


async def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    whole = json.dumps({"model": "fast", "prompt": HALF}, ensure_ascii=False)
    contents = (whole.encode("utf-8", "surrogatepass"), b'{"model": "fast", "prompt": "\xff"}')
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        for content in contents:
            response = await http.post("/v1/completions", content=content)
            assert response.status_code == 400
            assert check_error_object(response)["message"] == "the body is not valid UTF-8 text"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/tasks/code-completion"])
async def test_a_compressed_body_is_refused_with_what_to_do(tmp_path: Path, path: str) -> None:
    body = json.dumps({"model": "fast", "prompt": "x"}).encode()
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        for encoding in ("gzip", "GZIP", "br", "deflate, gzip", "identity, gzip"):
            headers = {"Content-Encoding": encoding}
            response = await http.post(path, content=gzip.compress(body), headers=headers)
            assert response.status_code == 415
            assert "send the body uncompressed" in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
async def test_a_body_that_says_it_is_not_compressed_is_read(tmp_path: Path, encoding: str) -> None:
    headers = {"Content-Encoding": encoding}
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        body = {"model": "fast", "prompt": "x"}
        response = await http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text


async def test_a_body_without_a_length_is_bounded_too(tmp_path: Path) -> None:
    async def endless() -> Any:
        for _ in range(200):
            yield b"x" * 1000

    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url, headers=OF_JSON) as http,
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


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    ],
)
async def test_a_conversation_that_the_engine_refuses_has_its_reason_in_the_message(
    tmp_path: Path, path: str, said: dict[str, object]
) -> None:
    """SDKs and agents show the message, and no header."""
    body = {"model": "fast", "temperature": -1, **said}
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        response = await http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith(f": {response.headers['X-CATO-Problem']}")


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


async def test_a_client_that_would_leave_first_is_refused_at_once_and_told_why(
    tmp_path: Path,
) -> None:
    """The call that runs takes a minute, and all agents wait longer than that."""
    pool = a_slow_pool(slots=1)
    body = {"model": "slow", "prompt": "x"}
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit, kit.http() as http:
        asked = await fill(http, pool, 1)
        hasty = {"x-stainless-read-timeout": "20.0"}
        response = await http.post("/v1/completions", json=body, headers=hasty)
        agent = {"user-agent": "claude-cli/2.1.330"}
        asked.append(asyncio.create_task(http.post("/v1/completions", json=body, headers=agent)))
        await until(lambda: pool.orchestrator.picture(0.0).queued == 1, within_s=2)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
    error = check_error_object(response)
    assert (response.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert "its client leaves in" in response.headers["X-CATO-Problem"]
    assert 3 <= int(response.headers["Retry-After"]) <= 40
    receipt = next(r for r in kit.records.receipts.values() if r.status == "failed")
    (llm,) = [node.llm for node in receipt.nodes if node.llm is not None]
    assert llm.reasons[0].startswith("refused: its first token is expected in")


async def test_no_replica_and_no_room_to_wait_is_429(tmp_path: Path) -> None:
    pool = a_pool("sim-fast", "fast", replicas=0, max_queued=0)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit, kit.http() as http:
        response = await http.post("/v1/completions", json={"model": "fast", "prompt": "x"})
    error = check_error_object(response)
    assert (response.status_code, error["code"]) == (429, "no_replica")
    assert int(response.headers["Retry-After"]) >= 3


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": OF_ONE, "cato": {"receipt": 1}}),
        ("/v1/completions", {"prompt": "x", "cato": {"receipt": "yes"}}),
        ("/v1/fim/completions", {"prompt": "x", "stream_options": {"include_usage": 1}}),
        ("/v1/fim/completions", {"prompt": "x", "stream_options": "x"}),
    ],
)
async def test_a_request_that_is_refused_leaves_nothing_running(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    slow = a_slow_pool()
    async with running(tmp_path, slow, workflows=(COMPLETION,)) as kit, kit.http() as http:
        answer = await http.post(path, json={"model": "slow", "max_tokens": 900, **body})
        await asyncio.sleep(0.2)
        assert await slow.running() == 0
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "cato-generation", "input": NO_THOUGHT}),
        ("/v1/responses", {"input": NO_THOUGHT}),
        ("/v1/completions", {"model": "fast", "prompt": "x", "max_completion_tokens": -2}),
        ("/v1/messages", {"model": "fast", "messages": OF_ONE, "max_output_tokens": -2}),
    ],
)
async def test_odd_fields_are_no_defects_of_the_server(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as kit,
        kit.http() as http,
    ):
        answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
