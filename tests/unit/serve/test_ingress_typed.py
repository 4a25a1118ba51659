"""Responses and Messages, by the types of their SDKs; counts of tokens, and what engines lack."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from ingress_kit import (
    COMPLETION,
    GENERATION,
    SLOW,
    a_fast_pool,
    a_pool,
    a_profile,
    a_slow_pool,
    running,
    sse_events,
)
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cato.core.errors import ContextLengthError, EngineError
from cato.core.ids import ReplicaId
from cato.core.receipt import SlaReceipt
from cato.core.session import Prompt
from cato.core.topology import EngineSpec
from cato.core.workflow import CallSettings
from cato.engines.base import EngineChunk, EngineRequest
from cato.engines.scripted.engine import ScriptedEngine
from cato.engines.simulated import SimulatedEngine, simulated_text
from cato.engines.simulated.asked import read_prompt
from cato.serve.prompts import tokenizing
from cato.wire.endpoint import Endpoint

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


# Writes a summary of each of the two halves; each may have been cut.
FAN_OUT = """
name: halves
description: Two calls at once.
sla: {metric: e2e, target: 10s}
inputs: {instruction: {type: str}}
nodes:
  halves:
    type: llm
    each: "[instruction, instruction]"
    max_items: 2
    model: fast
    prompt: "{{ item }}"
    max_tokens: 40
    extra: {ignore_eos: true}
