"""Targets that a direct call or its whole session may ask for, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, an_access, running

from cato.core.tenancy import Access, ApiKey
from cato.serve.access.keys import new_key

FLOWS = (COMPLETION, GENERATION.replace("target: 10s", "target: 10s, session: 30m"))
TOOL = {"name": "Read", "input_schema": {"type": "object"}}
CLAUDE = {"user-agent": "claude-cli/2.1.330", "x-claude-code-session-id": "c-1"}


def a_chat(turns: int = 0, **fields: object) -> dict[str, Any]:
    said: list[dict[str, str]] = [{"role": "user", "content": "Fix the bug. " * 50}]
    for n in range(turns):
        said += [
            {"role": "assistant", "content": f"Reading {n}."},
            {"role": "user", "content": f"value_{n} = {n} " * 20},
        ]
    return {"model": "fast", "max_tokens": 8, "messages": said, **fields}


async def receipt_of(http: Any, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    answer = await http.post("/v1/messages", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    receipt: dict[str, Any] = answer.json()["cato"]
    return receipt


@pytest.mark.parametrize(
    ("headers", "extra", "slo"),
    [
        ({}, {}, ("ttft", 1.5, None)),
        ({"X-CATO-TPOT-Ms": "50"}, {}, ("ttft", 1.5, 0.05)),
        ({}, {"tpot_ms": 30, "deadline_ms": 700}, ("ttft", 0.7, 0.03)),
        ({}, {"sla": {"metric": "tpot", "target_ms": 25}}, ("ttft", 1.5, 0.025)),
        ({}, {"sla": {"metric": "e2e", "target_ms": 8000}}, ("e2e", 8.0, None)),
        (
            {"X-CATO-TPOT-Ms": "60", "X-CATO-Deadline-Ms": "3000"},
            {"sla": {"metric": "e2e", "target_ms": 8000}},
            ("e2e", 3.0, 0.06),
        ),
    ],
)
async def test_a_direct_call_chooses_its_pace_and_its_metric(
    tmp_path: Path, headers: dict[str, str], extra: dict[str, object], slo: tuple[object, ...]
) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=FLOWS) as kit, kit.http() as http:
        for path, body in (
            ("/v1/chat/completions", a_chat()),
            ("/v1/completions", {"model": "fast", "prompt": "a", "max_tokens": 4}),
        ):
            answer = await http.post(path, json={**body, "cato": extra}, headers=headers)
            receipt = answer.json()["cato"]
            found = (receipt["metric"], receipt["target_s"], receipt["tpot_target_s"])
            assert found == slo


@pytest.mark.parametrize(
    ("sla_class", "pace_s", "whole_s"),
    [("interactive", 0.04, 1.5 + 3 * 0.04), ("standard", 0.04, 1.5 + 3 * 0.04),
     ("batch", None, 600.0)],
)  # fmt: skip
async def test_numbers_are_no_way_around_the_class_of_a_key(
    tmp_path: Path, sla_class: str, pace_s: float | None, whole_s: float
) -> None:
    secret, id, digest = new_key()
    access = an_access(Access(keys=(ApiKey(id, digest, "team", sla_class=sla_class),)))
    headers = {"Authorization": f"Bearer {secret}", "X-CATO-TPOT-Ms": "1"}
    async with (
        running(tmp_path, a_fast_pool(), workflows=FLOWS, access=access) as kit,
        kit.http() as http,
    ):
        body = {"model": "fast", "prompt": "a", "max_tokens": 4}
        first = await http.post("/v1/completions", json=body, headers=headers)
        sla = {"metric": "e2e", "target_ms": 1}
        whole = await http.post(
            "/v1/completions", json={**body, "cato": {"sla": sla}}, headers=headers
        )
    assert first.json()["cato"]["tpot_target_s"] == pace_s
    assert whole.json()["cato"]["target_s"] == pytest.approx(whole_s)


@pytest.mark.parametrize("value", ["0", "-5", "soon", "nan", "inf", ""])
@pytest.mark.parametrize("header", ["X-CATO-TPOT-Ms", "X-CATO-Session-Deadline-Ms"])
async def test_a_target_that_is_no_number_above_0_is_named_in_a_400(
    tmp_path: Path, header: str, value: str
) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=FLOWS) as kit, kit.http() as http:
        answer = await http.post("/v1/chat/completions", json=a_chat(), headers={header: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{header} must be a number above 0"


@pytest.mark.parametrize(
    "extra",
    [{"sla": {"metric": []}}, {"sla": {"metric": "speed"}}, {"sla": {"metric": "e2e"}},
     {"tpot_ms": "50"}, {"session_deadline_ms": -1}],
)  # fmt: skip
async def test_a_target_in_the_body_that_makes_no_sense_is_a_400(
    tmp_path: Path, extra: dict[str, object]
) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=FLOWS) as kit, kit.http() as http:
        answer = await http.post("/v1/chat/completions", json=a_chat(cato=extra))
    assert answer.status_code == 400, answer.text


async def test_turns_get_their_parts_of_the_sessions_time_and_receipts_say_what_is_left(
    tmp_path: Path,
) -> None:
    headers = {**CLAUDE, "X-CATO-Session-Deadline-Ms": "7200000"}
    async with running(tmp_path, a_fast_pool(), workflows=FLOWS) as kit, kit.http() as http:
        first, second = [await receipt_of(http, a_chat(n, tools=[TOOL]), headers) for n in range(2)]
        other = await receipt_of(http, a_chat(tools=[TOOL]), {"x-cato-session": "other"})
    assert [(r["metric"], r["session_target_s"]) for r in (first, second)] == [("ttft", 7200.0)] * 2
    assert 2.0 < second["target_s"] < 7200
    assert 0 < second["session_slack_s"] < 7200
    assert first["think_s"] is None
    assert 0 <= second["think_s"] < 60
    assert (other["metric"], other["session_target_s"], other["session_slack_s"]) == (
        "ttft", None, None,
    )  # fmt: skip


async def test_a_session_that_cannot_end_in_time_has_the_usual_objective(tmp_path: Path) -> None:
    headers = {**CLAUDE, "X-CATO-Session-Deadline-Ms": "1"}
    async with running(tmp_path, a_fast_pool(), workflows=FLOWS) as kit, kit.http() as http:
        await receipt_of(http, a_chat(tools=[TOOL]), headers)
        late = await receipt_of(http, a_chat(1, tools=[TOOL]), headers)
    assert (late["metric"], late["target_s"], late["tpot_target_s"]) == ("ttft", 2.0, 0.04)
    assert late["session_slack_s"] < 0


async def test_a_key_and_a_task_set_targets_for_sessions_that_name_none(tmp_path: Path) -> None:
    secret, id, digest = new_key()
    key = ApiKey(id, digest, "team", session_target_s=900.0)
    auth = {"Authorization": f"Bearer {secret}"}
    access = an_access(Access(keys=(key,)))
    async with (
        running(tmp_path, a_fast_pool(), workflows=FLOWS, access=access) as kit,
        kit.http() as http,
    ):
        found = []
        for fields, more in (
            ({}, {}),
            ({"model": "cato-generation"}, {}),
            ({}, {"X-CATO-Session-Deadline-Ms": "60000"}),
        ):
            session = {"x-cato-session": f"s{len(found)}"}
            body = a_chat(tools=[TOOL], **fields)
            receipt = await receipt_of(http, body, {**auth, **session, **more})
            found.append((receipt["session_target_s"], receipt["target_s"]))
    assert [target for target, _ in found] == [900.0, 1800.0, 60.0]
    # No session makes a turn more urgent than it usually is.
    assert all(target_s >= 2.0 for _, target_s in found)


async def test_a_turns_receipt_says_what_was_cached_and_why_it_went_where_it_went(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=FLOWS) as kit, kit.http() as http:
        turns = [await receipt_of(http, a_chat(n, tools=[TOOL]), CLAUDE) for n in range(2)]
    first, second = (t["nodes"][0]["llm"] for t in turns)
    assert (first["placement"], first["home"]) == ("new", "")
    assert (second["placement"], second["home"]) == ("home", first["replica"])
    for call in (first, second):
        computed = call["prompt_tokens"] - call["cached_prompt_tokens"]
        assert call["uncached_prompt_tokens"] == computed > 0
        assert "expected cost" in call["reasons"][-1]
