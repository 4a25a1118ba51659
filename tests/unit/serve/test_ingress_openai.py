"""The OpenAI dialect, by the types of the openai package and by its client."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ingress_kit import (
    COMPLETION,
    GENERATION,
    a_fast_pool,
    a_slow_pool,
    running,
    sse_events,
    workflows_of,
)
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from cato.engines.simulated import simulated_text
from cato.workflows.fim import render_fim

WORKFLOWS = (COMPLETION, GENERATION)
PROMPT = {"prompt": "def add(a, b):\n    return "}
MESSAGES = {"messages": [{"role": "user", "content": "Write add."}]}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def strict(kind: Any, value: Any) -> Any:
    """`value` as `kind`; fails unless every field has exactly the declared type."""
    # A chunk of a completion has no finish reason yet; OpenAI's type leaves that out.
    choices = value.get("choices", [])
    patched = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in choices]
    as_typed = {**value, "choices": patched} if kind is Completion else value
    return TypeAdapter(kind).validate_python(as_typed, strict=True)


async def post(folder: Path, path: str, body: Any, **headers: str) -> httpx.Response:
    async with running(folder, a_fast_pool(), workflows=WORKFLOWS) as kit, kit.http() as http:
        return await http.post(path, json=body, headers=headers)


async def get(folder: Path, path: str) -> httpx.Response:
    async with running(folder, a_fast_pool(), workflows=WORKFLOWS) as kit, kit.http() as http:
        return await http.get(path)


def chunks_of(response: httpx.Response, kind: Any) -> list[Any]:
    """All chunks, each checked against `kind`; the stream must end with `[DONE]`."""
    *events, end = sse_events(response.text)
    assert end == ("", "[DONE]")
    for _, value in events:
        strict(kind, value)
    return [value for _, value in events]


def text_of(chunks: list[Any]) -> str:
    choices = [c["choices"][0] for c in chunks if c["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


async def test_models_are_real_ones_with_aliases_then_virtual_ones(tmp_path: Path) -> None:
    answer = (await get(tmp_path, "/v1/models")).json()
    for model in answer["data"]:
        strict(Model, model)
    assert [m["id"] for m in answer["data"]] == [
        "sim-fast",
        "fast",
        "cato-completion",
        "cato-generation",
        "cato-auto",
    ]
    for name in ("max_model_len", "max_input_tokens", "context_length"):
        assert {m[name] for m in answer["data"]} == {4096}
    assert {m["owned_by"] for m in answer["data"]} == {"cato"}


async def test_models_follow_the_workflows(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        kit.service.follow(workflows_of(tmp_path, GENERATION), "")
        added = await http.get("/v1/models/cato-code-generation")
        removed = await http.get("/v1/models/cato-completion")
    assert added.json()["root"] == "code-generation"
    assert (removed.status_code, removed.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("name", ["fast", "cato-completion", "cato-code-completion"])
async def test_a_model_is_found_by_every_name_it_answers_to(tmp_path: Path, name: str) -> None:
    assert (await get(tmp_path, f"/v1/models/{name}")).json()["id"] == name


async def test_an_unknown_model_is_not_found(tmp_path: Path) -> None:
    for response in (
        await get(tmp_path, "/v1/models/org/nope"),
        await post(tmp_path, "/v1/completions", {"model": "nope", **PROMPT}),
        await post(tmp_path, "/v1/chat/completions", {"model": "cato-nope", **MESSAGES}),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert "cato-completion" in error["message"]


async def test_a_virtual_model_completes_through_its_workflow(tmp_path: Path) -> None:
    body = {"model": "cato-completion", **PROMPT, "suffix": "\n", "max_tokens": 4096}
    response = await post(tmp_path, "/v1/completions", body)
    answer = response.json()
    completion = strict(Completion, answer)
    prompt = render_fim("starcoder", str(PROMPT["prompt"]), "\n", "")
    assert completion.choices[0].text == simulated_text(0, prompt, 12)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["cato"]["task"] == response.headers["X-CATO-Task"] == "code-completion"


async def test_a_virtual_model_streams_chunks_and_its_receipt_last(tmp_path: Path) -> None:
    body = {"model": "cato-completion", **PROMPT}
    whole = (await post(tmp_path, "/v1/completions", body)).json()
    response = await post(tmp_path, "/v1/completions", {**body, "stream": True})
    chunks = chunks_of(response, Completion)
    assert text_of(chunks) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["cato"]["met"] is True
    assert all("usage" not in c for c in chunks)


async def test_a_virtual_model_ends_with_a_usage_chunk_when_asked(tmp_path: Path) -> None:
    body = {"model": "cato-completion", **MESSAGES, **USAGE}
    chunks = chunks_of(await post(tmp_path, "/v1/chat/completions", body), ChatCompletionChunk)
    *_, last, usage = chunks
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0]["finish_reason"] == "length"
    assert "cato" not in last
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["cato"]["status"] == "done"


async def test_text_that_the_output_adds_to_the_stream_is_sent_too(tmp_path: Path) -> None:
    body = {"model": "cato-generation", **MESSAGES, "stream": True}
    chunks = chunks_of(await post(tmp_path, "/v1/chat/completions", body), ChatCompletionChunk)
    assert text_of(chunks).endswith(" # 8 tokens")


async def test_one_user_message_is_the_main_input(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Write "}, {"type": "text", "text": "add."}]
    body = {"model": "cato-generation", "messages": [{"role": "user", "content": parts}]}
    extra = {"cato": {"inputs": {"language": "go"}, "sla": {"target_ms": 700}}}
    response = await post(tmp_path, "/v1/chat/completions", {**body, **extra})
    answer = strict(ChatCompletion, response.json())
    expected = simulated_text(0, "go: Write add.", 8)
    assert answer.choices[0].message.content == f"{expected} # 8 tokens"
    assert response.headers["X-CATO-SLA"] == "ttft=700ms"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": ["a", "b"]}, "prompt"),
        ("completions", {"prompt": [1, 2, 3]}, "prompt"),
        ("completions", {**PROMPT, "suffix": 3}, "suffix"),
        ("completions", {**PROMPT, "n": 2}, "n"),
        ("completions", {**PROMPT, "stream": "yes"}, "stream"),
        ("completions", {**PROMPT, "cato": {"input": {}}}, "input"),
        ("completions", {**PROMPT, "model": 3}, "model"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": "hello"}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages.content"),
        (
            "chat/completions",
            {**MESSAGES, "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ("chat/completions", {**MESSAGES, "logprobs": True}, "logprobs"),
        ("chat/completions", {**MESSAGES, "temperature": "hot"}, "temperature"),
        ("completions", {**PROMPT, "top_p": 2}, "top_p"),
        ("completions", {**PROMPT, "echo": True}, "echo"),
        ("completions", {**PROMPT, "seed": 0.5}, "seed"),
    ],
)
async def test_what_a_task_cannot_take_is_refused_by_field(
    tmp_path: Path, path: str, body: dict[str, object], param: str
) -> None:
    response = await post(tmp_path, f"/v1/{path}", {"model": "cato-completion", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_task_without_suffix_refuses_one(tmp_path: Path) -> None:
    body = {"model": "cato-generation", **PROMPT, "suffix": "x"}
    response = await post(tmp_path, "/v1/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")


async def test_a_real_model_is_called_directly(tmp_path: Path) -> None:
    body = {"model": "fast", **PROMPT, "max_tokens": 5, "user": "me", "priority": -9, "seed": None}
    response = await post(tmp_path, "/v1/completions", body)
    completion = strict(Completion, response.json())
    assert completion.choices[0].text == simulated_text(0, str(PROMPT["prompt"]), 5)
    assert response.json()["cato"]["nodes"][0]["llm"]["model"] == "sim-fast"
    assert response.headers["X-CATO-SLA"] == "ttft=1500ms"


async def test_a_suffix_is_rendered_for_the_family_of_the_model(tmp_path: Path) -> None:
    body = {"model": "fast", **PROMPT, "suffix": "\n\nprint(add(1, 2))", "max_tokens": 5}
    response = await post(tmp_path, "/v1/completions", body)
    prompt = render_fim("starcoder", str(PROMPT["prompt"]), "\n\nprint(add(1, 2))", "")
    assert response.json()["choices"][0]["text"] == simulated_text(0, prompt, 5)


async def test_a_direct_stream_is_the_engines_own_without_its_usage(tmp_path: Path) -> None:
    body = {"model": "fast", **PROMPT, "max_tokens": 5, "stream": True}
    chunks = chunks_of(await post(tmp_path, "/v1/completions", body), Completion)
    assert text_of(chunks) == simulated_text(0, str(PROMPT["prompt"]), 5)
    assert all(c["choices"] and "cato" not in c for c in chunks)


async def test_a_direct_stream_has_receipt_and_usage_in_the_usage_chunk(tmp_path: Path) -> None:
    body = {"model": "fast", **MESSAGES, "max_tokens": 5, **USAGE}
    chunks = chunks_of(await post(tmp_path, "/v1/chat/completions", body), ChatCompletionChunk)
    assert [c["choices"] == [] for c in chunks[-2:]] == [False, True]
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["cato"]["output_tokens"] == 5


@pytest.mark.parametrize("by_header", [True, False])
async def test_a_direct_stream_has_a_receipt_on_demand(tmp_path: Path, by_header: bool) -> None:
    body = {"model": "fast", **PROMPT, "max_tokens": 5, "stream": True}
    headers = {"X-CATO-Receipt": "1"} if by_header else {}
    if not by_header:
        body["cato"] = {"receipt": True}
    chunks = chunks_of(await post(tmp_path, "/v1/completions", body, **headers), Completion)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["cato"]["status"] == "done"
    assert "usage" not in chunks[-1]
    assert chunks[-1]["id"] == chunks[0]["id"]


async def test_odd_characters_survive(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=WORKFLOWS) as kit, kit.http() as http:
        for text in ("naïve 🦉", "nul \x00"):
            for model, stream in itertools.product(("cato-generation", "fast"), (False, True)):
                body = {"model": model, "prompt": text, "suffix": None, "stream": stream}
                response = await http.post("/v1/completions", content=json.dumps(body))
                assert response.status_code == 200, response.text


async def test_the_openai_client_works_against_a_server(tmp_path: Path) -> None:
    pools = (a_fast_pool(), a_slow_pool())
    async with running(tmp_path, *pools, workflows=WORKFLOWS) as kit, kit.server() as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client:
            models = [m.id async for m in client.models.list()]
            whole = await client.completions.create(model="cato-completion", prompt="def f(")
            stream = await client.completions.create(
                model="cato-completion", prompt="def f(", stream=True
            )
            streamed = "".join([c.choices[0].text async for c in stream])
            chat = await client.chat.completions.create(
                model="slow",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=5,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [c async for c in chat]
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.completions.create(model="nope", prompt="x")
            with pytest.raises(openai.BadRequestError) as too_long:
                await client.completions.create(model="fast", prompt="x " * 20_000)
            raw = await client.completions.with_raw_response.create(model="fast", prompt="x")
    assert "cato-completion" in models
    assert streamed == whole.choices[0].text
    assert whole.model_extra is not None
    assert whole.model_extra["cato"]["met"] is True
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert unknown.value.code == "model_not_found"
    assert too_long.value.code == "context_length_exceeded"
    assert "maximum context length" in too_long.value.message
    assert raw.headers["openai-processing-ms"].isdigit()