output: halves
"""


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("task", ["generation", "halves"])
async def test_an_answer_whose_calls_were_cut_says_so_whatever_node_wrote_it(
    tmp_path: Path, task: str, is_streamed: bool
) -> None:
    body = {"model": f"cato-{task}", "messages": SAID, "max_tokens": 2, "stream": is_streamed}
    async with (
        running(tmp_path, a_fast_pool(), workflows=(*WORKFLOWS, FAN_OUT)) as kit,
        kit.http() as http,
    ):
        message = await http.post(MESSAGES, json=body)
        chat = await http.post("/v1/chat/completions", json=body)
        stopped = await http.post(
            MESSAGES, json={**body, "max_tokens": 40, "stop_sequences": ["e"]}
        )
    if is_streamed:
        ends = [sse_events(answer.text)[-2][1]["delta"] for answer in (message, stopped)]
        choice = sse_events(chat.text)[-2][1]["choices"][0]
    else:
        ends, choice = [message.json(), stopped.json()], chat.json()["choices"][0]
    assert ends[0]["stop_reason"] == "max_tokens"
    assert choice["finish_reason"] == "length"
    assert (ends[1]["stop_reason"], ends[1]["stop_sequence"]) == ("stop_sequence", "e")


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
        (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
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


async def test_anthropics_clients_get_their_errors_also_where_both_share_a_path(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=WORKFLOWS) as kit, kit.server() as url:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
            with pytest.raises(anthropic.NotFoundError) as refused:
                await claude.models.retrieve("nope")
        async with httpx.AsyncClient(base_url=url) as http:
            of_openai = (await http.get("/v1/models/nope")).json()
    body = strict(ErrorResponse, refused.value.body)
    assert body.error.type == "not_found_error"
    assert of_openai["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("model", ["fast", "cato-generation"])
async def test_a_response_names_the_tier_that_it_got(
    tmp_path: Path, model: str, is_streamed: bool
) -> None:
    body = {"model": model, "input": SAID, "service_tier": "flex", "stream": is_streamed}
    answer = await post(tmp_path, RESPONSES, body)
    end = sse_events(answer.text)[-1][1]["response"] if is_streamed else answer.json()
    assert strict(Response, end).service_tier == "flex"


async def test_anthropics_sdk_finds_the_id_of_each_request(tmp_path: Path) -> None:
    said: Any = [{"role": "user", "content": "Write add."}]
    async with (
        running(tmp_path, a_fast_pool(), workflows=WORKFLOWS) as kit,
        kit.server() as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude,
    ):
        message = await claude.messages.create(model="fast", max_tokens=5, messages=said)
        counted = await claude.messages.count_tokens(model="fast", messages=said)
        async with claude.messages.stream(model="fast", max_tokens=5, messages=said) as events:
            await events.get_final_message()
        with pytest.raises(anthropic.NotFoundError) as refused:
            await claude.messages.create(model="nope", max_tokens=5, messages=said)
        error = refused.value
        asked = error.response.headers["x-request-id"]
        ids = [message._request_id, counted._request_id, events.request_id, error.request_id]
        assert {id for _, id in kit.records.receipts} == set(ids[:3])
    assert (error.request_id, strict(ErrorResponse, error.body).request_id) == (asked, asked)


@pytest.mark.parametrize("field", ["thread", "compaction", "container", "mcp_servers"])
async def test_what_only_anthropics_servers_can_do_is_refused_by_field(
    tmp_path: Path, field: str
) -> None:
    response = await post(tmp_path, MESSAGES, {**MESSAGE_CALL[1], field: [{"type": "create"}]})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{field} is not supported: ")
    assert (await post(tmp_path, MESSAGES, {**MESSAGE_CALL[1], field: None})).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("GET", "resp_1", "not stored"),
        ("DELETE", "resp_1", "not stored"),
        ("GET", "resp_1/input_items", "not stored"),
        ("POST", "resp_1/cancel", "not stored"),
        ("POST", "compact", "ask for a summary"),
        ("POST", "input_tokens", "POST /tokenize"),
    ],
)
async def test_what_needs_stored_responses_says_so(
    tmp_path: Path, method: str, path: str, says: str
) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=WORKFLOWS) as kit, kit.http() as http:
        response = await http.request(method, f"{RESPONSES}/{path}", json={})
    assert response.status_code == 404
    assert says in response.json()["error"]["message"]


class ThinkingEngine(ScriptedEngine):
    """Thinks, and keeps the bodies that it gets."""

    def __init__(self, folder: Path) -> None:
        script = folder / "script.json"
        step = {"thinking": "Two numbers.", "text": "Done."}
        rule = {"name": "any", "where": "all", "pattern": "Write add", "step": step}
        text = json.dumps({"steps": {}, "rules": [rule], "log": str(folder / "log.jsonl")})
        script.write_text(text, encoding="utf-8")
        super().__init__(a_profile(), EngineSpec("scripted", script=str(script)), "sim-fast")
        self.bodies: list[dict[str, Any]] = []

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self.bodies.append(dict(request.body))
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_brings_reasoning_back_that_it_gets_only_encrypted(
    tmp_path: Path, is_streamed: bool
) -> None:
    """As the Vercel AI SDK does with `store: false`, and Codex."""
    pool, engine = a_pool("sim-fast", "fast", replicas=0), ThinkingEngine(tmp_path)
    pool.add(engine)
    asked = {"model": "fast", "store": False, "stream": is_streamed}
    include = {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]}
    async with running(tmp_path, pool, workflows=WORKFLOWS) as kit, kit.http() as http:
        response = await http.post(RESPONSES, json={**asked, **include, "input": SAID})
        plain = await http.post(RESPONSES, json={**asked, "input": SAID})
        if not is_streamed:
            values = [response.json()]
        else:
            events = [value for _, value in sse_events(response.text)]
            for event in events:
                strict(ResponseStreamEvent, event)
            ended = [e["item"] for e in events if e["type"] == "response.output_item.done"]
            values = [{"output": ended}, events[-1]["response"]]
        for value in values:
            thought = value["output"][0]
            assert thought["type"] == "reasoning"
            brought = {k: v for k, v in thought.items() if k != "content"}
            again = {**asked, "input": [*SAID, brought, *SAID]}
            assert (await http.post(RESPONSES, json=again)).status_code == 200
            (item,) = (i for i in engine.bodies[-1]["input"] if i.get("type") == "reasoning")
            assert item["content"] == [{"type": "reasoning_text", "text": "Two numbers."}]
            assert "encrypted_content" not in item
    assert engine.bodies[0]["include"] == ["reasoning.encrypted_content"]
    assert "encrypted_content" not in plain.text


async def test_documents_reach_the_engine_as_text_and_others_say_what_to_send(
    tmp_path: Path,
) -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "Use tabs."}
    note = {"type": "document", "title": "Style", "source": text}
    body = {**MESSAGE_CALL[1], "messages": [{"role": "user", "content": [note]}]}
    response = await post(tmp_path, MESSAGES, body)
    assert response.status_code == 200, response.text
    plain = {"type": "text", "text": "Document: Style\nUse tabs."}
    same = {**body, "messages": [{"role": "user", "content": [plain]}]}
    answers = [r.json() for r in (response, await post(tmp_path, MESSAGES, same))]
    assert answers[0]["content"] == answers[1]["content"]
    assert answers[0]["usage"] == answers[1]["usage"]
    note["source"] = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        refused = await post(tmp_path, path, body)
        assert refused.status_code == 400
        assert "Send its text" in refused.json()["error"]["message"]


async def test_a_tool_without_a_schema_is_refused_with_what_to_send(tmp_path: Path) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    response = await post(tmp_path, MESSAGES, {**MESSAGE_CALL[1], "tools": [search]})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "'web_search' (type web_search_20250305) has no input_schema" in message


async def test_anthropics_threads_go_on_with_the_whole_conversation(tmp_path: Path) -> None:
    """Its SDK's tool runner sends only the new messages of a turn, unless told that it cannot."""
    async with (
        running(tmp_path, a_fast_pool(), workflows=WORKFLOWS) as kit,
        kit.server() as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude,
    ):
        thread = claude.beta.messages.thread(
            model="fast", max_tokens=8, unsupported_request_behavior="continue_unthreaded"
        )
        first = await thread.send({"role": "user", "content": "Write add."})
        later = await thread.send({"role": "user", "content": "And sub."})
        whole = await claude.messages.create(
            model="fast",
            max_tokens=8,
            messages=[
                {"role": "user", "content": "Write add."},
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": "And sub."},
            ],  # type: ignore[arg-type]
        )
    # What a simulated engine answers follows from its prompt.
    assert [b.text for b in later.content] == [b.text for b in whole.content]  # type: ignore[union-attr]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_message_of_a_task_tells_the_clients_stop_sequence_and_not_the_workflows(
    tmp_path: Path, is_streamed: bool
) -> None:
    text = simulated_text(0, "Write add.", 40)
    early, own, late = text[10:13], text[30:33], text[40:43]
    workflow = f"""
name: stopped
description: One node with a stop sequence of its own.
sla: {{metric: ttft, target: 10s}}
inputs: {{instruction: {{type: str}}}}
nodes:
  draft:
    type: llm
    model: fast
    prompt: "{{{{ instruction }}}}"
    max_tokens: 40
    stop: [{json.dumps(own)}]
    extra: {{ignore_eos: true}}
stream: draft
output: draft
"""
    body = {"model": "cato-stopped", "messages": SAID, "max_tokens": 40, "stream": is_streamed}
    told = []
    async with (
        running(tmp_path, a_fast_pool(), workflows=(workflow,)) as kit,
        kit.http() as http,
    ):
        for stop in (early, late):
            answer = await http.post(MESSAGES, json={**body, "stop_sequences": [stop]})
            end = sse_events(answer.text)[-2][1]["delta"] if is_streamed else answer.json()
            told.append((end["stop_reason"], end["stop_sequence"]))
    assert told == [("stop_sequence", early), ("end_turn", None)]


