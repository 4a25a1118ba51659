"""Which task a request is about, and what of its hints counts for the SLA."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, running

from cato.core.slo import Slo, SloMetric
from cato.serve.ingress.hints import Claim, SlaClass, granted

MESSAGES = [{"role": "user", "content": "Write add."}]
PROMPT = "def add(a, b):\n    return "
COMPLETE = {"model": "fast", "prompt": PROMPT, "max_tokens": 3}
CHAT = {"model": "fast", "messages": MESSAGES, "max_tokens": 3}


async def post(
    folder: Path, path: str, body: dict[str, object], headers: dict[str, str] | None = None
) -> httpx.Response:
    workflows = (COMPLETION, GENERATION)
    async with running(folder, a_fast_pool(), workflows=workflows) as kit, kit.http() as http:
        return await http.post(path, json=body, headers=headers)


async def task_of(
    folder: Path, path: str, body: dict[str, object], headers: dict[str, str] | None = None
) -> str:
    response = await post(folder, path, body, headers)
    assert response.status_code == 200, response.text
    return response.headers["X-CATO-Task"]


HEADER = {"X-CATO-Task": "code-generation"}
IN_BODY = {"cato": {"task": "generation"}}


async def test_the_strongest_sign_names_the_task(tmp_path: Path) -> None:
    virtual = {**COMPLETE, "model": "cato-completion"}
    for expected, path, body, headers in (
        ("code-generation", "/t/completion/v1/completions", {**virtual, **IN_BODY}, None),
        ("code-generation", "/t/completion/v1/completions", virtual, HEADER),
        ("code-completion", "/t/completion/v1/chat/completions", {**CHAT, "model": "x"}, None),
        ("code-completion", "/t/cato-completion/v1/completions", COMPLETE, None),
        ("code-completion", "/v1/completions", virtual, None),
        ("code-completion", "/v1/completions", {**virtual, "model": "qwen:cato-completion"}, None),
        ("code-completion", "/v1/completions", {**virtual, "model": "cato-auto"}, None),
        ("code-generation", "/v1/chat/completions", {**CHAT, "model": "cato-generation"}, None),
        ("code-generation", "/v1/chat/completions", {**CHAT, "model": "cato-auto"}, HEADER),
        ("model:sim-fast", "/v1/chat/completions", {**CHAT, "model": "cato-auto"}, None),
        ("model:sim-fast", "/v1/chat/completions", CHAT, None),
    ):
        assert await task_of(tmp_path, path, body, headers) == expected, (path, body)


@pytest.mark.parametrize("none", [{}, {"model": None}, {"model": ""}])
async def test_a_request_without_a_model_gets_the_default(
    tmp_path: Path, none: dict[str, object]
) -> None:
    text = {"prompt": PROMPT, "max_tokens": 3, **none}
    chat = {"messages": MESSAGES, "max_tokens": 3, **none}
    respond = {"input": "Write add.", "max_output_tokens": 3, **none}
    for expected, path, body in (
        ("code-completion", "/v1/completions", text),
        ("code-completion", "/v1/fim/completions", text),
        ("model:sim-fast", "/v1/chat/completions", chat),
        ("model:sim-fast", "/v1/messages", chat),
        ("model:sim-fast", "/v1/responses", respond),
    ):
        assert await task_of(tmp_path, path, body) == expected, (path, body)


async def test_an_engines_refusal_names_the_parameter_and_not_the_engines_words(
    tmp_path: Path,
) -> None:
    refused = await post(tmp_path, "/v1/completions", {**COMPLETE, "temperature": -1})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "temperature")
    assert "-1" not in error["message"]
    assert "got -1" in refused.headers["X-CATO-Problem"]


async def test_any_dialect_can_stand_behind_a_tasks_path(tmp_path: Path) -> None:
    infill = {"input_prefix": PROMPT, "input_suffix": ""}
    message = {"max_tokens": 9, "model": "claude-x", "messages": MESSAGES}
    for path, body in (
        ("/t/completion/infill", infill),
        ("/t/completion/interactive/infill", infill),
        ("/t/completion/v1/messages", message),
        ("/t/completion/v1/responses", {"model": "gpt-x", "input": "Write add."}),
        ("/t/completion/v1/tasks/code-completion", {"inputs": {"prefix": PROMPT}}),
    ):
        assert await task_of(tmp_path, path, body) == "code-completion"


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/t/nope/v1/completions", {}, COMPLETE),
        ("/v1/completions", {"X-CATO-Task": "nope"}, COMPLETE),
        ("/v1/completions", {}, {**COMPLETE, "cato": {"task": "nope"}}),
    ],
)
async def test_an_unknown_task_is_not_found(
    tmp_path: Path, path: str, headers: dict[str, str], body: dict[str, object]
) -> None:
    response = await post(tmp_path, path, body, headers)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "task_not_found")


TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
READ = {"name": "read", "input_schema": {"type": "object"}}
TURNS = [*MESSAGES, {"role": "assistant", "content": "Which?"}, {"role": "user", "content": "Go."}]
CHATS, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
AGENT = {"user-agent": "codex_exec/0.169.0"}


@pytest.mark.parametrize("model", ["cato-auto", "cato-generation"])
@pytest.mark.parametrize(
    ("path", "body", "headers", "why"),
    [
        (CHATS, {"messages": MESSAGES, "tools": [TOOL]}, {}, "tools"),
        (
            CHATS,
            {"messages": [{"role": "system", "content": "Edit."}, *MESSAGES]},
            {},
            "system prompt",
        ),
        (CHATS, {"messages": TURNS}, {}, "3 messages"),
        (CHATS, {"messages": MESSAGES}, AGENT, "codex"),
        (RESPONSES, {"input": TURNS}, {}, "3 messages"),
        (RESPONSES, {"input": "Go.", "instructions": "Be brief."}, {}, "system prompt"),
        (RESPONSES, {"input": "Go."}, AGENT, "codex"),
        (ANTHROPIC, {"messages": TURNS}, {}, "3 messages"),
        (ANTHROPIC, {"messages": MESSAGES, "system": "Be brief."}, {}, "system prompt"),
        (ANTHROPIC, {"messages": MESSAGES, "tools": [READ]}, {}, "tools"),
    ],
)
async def test_a_conversation_goes_whole_to_the_tasks_model(
    tmp_path: Path,
    path: str,
    body: dict[str, object],
    headers: dict[str, str],
    why: str,
    model: str,
) -> None:
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 5}
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as kit,
        kit.http() as http,
    ):
        http.headers.update(headers)
        passed = await http.post(path, json={**body, **limit, "model": model})
        direct = await http.post(path, json={**body, **limit, "model": "fast"})
        streamed = await http.post(path, json={**body, **limit, "model": model, "stream": True})
    assert passed.headers["X-CATO-Task"] == "model:sim-fast"
    assert why in passed.json()["cato"]["passed"]
    assert direct.json()["cato"]["passed"] == ""
    for field in ("choices", "output", "content"):  # the simulated text is a function of the prompt
        assert _texts(passed.json().get(field)) == _texts(direct.json().get(field))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["X-CATO-Task"] == "model:sim-fast"


def _texts(value: object) -> list[str]:
    """All generated text in an answer's list of choices, items or blocks."""
    match value:
        case {"text": str(text)} | {"content": str(text)}:
            return [text]
        case dict():
            return [text for inner in value.values() for text in _texts(inner)]
        case list():
            return [text for inner in value for text in _texts(inner)]
        case _:
            return []


