"""Who belongs together: sessions, turns and sub-agents of the clients that were measured."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, running

from cato.core.session import Turn, TurnKind
from cato.serve.ingress.clients import UNKNOWN, client_of, patience_s, turn_of
from cato.wire.endpoint import Endpoint
from cato.wire.reading import conversation_of

CHAT, RESPONSES, MESSAGES = Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES
SAID = [{"role": "user", "content": "Fix the bug."}]
TOOL = {"name": "Read", "input_schema": {"type": "object"}}
CLAUDE = {"user-agent": "claude-cli/2.1.330 (external, sdk-cli)", "x-claude-code-session-id": "c-1"}
CODEX = {"user-agent": "codex_exec/0.169.0", "session-id": "s-1", "thread-id": "t-1"}
OPENCODE = {"user-agent": "opencode/1.18.33", "x-session-id": "ses_1"}


def turn(
    endpoint: Endpoint, headers: dict[str, str], body: dict[str, Any], whose: str = "me"
) -> Turn:
    conversation = conversation_of(endpoint, body)
    client = client_of(headers, conversation.system)
    return turn_of(client, headers, endpoint, body, conversation, whose)


def test_claude_codes_sub_agents_are_sessions_of_their_own() -> None:
    body = {"messages": SAID, "tools": [TOOL]}
    main = turn(MESSAGES, CLAUDE, body)
    sub = turn(MESSAGES, {**CLAUDE, "x-claude-code-agent-id": "a-9"}, body)
    assert (main.session, main.parent, main.client) == ("claude-code:c-1", "", "claude-code")
    assert (sub.session, sub.parent) == ("claude-code:c-1/a-9", "claude-code:c-1")


def test_codex_is_known_by_its_thread_and_not_by_its_parents_key() -> None:
    body = {"input": SAID, "prompt_cache_key": "s-1"}
    main = turn(RESPONSES, CODEX, body)
    sub = turn(RESPONSES, {**CODEX, "thread-id": "t-2", "x-codex-parent-thread-id": "t-1"}, body)
    assert (main.session, main.parent) == ("codex:t-1", "")
    assert (sub.session, sub.parent) == ("codex:t-2", "codex:t-1")


@pytest.mark.parametrize(("endpoint", "field"), [(CHAT, "messages"), (RESPONSES, "input")])
def test_opencode_names_session_and_parent_in_all_dialects(endpoint: Endpoint, field: str) -> None:
    sub = turn(endpoint, {**OPENCODE, "x-parent-session-id": "ses_0"}, {field: SAID})
    assert (sub.session, sub.parent) == ("opencode:ses_1", "opencode:ses_0")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        (CLAUDE, 300.0),
        ({**CLAUDE, "x-stainless-timeout": "600"}, 300.0),
        ({**CLAUDE, "x-stainless-timeout": "45"}, 45.0),
        ({"user-agent": "QwenCode/0.24.4"}, 120.0),
        ({"user-agent": "curl/8"}, inf),
        ({"x-stainless-read-timeout": "NOT_GIVEN"}, inf),
    ],
)
def test_a_client_waits_as_long_as_its_sdk_says_and_as_it_was_seen_to(
    headers: dict[str, str], seconds: float
) -> None:
    assert patience_s(headers, client_of(headers, "")) == seconds
    assert patience_s({}, UNKNOWN) == inf


def test_the_first_name_that_is_found_wins() -> None:
    user = json.dumps({"device_id": "d", "session_id": "c-7"})
    body: dict[str, Any] = {"messages": SAID, "metadata": {"user_id": user}}
    assert turn(MESSAGES, {}, body).session == "user:c-7"
    body["prompt_cache_key"] = "k-1"
    assert turn(MESSAGES, {}, body).session == "key:k-1"
    assert turn(MESSAGES, CLAUDE, body).session == "claude-code:c-1"
    assert turn(MESSAGES, {**CLAUDE, "x-cato-session": "mine"}, body).session == "mine"


def test_without_a_name_the_beginning_of_the_conversation_is_one() -> None:
    system = {"role": "system", "content": "You are Qwen Code."}
    headers = {"user-agent": "QwenCode/0.24.4 (linux; x64)"}
    answer = [{"role": "assistant", "content": "Which?"}, {"role": "user", "content": "This."}]
    first = turn(CHAT, headers, {"messages": [system, *SAID]})
    later = turn(CHAT, headers, {"messages": [system, *SAID, *answer]})
    assert first.session == later.session
    assert (first.number, later.number) == (1, 2)
    other = turn(CHAT, headers, {"messages": [system, {"role": "user", "content": "Else."}]})
    elsewhere = turn(CHAT, headers, {"messages": [system, *SAID]}, whose="somebody else")
    assert len({first.session, other.session, elsewhere.session}) == 3


def test_an_odd_name_becomes_a_digest() -> None:
    odd = turn(CHAT, {"x-cato-session": "a b\n" + "c" * 500}, {"messages": SAID})
    assert odd.session.isalnum()
    assert len(odd.session) < 40


def test_calls_beside_the_main_loop_are_known_by_their_form() -> None:
    schema = {"type": "json_schema", "schema": {"properties": {"title": {"type": "string"}}}}
    summary = "Your task is to create a detailed summary of the conversation so far."
    checkpoint = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary."
    names = "You are a title generator."
    found = [
        turn(MESSAGES, CLAUDE, {"messages": SAID, "tools": [TOOL]}),
        turn(MESSAGES, CLAUDE, {"messages": SAID, "output_config": {"format": schema}}),
        turn(
            MESSAGES,
            CLAUDE,
            {"messages": [*SAID, {"role": "user", "content": summary}], "tools": [TOOL]},
        ),
        turn(RESPONSES, CODEX, {"input": [*SAID, {"role": "user", "content": checkpoint}]}),
        turn(CHAT, OPENCODE, {"messages": [{"role": "system", "content": names}, *SAID]}),
        turn(Endpoint.COUNT_TOKENS, CLAUDE, {"messages": SAID}),
    ]  # fmt: skip
    assert [t.kind for t in found] == [
        TurnKind.MAIN,
        TurnKind.TITLE,
        TurnKind.COMPACTION,
        TurnKind.COMPACTION,
        TurnKind.TITLE,
        TurnKind.COUNT,
    ]


def a_turn_body(n: int, **fields: object) -> dict[str, Any]:
    said: list[dict[str, object]] = list(SAID)
    for i in range(n):
        said.append({"role": "assistant", "content": f"Reading file {i}."})
        said.append({"role": "user", "content": f"It says: value_{i} = {i * 37}" * 5})
    return {
        "model": "fast",
        "max_tokens": 8,
        "system": "Be brief. " * 300,
        "messages": said,
        **fields,
    }


async def test_receipts_name_session_turn_and_parent_and_counts_correct_themselves(
    tmp_path: Path,
) -> None:
    receipts = []
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as kit,
        kit.http() as http,
    ):
        headers = {**CLAUDE, "x-claude-code-agent-id": "a-9"}
        for n in range(3):
            body = a_turn_body(n, tools=[TOOL])
            answer = await http.post("/v1/messages", json=body, headers=headers)
            receipts.append(answer.json()["cato"])
    assert [r["session"] for r in receipts] == ["claude-code:c-1/a-9"] * 3
    assert [r["turn"] for r in receipts] == [1, 2, 3]
    assert {(r["parent"], r["client"], r["turn_kind"]) for r in receipts} == {
        ("claude-code:c-1", "claude-code", "main")
    }
    for receipt in receipts[1:]:
        llm = receipt["nodes"][0]["llm"]
        assert llm["expected_prompt_tokens"] == pytest.approx(llm["prompt_tokens"], rel=0.05)


async def test_an_agents_turn_has_an_agents_objective_and_its_title_none_to_speak_of(
    tmp_path: Path,
) -> None:
    schema = {"type": "json_schema", "schema": {"properties": {"title": {"type": "string"}}}}
    slo = {}
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as kit,
        kit.http() as http,
    ):
        for name, fields, headers in (
            ("agent", {"tools": [TOOL]}, CLAUDE),
            ("title", {"output_config": {"format": schema}}, CLAUDE),
            ("chat", {}, {}),
            ("asked", {"tools": [TOOL]}, {**CLAUDE, "X-CATO-Deadline-Ms": "700"}),
        ):
            body = a_turn_body(0, **fields)
            answer = await http.post("/v1/messages", json=body, headers=headers)
            slo[name] = (
                answer.headers["X-CATO-SLA"], answer.json()["cato"]["tpot_target_s"]
            )  # fmt: skip
    assert slo == {
        "agent": ("ttft=2000ms", 0.04),
        "title": ("ttft=600000ms", None),
        "chat": ("ttft=1500ms", None),
        "asked": ("ttft=700ms", 0.04),
    }


async def test_what_was_made_stable_stands_in_the_receipt(tmp_path: Path) -> None:
    billing = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.3ab;"}]
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as kit,
        kit.http() as http,
    ):
        body = a_turn_body(0, system=[*billing, {"type": "text", "text": "Be brief."}])
        answer = await http.post("/v1/messages", json=body, headers=CLAUDE)
    assert answer.json()["cato"]["changes"] == ["billing-block"]


@pytest.mark.parametrize(
    ("system", "kind"),
    [
        ("You generate concise, one-line Git commit messages.", TurnKind.TITLE),
        ("*Briefly* summarize this partial conversation about programming.", TurnKind.COMPACTION),
    ],
)
def test_aiders_calls_beside_the_main_loop_are_known(system: str, kind: TurnKind) -> None:
    said = [{"role": "system", "content": system}, {"role": "user", "content": "# USER"}]
    found = turn(CHAT, {"user-agent": "OpenAI/Python 2.20.0"}, {"messages": said})
    assert (found.client, found.kind) == ("aider", kind)


async def test_usage_names_the_turns_of_a_session(tmp_path: Path) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as kit,
        kit.http() as http,
    ):
        for n in range(2):
            body = a_turn_body(n, tools=[TOOL])
            await http.post("/v1/messages", json=body, headers=CLAUDE)
        await http.post("/v1/messages", json=a_turn_body(0), headers={"x-cato-session": "other"})
        used = (await http.get("/v1/usage", params={"session": "claude-code:c-1"})).json()["data"]
        form = {"session": "claude-code:c-1", "format": "csv"}
        table = (await http.get("/v1/usage", params=form)).text
        nothing = (await http.get("/v1/usage", params={"session": "none"})).json()["data"]
    assert [(t["turn"], t["kind"], t["model"], t["met"]) for t in used] == [
        (1, "main", "sim-fast", True),
        (2, "main", "sim-fast", True),
    ]
    assert used[1]["prompt_tokens"] > used[0]["prompt_tokens"] > 0
    assert used[1]["output_tokens"] == 8
    assert len(table.splitlines()) == 3
    assert nothing == []