@pytest.mark.parametrize("model", ["fast", "cato-generation"])
async def test_tokens_are_counted_by_the_model_that_would_answer(
    tmp_path: Path, model: str
) -> None:
    body = {"model": model, "messages": SAID}
    counted = (await post(tmp_path, "/v1/messages/count_tokens", body)).json()
    answered = (await post(tmp_path, MESSAGES, {**MESSAGE_CALL[1]})).json()
    assert counted["input_tokens"] == answered["usage"]["input_tokens"] > 0


class CheckingEngine(SimulatedEngine):
    """Counts a conversation only if it fits the context, like vLLM; `tokenizes` any other."""

    tokenizes = True

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        if request.endpoint is Endpoint.COUNT_TOKENS:
            context = self.facts.context_tokens
            if read_prompt(request.endpoint, request.body, a_profile()).tokens > context:
                raise ContextLengthError("too many input tokens", context_tokens=context)
        if request.endpoint is Endpoint.TOKENIZE and not self.tokenizes:
            raise EngineError("no such path", 404)
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


class CountingEngine(CheckingEngine):
    """Has no tokenizer endpoint."""

    tokenizes = False


class TypedEngine(SimulatedEngine):
    """Refuses an earlier answer that does not say that it is a message, like vLLM."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        items: Any = request.body["input"]
        if any(i["role"] == "assistant" and i.get("type") != "message" for i in items):
            raise EngineError("input is not valid", 400)
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


async def test_an_answer_that_a_client_sends_back_without_its_type_is_read(tmp_path: Path) -> None:
    """As opencode does with `@ai-sdk/openai`, from its second turn on."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Write add."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Here it is."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And sub."}]},
    ]
    pool = a_pool("sim-fast", "fast", replicas=0)
    pool.add(TypedEngine(a_profile(), EngineSpec(kind="simulated", max_num_seqs=64), "sim-fast"))
    async with running(tmp_path, pool, workflows=WORKFLOWS) as kit, kit.http() as http:
        response = await http.post(RESPONSES, json={"model": "fast", "input": items})
    assert response.status_code == 200, response.text


