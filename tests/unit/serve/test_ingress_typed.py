"""Responses and Messages, by the types of their SDKs; counts of tokens, and what engines lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from ingress_kit import (
    COMPLETION,
    GENERATION,
    SLOW,
    a_fast_pool,
    a_slow_pool,
    running,
    sse_events,
)
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cato.core.ids import ReplicaId
from cato.engines.simulated import simulated_text

WORKFLOWS = (COMPLETION, GENERATION)
SAID = [{"role": "user", "content": "Write add."}]
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TASK_TEXT = f"{simulated_text(0, 'python: Write add.', 8)} # 8 tokens"
CALL_TEXT = simulated_text(0, "<|user|>Write add.\n<|assistant|>", 8)

# (path, body, text): each dialect by its workflow, and passed through to a model.
RESPOND_TASK = (RESPONSES, {"model": "cato-generation", "input": SAID}, TASK_TEXT)
RESPOND_CALL = (
    RESPONSES,
    {"model": "fast", "input": "Write add.", "max_output_tokens": 8, "store": True},
    CALL_TEXT,
)
MESSAGE_TASK = (
    MESSAGES,
    {"model": "cato-generation", "messages": SAID, "max_tokens": 99},
    TASK_TEXT,
)
MESSAGE_CALL = (MESSAGES, {"model": "fast", "messages": SAID, "max_tokens": 8}, CALL_TEXT)
ALL = [RESPOND_TASK, RESPOND_CALL, MESSAGE_TASK, MESSAGE_CALL]


async def post(folder: Path, path: str, body: Any) -> httpx.Response:
    async with running(folder, a_fast_pool(), workflows=WORKFLOWS) as kit, kit.http() as http:
        return await http.post(path, json=body)


def strict(kind: Any, value: Any) -> Any:
    """`value` as `kind`, from JSON: fails unless every field has exactly the declared type."""
    return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)


@pytest.mark.parametrize(("path", "body", "text"), ALL)
async def test_a_whole_answer_has_the_types_of_its_dialect(
    tmp_path: Path, path: str, body: dict[str, object], text: str
) -> None:
    value = (await post(tmp_path, path, body)).json()
    if path == RESPONSES:
        response = strict(Response, value)
        assert response.output_text == text
        assert response.usage.output_tokens == 8
    else:
        message = strict(Message, value)
        assert "".join(b.text for b in message.content) == text
        assert message.usage.output_tokens == 8
    assert value["cato"]["status"] == "done"


@pytest.mark.parametrize(("path", "body", "text"), ALL)
async def test_a_stream_has_the_types_of_its_dialect_and_its_receipt_last(
    tmp_path: Path, path: str, body: dict[str, object], text: str
) -> None:
    response = await post(tmp_path, path, {**body, "stream": True})
    events = sse_events(response.text)
    kind: Any = ResponseStreamEvent if path == RESPONSES else RawMessageStreamEvent
    for name, value in events:
        assert name == value["type"]
        strict(kind, value)
    values = [value for _, value in events]
    if path == RESPONSES:
        deltas = [v["delta"] for v in values if v["type"] == "response.output_text.delta"]
        assert [v["sequence_number"] for v in values] == list(range(len(values)))
        last = values[-1]["response"]
        assert last["output"][0]["content"][0]["text"] == text
    else:
        deltas = [v["delta"]["text"] for v in values if v["type"] == "content_block_delta"]
        last = values[-1]
        assert (values[0]["type"], last["type"]) == ("message_start", "message_stop")
        assert values[-2]["usage"]["output_tokens"] == 8
    assert "".join(deltas) == text
    assert last["cato"]["status"] == "done"
    assert last["cato"]["ttft_s"] <= last["cato"]["e2e_s"]


async def test_an_answer_that_was_cut_says_so(tmp_path: Path) -> None:
    path, body, _ = RESPOND_CALL
    response = (await post(tmp_path, path, {**body, "max_output_tokens": 2})).json()
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    path, body, _ = MESSAGE_CALL
    message = (await post(tmp_path, path, {**body, "max_tokens": 2})).json()
    assert message["stop_reason"] == "max_tokens"


async def test_instructions_and_system_reach_the_model(tmp_path: Path) -> None:
    expected = simulated_text(0, "<|system|>Be brief.\n<|user|>Write add.\n<|assistant|>", 8)
    developer = [{"role": "developer", "content": "Be brief."}, *SAID]
    chat = {"model": "fast", "messages": developer, "max_tokens": 8}
    path, body, _ = RESPOND_CALL
    for response in (
        await post(tmp_path, path, {**body, "instructions": "Be brief."}),
        await post(tmp_path, path, {**body, "input": developer}),
        await post(tmp_path, MESSAGES, {**MESSAGE_CALL[1], "system": "Be brief."}),
        await post(tmp_path, "/v1/chat/completions", chat),
    ):
        assert json.dumps(expected)[1:-1] in response.text


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_requests_with_tools_go_to_the_tasks_model(tmp_path: Path, path: str) -> None:
    body = (RESPOND_TASK if path == RESPONSES else MESSAGE_TASK)[1]
    tool = {"type": "function", "name": "read", "input_schema": {}, "parameters": {}}
    response = await post(tmp_path, path, {**body, "tools": [tool]})
    assert response.headers["X-CATO-Task"] == "model:sim-fast"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"input": None}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        (RESPONSES, {"max_output_tokens": "9"}, "max_output_tokens"),
    ],
)
async def test_what_responses_cannot_do_is_refused_by_field(
    tmp_path: Path, path: str, body: dict[str, object], param: str
) -> None:
    response = await post(tmp_path, path, {**RESPOND_TASK[1], **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"messages": "hello"}, 400, "invalid_request_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"stop_sequences": 3}, 400, "invalid_request_error"),
        ({"model": "claude-9"}, 404, "not_found_error"),
        ({"model": 3}, 400, "invalid_request_error"),
    ],
)
async def test_errors_of_messages_are_those_of_its_dialect(
    tmp_path: Path, body: dict[str, object], status: int, kind: str
) -> None:
    response = await post(tmp_path, MESSAGES, {**MESSAGE_TASK[1], **body})
    value = response.json()
    assert (response.status_code, value["type"], value["error"]["type"]) == (status, "error", kind)
    assert value["error"].keys() == {"type", "message"}


@pytest.mark.parametrize("model", ["fast", "cato-generation"])
async def test_tokens_are_counted_by_the_model_that_would_answer(
    tmp_path: Path, model: str
) -> None:
    body = {"model": model, "messages": SAID}
    counted = (await post(tmp_path, "/v1/messages/count_tokens", body)).json()
    answered = (await post(tmp_path, MESSAGES, {**MESSAGE_CALL[1]})).json()
    assert counted["input_tokens"] == answered["usage"]["input_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [1]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/score", {"text_1": "x", "text_2": ["y"]}),
        ("/score", {"text_1": "x", "text_2": ["y"]}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/v2/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
async def test_what_an_engine_does_not_serve_is_not_found(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    response = await post(tmp_path, path, {"model": "fast", **body})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_supported")
    assert "simulated" in response.headers["X-CATO-Problem"]
    unknown = await post(tmp_path, path, {"model": "nope", **body})
    assert unknown.json()["error"]["code"] == "model_not_found"


async def test_the_sdks_work_against_a_server(tmp_path: Path) -> None:
    pools = (a_fast_pool(), a_slow_pool())
    async with running(tmp_path, *pools, workflows=WORKFLOWS) as kit, kit.server() as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
            response = await sdk.responses.create(model="cato-generation", input="Write add.")
            async with sdk.responses.stream(model="fast", input="Write add.") as stream:
                streamed = await stream.get_final_response()
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        async with claude:
            message = await claude.messages.create(
                model="cato-generation",
                max_tokens=50,
                messages=[{"role": "user", "content": "Write add."}],
            )
            async with claude.messages.stream(
                model="slow", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
            ) as events:
                final = await events.get_final_message()
            models = [m.id async for m in claude.models.list()]
            with pytest.raises(anthropic.NotFoundError):
                await claude.messages.create(
                    model="nope", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
                )
    assert response.output_text == TASK_TEXT
    assert streamed.output_text.startswith(CALL_TEXT)
    assert message.content[0].type == "text"
    assert message.content[0].text == TASK_TEXT
    assert final.usage.output_tokens == 5
    assert "cato-generation" in models


async def test_a_lost_engine_ends_a_stream_with_an_error_that_clients_raise(
    tmp_path: Path,
) -> None:
    pool, schema = a_slow_pool(), {"type": "json_schema"}  # a grammar counts from the beginning
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit, kit.server() as url:
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        async with claude, httpx.AsyncClient(base_url=url) as http:
            stream = await claude.messages.create(
                model="slow",
                max_tokens=1000,
                messages=[{"role": "user", "content": "x"}],
                stream=True,
                extra_body={"output_config": {"format": schema}},
            )
            body = {"model": "slow", "input": "x", "stream": True, "text": {"format": schema}}
            async with http.stream("POST", RESPONSES, json=body) as responses:
                lines = responses.aiter_lines()
                await anext(aiter(stream))
                await anext(lines)
                await pool.kill(ReplicaId("sim-slow#0"))
                with pytest.raises(anthropic.APIStatusError, match="engine was lost"):
                    async for _ in stream:
                        pass
                told = [line async for line in lines if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in told]
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(events)))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    failed = strict(ResponseStreamEvent, events[-1])
    assert failed.type == "response.failed"
    assert failed.response.error.code == "server_error"
    assert "engine was lost" in failed.response.error.message
