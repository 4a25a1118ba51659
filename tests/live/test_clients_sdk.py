"""The SDKs and the dialects they speak, unmodified, against CATO in front of real vLLM.

Every raw answer and event is also checked against the SDK's own types, strictly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from mistralai.client import Mistral
from openai import OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cato.workflows.fim import render_fim
from tests.live.conftest import App

pytestmark = [pytest.mark.live, pytest.mark.vllm]

PREFIX = "def read(path):\n    with open(path) as file:\n        return "
SUFFIX = "\n"
SAID = [{"role": "user", "content": "Read a file."}]
# In each dialect: path, body, the type of a whole answer, that of a chunk or event.
ASK: dict[str, tuple[str, dict[str, object], Any, Any]] = {
    "completions": (
        "/v1/completions",
        {"model": "demo-coder", "prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 12},
        Completion,
        Completion,
    ),
    "chat": (
        "/v1/chat/completions",
        {
            "model": "demo-coder",
            "messages": [{"role": "developer", "content": "Be brief."}, *SAID],
            "max_tokens": 12,
        },
        ChatCompletion,
        ChatCompletionChunk,
    ),
    "responses": (
        "/v1/responses",
        {"model": "demo-coder", "input": SAID, "max_output_tokens": 12, "store": True},
        Response,
        ResponseStreamEvent,
    ),
    "messages": (
        "/v1/messages",
        {"model": "demo-coder", "messages": SAID, "max_tokens": 12},
        Message,
        RawMessageStreamEvent,
    ),
}


def strict(kind: Any, value: Any) -> Any:
    """`value` as `kind`, from JSON: fails unless every field has exactly the declared type."""
    if kind is Completion:  # has no finish reason yet; OpenAI's type leaves that out
        choices = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in value["choices"]]
        value = {**value, "choices": choices}
    return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)


def events_of(app: App, path: str, body: dict[str, object]) -> Iterator[Any]:
    with httpx.stream("POST", f"{app.url}{path}", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def text_in(value: Any) -> str:
    """The text of an answer, a chunk or an event of any of the dialects."""
    match value:
        case {"output": list(items)}:
            return "".join(p["text"] for item in items for p in item.get("content", ()))
        case {"type": "message", "content": list(blocks)}:
            return "".join(block.get("text", "") for block in blocks)
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return text
        case {"type": "content_block_delta", "delta": {"text": str(text)}}:
            return text
        case {"choices": [{"text": str(text)}]}:
            return text
        case {"choices": [{"message": {"content": str(text)}}]}:
            return text
        case {"choices": [{"delta": {"content": str(text)}}]}:
            return text
        case _:
            return ""


@pytest.mark.parametrize("dialect", ASK)
def test_answers_and_streams_have_the_types_of_their_sdk_and_the_same_text(
    app: App, dialect: str
) -> None:
    path, body, whole_type, event_type = ASK[dialect]
    for model in (body["model"], "cato-completion"):
        asked = {**body, "model": model, "temperature": 0}
        whole = app.post(path, asked)
        assert whole.status_code == 200, whole.text
        strict(whole_type, whole.json())
        receipt = whole.json()["cato"]
        assert receipt["status"] == "done"
        events = list(events_of(app, path, {**asked, "stream": True}))
        for event in events:
            strict(event_type, event)
        text = text_in(whole.json())
        assert text
        if model == "demo-coder":  # greedy: the other's simulated engines have seeds of their own
            assert "".join(map(text_in, events)) == text
            assert receipt["nodes"][0]["llm"]["output_tokens"] > 0
            assert receipt["nodes"][0]["llm"]["prompt_tokens"] > 0


@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_the_first_token_of_a_relayed_stream_is_no_announcement(app: App, dialect: str) -> None:
    path, body, *_ = ASK[dialect]
    *_, last = events_of(app, path, {**body, "stream": True})
    receipt = last.get("response", last)["cato"]
    llm = receipt["nodes"][0]["llm"]
    assert llm["engine_ttft_s"] <= receipt["ttft_s"] <= receipt["e2e_s"]


def test_a_conversation_with_results_of_tools_is_answered(app: App) -> None:
    sdk = OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0)
    call = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    answer = sdk.chat.completions.create(
        model="demo-coder",
        messages=[  # type: ignore[arg-type, list-item]
            {"role": "user", "content": [{"type": "text", "text": "Read a file."}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "x = 1"},
        ],
        tools=[{"type": "function", "function": {"name": "read", "parameters": {}}}],
        tool_choice="none",
        max_tokens=8,
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_the_models_are_listed_for_every_sdk(app: App) -> None:
    data = app.get("/v1/models").json()["data"]
    for model in data:
        strict(Model, model)
    client = anthropic.Anthropic(base_url=app.url, api_key="none")
    assert {m.id for m in client.models.list()} >= {"demo-coder", "cato-completion"}


def test_mistrals_sdk_fills_in_the_middle(app: App) -> None:
    with Mistral(api_key="none", server_url=app.url) as sdk:
        ask = {"model": "demo-coder", "prompt": PREFIX, "suffix": SUFFIX, "temperature": 0}
        whole = sdk.fim.complete(**ask, max_tokens=12)
        chunks = [e.data for e in sdk.fim.stream(**ask, max_tokens=12)]
    streamed = "".join(str(c.choices[0].delta.content or "") for c in chunks)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].message.content == streamed
    assert streamed.strip()


def test_sentinels_of_another_family_fill_in_the_same_middle(app: App) -> None:
    ask = {"model": "demo-coder", "max_tokens": 12, "temperature": 0}
    by_suffix = app.post("/v1/completions", {**ask, "prompt": PREFIX, "suffix": SUFFIX})
    prompt = render_fim("starcoder", PREFIX, SUFFIX)
    by_sentinels = app.post("/v1/completions", {**ask, "prompt": prompt})
    assert text_in(by_sentinels.json()) == text_in(by_suffix.json())


def test_anthropics_sdk_streams_and_counts(app: App) -> None:
    client = anthropic.Anthropic(base_url=app.url, api_key="none", max_retries=0)
    counted = client.messages.count_tokens(model="demo-coder", messages=SAID)  # type: ignore[arg-type]
    with client.messages.stream(
        model="demo-coder",
        messages=SAID,  # type: ignore[arg-type]
        max_tokens=12,
        system="Be brief.",
    ) as stream:
        message = stream.get_final_message()
    assert counted.input_tokens > 0
    assert message.usage.output_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(
            model="demo-coder",
            max_tokens=8,
            messages=[{"role": "user", "content": "word " * 3000}],
        )


def test_tokens_of_a_text_and_back(app: App) -> None:
    tokens = app.post("/tokenize", {"model": "demo-coder", "prompt": "def f(x):"}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    text = app.post("/detokenize", {"model": "demo-coder", "tokens": tokens["tokens"]}).json()
    assert text["prompt"].endswith("def f(x):")


def test_a_model_that_does_not_embed_says_so(app: App) -> None:
    sdk = OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0)
    for model in ("demo-coder", "sim-small"):
        with pytest.raises(openai.NotFoundError) as refused:
            sdk.embeddings.create(model=model, input="x")
        assert refused.value.code == "not_supported"


def test_an_answer_that_opencode_sends_back_is_read(app: App) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Read a file."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ]
    body = {"model": "demo-coder", "input": items, "max_output_tokens": 8}
    answer = app.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text


def test_responses_refuse_what_would_need_a_memory(app: App) -> None:
    sdk = OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        sdk.responses.create(model="demo-coder", input="x", previous_response_id="resp_1")


def test_tabby_and_llama_fill_in_what_mistral_does(app: App) -> None:
    ask = {"model": "demo-coder", "prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8}
    mistral = app.post("/v1/fim/completions", {**ask, "temperature": 0}).json()
    llama = app.post(
        "/infill",
        {
            "model": "demo-coder",
            "input_prefix": PREFIX,
            "input_suffix": SUFFIX,
            "n_predict": 8,
            "temperature": 0,
        },
    ).json()
    assert llama["content"] == mistral["choices"][0]["message"]["content"]
    segments = {"prefix": PREFIX, "suffix": SUFFIX}
    tabby = app.post("/v1/completions", {"language": "python", "segments": segments}).json()
    assert tabby["choices"][0]["text"]
    event = {"type": "view", "completion_id": tabby["id"], "choice_index": 0}
    assert app.post("/v1/events", event).status_code == 200