def a_conversation(exchanges: int) -> dict[str, Any]:
    """Tool calls and their results, by Anthropic's field names."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "Fix the bug."}]
    for i in range(exchanges):
        use = {"type": "tool_use", "id": f"t{i}", "name": "read", "input": {"path": f"{i}.py"}}
        result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": "line\n" * 200}
        said += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    tool = {"name": "read", "description": "Read a file.", "input_schema": {"type": "object"}}
    return {"system": "Be brief.", "messages": said, "tools": [tool]}


async def counted(
    folder: Path, body: dict[str, Any], engine: type[SimulatedEngine] = SimulatedEngine
) -> tuple[httpx.Response, SlaReceipt]:
    pool = a_pool("sim-fast", "fast", replicas=0)
    pool.add(engine(a_profile(), EngineSpec(kind="simulated", max_num_seqs=64), "sim-fast"))
    async with running(folder, pool, workflows=WORKFLOWS) as kit, kit.http() as http:
        response = await http.post("/v1/messages/count_tokens", json={"model": "fast", **body})
        (receipt,) = kit.records.receipts.values()
        return response, receipt


async def test_a_conversation_beyond_the_context_is_counted_by_the_tokenizer(
    tmp_path: Path,
) -> None:
    body = a_conversation(30)
    expected, _ = await counted(tmp_path, body)
    response, receipt = await counted(tmp_path, body, CheckingEngine)
    assert (response.status_code, receipt.status) == (200, "done")
    tokens = response.json()["input_tokens"]
    assert tokens > a_profile().context_tokens
    # The simulated engine names a tool's result in another way in a chat.
    assert tokens == pytest.approx(expected.json()["input_tokens"], rel=0.01)


async def test_a_count_that_no_engine_can_make_is_estimated(tmp_path: Path) -> None:
    body = a_conversation(30)
    expected, _ = await counted(tmp_path, body)
    response, _ = await counted(tmp_path, body, CountingEngine)
    assert response.status_code == 200
    tokens = response.json()["input_tokens"]
    assert tokens > a_profile().context_tokens
    assert tokens == pytest.approx(expected.json()["input_tokens"], rel=0.5)
    sound = {"type": "audio", "source": {"type": "base64", "data": "x" * 50_000}}
    body["messages"].append({"role": "user", "content": [sound]})  # has no chat counterpart
    response, _ = await counted(tmp_path, body, CheckingEngine)
    assert response.status_code == 200
    assert response.json()["input_tokens"] == pytest.approx(tokens, abs=10)


def test_the_tokenizer_gets_what_the_chat_template_reads() -> None:
    body = {**a_conversation(1), "chat_template_kwargs": {"a": 1}, "max_tokens": 5}
    body["output_config"] = {"effort": "high"}
    settings = CallSettings("m", "messages/count_tokens", body, False, 1, Prompt(1, 1))
    asked = tokenizing(settings)
    assert asked is not None
    assert asked.endpoint == "tokenize"
    assert asked.body.keys() == {"messages", "tools", "chat_template_kwargs"}
    assert asked.body["chat_template_kwargs"] == {
        "a": 1,
        "enable_thinking": True,
        "reasoning_effort": "high",
    }


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