async def test_inputs_of_a_task_are_refused_where_no_task_runs(tmp_path: Path) -> None:
    body = {**CHAT, "messages": TURNS, "model": "cato-generation"}
    response = await post(tmp_path, CHATS, {**body, "cato": {"inputs": {"language": "go"}}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cato.inputs")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"model": "fast", "input": "x"}),
        ("/v1/completions", COMPLETE),
        ("/v1/fim/completions", COMPLETE),
        ("/infill", {"model": "fast", "input_prefix": "x"}),
        ("/v1/embeddings", {"model": "fast", "input": "x"}),
    ],
)
async def test_inputs_of_a_task_are_refused_by_a_model_that_is_named(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    response = await post(tmp_path, path, {**body, "cato": {"inputs": {"language": "go"}}})
    assert response.status_code == 400
    assert "name the task" in response.json()["error"]["message"]
    for nothing in ({}, None):
        response = await post(tmp_path, path, {**body, "cato": {"inputs": nothing}})
        assert "inputs" not in response.text


async def test_inputs_for_a_misspelt_task_are_told_the_names_that_there_are(tmp_path: Path) -> None:
    body = {**CHAT, "model": "cato-genration", "cato": {"inputs": {"language": "go"}}}
    response = await post(tmp_path, CHATS, body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert "cato-generation" in response.json()["error"]["message"]


TRANSLATION = """
name: code-translation
description: Translate code.
sla: {metric: ttft, target: 10s}
inputs:
  code: {type: str}
  source_language: {type: str}
  target_language: {type: str}
nodes:
  draft: {type: llm, model: fast, prompt: "{{ target_language }}: {{ code }}", max_tokens: 8}
stream: draft
output: draft
"""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/completions", {"prompt": "x"}),
    ],
)
async def test_inputs_that_a_task_misses_are_asked_for_with_their_place(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    given = {"cato": {"inputs": {"source_language": "C", "target_language": "Go"}}}
    wrong = {"cato": {"inputs": {**given["cato"]["inputs"], "target_language": 3}}}
    async with (
        running(tmp_path, a_fast_pool(), workflows=(TRANSLATION,)) as kit,
        kit.http() as http,
    ):
        body = {"model": "cato-translation", **body}
        missing = (await http.post(path, json=body)).json()["error"]["message"]
        assert (await http.post(path, json={**body, **given})).status_code == 200
        misread = (await http.post(path, json={**body, **wrong})).json()["error"]["message"]
        native = await http.post("/v1/tasks/code-translation", json={"inputs": {"code": "x"}})
    required = (
        "input 'source_language' is required (text); input 'target_language' is required (text)"
    )
    assert missing == f'{required}; give inputs in the body as {{"cato": {{"inputs": {{...}}}}}}'
    assert misread == "input 'target_language' must be text"
    assert native.json()["error"]["message"] == required


# Hints: the task promises a first token within 10 s; a task's hard deadline is six times as far.


@pytest.mark.parametrize(
    ("path", "headers", "body", "expected"),
    [
        ("", {"X-CATO-SLA": "interactive"}, {}, "ttft=800ms"),
        ("", {"X-CATO-SLA": "standard"}, {"service_tier": "priority"}, "ttft=10000ms"),
        ("", {}, {"cato": {"sla": "interactive"}}, "ttft=800ms"),
        ("", {}, {"cato": {"deadline_ms": 300}}, "ttft=300ms"),
        ("", {}, {"cato": {"sla": {"target_ms": 400}, "deadline_ms": 300}}, "ttft=300ms"),
        ("/t/completion/interactive", {}, {}, "ttft=800ms"),
        ("", {}, {"service_tier": "priority"}, "ttft=800ms"),
        ("", {}, {"service_tier": "fast"}, "ttft=800ms"),
        ("", {}, {"service_tier": "auto"}, "ttft=10000ms"),
        ("", {}, {"service_tier": None}, "ttft=10000ms"),
        ("", {"x-stainless-read-timeout": "4.5"}, {}, "ttft=4500ms"),
        ("", {"x-stainless-timeout": "NOT_GIVEN"}, {}, "ttft=10000ms"),
        ("", {"x-stainless-timeout": "600"}, {}, "ttft=10000ms"),
        ("", {"x-stainless-timeout": "-1"}, {}, "ttft=10000ms"),
    ],
)
async def test_hints_tighten_the_objective(
    tmp_path: Path, path: str, headers: dict[str, str], body: dict[str, object], expected: str
) -> None:
    asked = {"model": "cato-completion", "prompt": PROMPT, **body}
    response = await post(tmp_path, f"{path}/v1/completions", asked, headers)
    assert response.headers["X-CATO-SLA"] == expected


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({"X-CATO-SLA": "urgent"}, {}, "sla"),
        ({}, {"cato": {"sla": "urgent"}}, "sla"),
        ({}, {"cato": {"sla": 3}}, "sla"),
        ({}, {"cato": {"deadline_ms": -3}}, "deadline_ms"),
        ({}, {"cato": {"task": 3}}, "cato.task"),
        ({}, {"service_tier": "gold"}, "service_tier"),
        ({}, {"service_tier": ["flex"]}, "service_tier"),
    ],
)
async def test_a_hint_that_cannot_be_read_is_refused(
    tmp_path: Path, headers: dict[str, str], body: dict[str, object], param: str
) -> None:
    for model in ("fast", "cato-completion"):
        asked = {**COMPLETE, "model": model, **body}
        response = await post(tmp_path, "/v1/completions", asked, headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("model", ["fast", "cato-generation"])
async def test_a_sessions_target_that_cannot_be_read_is_refused_by_every_dialect(
    tmp_path: Path, model: str
) -> None:
    paths = {
        "/v1/completions": {"prompt": "x"},
        "/v1/fim/completions": {"prompt": "x"},
        CHATS: {"messages": MESSAGES},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    }
    for path, body in paths.items():
        asked = {"model": model, **body}
        for headers in ({"X-CATO-Session-Deadline-Ms": "x"}, {"X-CATO-Session-Deadline-Ms": "-1"}):
            response = await post(tmp_path, path, asked, headers)
            assert response.status_code == 400, path
            assert "X-CATO-Session-Deadline-Ms" in response.json()["error"]["message"]
        in_body = {**asked, "cato": {"session_deadline_ms": 0}}
        assert (await post(tmp_path, path, in_body)).status_code == 400, path
        fine = {"X-CATO-Session-Deadline-Ms": "60000"}
        assert (await post(tmp_path, path, asked, fine)).status_code == 200, path


@pytest.mark.parametrize(
    ("tier", "served"), [("priority", "priority"), ("flex", "flex"), ("auto", "default")]
)
async def test_chats_answer_names_the_tier_that_it_got(
    tmp_path: Path, tier: str, served: str
) -> None:
    for model in ("fast", "cato-generation"):
        body = {**CHAT, "model": model, "service_tier": tier}
        answer = (await post(tmp_path, "/v1/chat/completions", body)).json()
        assert answer["service_tier"] == served


@pytest.mark.parametrize("metric", list(SloMetric))
def test_only_batch_loosens_a_target_and_only_to_the_hard_deadline(metric: SloMetric) -> None:
    slo = Slo(metric, 5.0)
    for claim in (
        Claim(),
        Claim(SlaClass.STANDARD, target_s=9.0, deadline_s=9.0),
        Claim(SlaClass.INTERACTIVE, target_s=9.0),
    ):
        assert granted(claim, slo, 60.0).target_s <= 5.0
    batch = granted(Claim(SlaClass.BATCH), slo, 60.0)
    assert batch.target_s == (5.0 if metric is SloMetric.TPOT else 60.0)
    late = granted(Claim(SlaClass.BATCH, deadline_s=30.0), slo, 60.0)
    assert late.target_s == (5.0 if metric is SloMetric.TPOT else 30.0)
