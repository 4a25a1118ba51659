"""Identical calls share an answer, and completions are kept for a while."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingress_kit import (
    COMPLETION,
    GENERATION,
    a_fast_pool,
    a_pool,
    an_access,
    running,
    until,
    until_busy,
)

from cato.core.reuse import AnswerMemory, ReuseLimits, is_deterministic, reuse_key
from cato.core.tenancy import Access, ApiKey
from cato.serve.access.keys import new_key

FLOWS = (COMPLETION.replace("max_tokens: 12", "max_tokens: 12\n    temperature: 0"),
         GENERATION)  # fmt: skip
KEPT = ReuseLimits(tenant_bytes=100_000, total_bytes=200_000, age_s=60.0)
PROMPT = {"model": "fast", "prompt": "def f(x):", "max_tokens": 20, "temperature": 0}


# What is alike


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "n": 1}, True),
        ({"seed": 7, "temperature": 0.8}, True),
        ({}, False),
        ({"temperature": 0.2}, False),
        ({"temperature": False}, False),
        ({"seed": None, "temperature": 1}, False),
        ({"temperature": 0, "n": 2}, False),
        ({"temperature": 0, "best_of": 3}, False),
    ],
)
def test_only_an_answer_that_would_come_again_is_shared(
    body: dict[str, object], expected: bool
) -> None:
    assert is_deterministic(body) is expected


def test_a_name_leaves_out_who_asks_and_nothing_else() -> None:
    body = {"prompt": "a", "temperature": 0, "max_tokens": 5}
    name = reuse_key(("team", "m"), body)
    assert name == reuse_key(("team", "m"), {**body, "user": "ann", "metadata": {"a": 1}})
    for other in ({"prompt": "b"}, {"max_tokens": 6}, {"stop": ["x"]}, {"suffix": ""}):
        assert name != reuse_key(("team", "m"), {**body, **other})
    assert name != reuse_key(("other", "m"), body)
    assert reuse_key(("team",), body, ()) != reuse_key(("team",), {**body, "user": "ann"}, ())


# What is kept


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(1, 60), st.integers(0, 9))
    )
)
def test_memory_never_exceeds_its_bounds_and_gives_nothing_that_is_old(
    puts: list[tuple[str, int, int, int]],
) -> None:
    memory: AnswerMemory[tuple[str, int, float]] = AnswerMemory(ReuseLimits(100, 150, 10.0))
    now_s = 0.0
    for tenant, number, size, wait_s in puts:
        now_s += wait_s
        memory.put(tenant, bytes([number]), (tenant, number, now_s), size, now_s)
        assert memory.size() == sum(memory.size(t) for t in "abc") <= 150
        assert all(memory.size(t) <= 100 for t in "abc")
        for whose in "abc":
            for n in range(6):
                found = memory.get(whose, bytes([n]), now_s)
                if found is not None:
                    (owner, kept, at_s), age_s = found
                    assert (owner, kept) == (whose, n)
                    assert age_s == now_s - at_s <= 10.0


def test_an_answer_that_is_too_large_pushes_nothing_out() -> None:
    memory: AnswerMemory[str] = AnswerMemory(ReuseLimits(100, 150, 10.0))
    memory.put("a", b"1", "small", 50, 0.0)
    memory.put("a", b"2", "large", 101, 0.0)
    assert memory.get("a", b"1", 0.0) == ("small", 0.0)
    assert memory.get("a", b"2", 0.0) is None


def test_a_tenant_that_fills_its_part_pushes_out_its_own_answers_alone() -> None:
    memory: AnswerMemory[int] = AnswerMemory(ReuseLimits(100, 150, 10.0))
    memory.put("calm", b"c", 0, 40, 0.0)
    for n in range(20):
        memory.put("busy", bytes([n]), n, 10, 0.0)
        memory.get("busy", bytes([0]), 0.0)
    assert memory.get("calm", b"c", 0.0) == (0, 0.0)
    assert memory.get("busy", bytes([0]), 0.0) == (0, 0.0), "used again and again"
    assert memory.get("busy", bytes([1]), 0.0) is None
    memory.put("third", b"t", 0, 50, 0.0)
    assert memory.get("calm", b"c", 0.0) == (0, 0.0), "the one that has most gives way"


# Over HTTP


async def answer_of(
    http: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions", key: str = ""
) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = await http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def call_in(answer: dict[str, Any]) -> dict[str, Any]:
    call: dict[str, Any] = answer["cato"]["nodes"][0]["llm"]
    return call


async def test_nothing_is_shared_unless_a_deployment_asks_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=FLOWS) as kit, kit.http() as http:
        answers = [await answer_of(http, PROMPT) for _ in range(2)]
    assert [call_in(a)["reused"] for a in answers] == ["", ""]


async def test_a_repeated_completion_comes_from_memory(tmp_path: Path) -> None:
    task = {"model": "cato-completion", "prompt": "def g(", "suffix": "return 1"}
    async with (
        running(tmp_path, a_fast_pool(), workflows=FLOWS, reuse=KEPT) as kit,
        kit.http() as http,
    ):
        for body in (PROMPT, task):
            first = await answer_of(http, body)
            again = await answer_of(http, {**body, "user": "somebody else"})
            other = await answer_of(http, {**body, "max_tokens": 7})
            assert again["choices"] == first["choices"]
            assert again["usage"] == first["usage"]
            assert again["cato"]["request_id"] != first["cato"]["request_id"]
            assert call_in(first)["reused"] == call_in(other)["reused"] == ""
            assert re.fullmatch(r"memory, \d+ s old", call_in(again)["reused"])
            assert call_in(again)["replica"] == ""
        used = (await http.get("/v1/usage")).json()["data"]
        page = (await http.get("/metrics")).text
        drawn = await answer_of(http, {**PROMPT, "temperature": 0.7})
        drawn_again = await answer_of(http, {**PROMPT, "temperature": 0.7})
    assert call_in(drawn)["reused"] == call_in(drawn_again)["reused"] == ""
    assert sum(u["requests"] for u in used) == 6
    computed = sum(u["output_tokens"] for u in used)
    assert computed == 20 + 7 + 12 + 7, "what no engine was asked for costs nothing"
    assert 'cato_reused_calls_total{pool="sim-fast-pool",source="memory"} 2.0' in page


async def test_a_chat_is_shared_in_flight_and_not_kept(tmp_path: Path) -> None:
    chat = {
        "model": "slow", "messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "seed": 3
    }  # fmt: skip
    slow = a_pool("sim-slow", "slow", step_s=0.02)
    path = "/v1/chat/completions"
    async with running(tmp_path, slow, workflows=(), reuse=KEPT) as kit, kit.http() as http:
        together = await asyncio.gather(*(answer_of(http, chat, path) for _ in range(4)))
        later = await answer_of(http, chat, path)
        dispatched = slow.orchestrator.picture(0.0).dispatched
    assert sorted(call_in(a)["reused"] for a in together) == ["", *["in flight"] * 3]
    assert len({a["choices"][0]["message"]["content"] for a in (*together, later)}) == 1
    assert call_in(later)["reused"] == ""
    assert dispatched == 2


async def test_tenants_share_nothing(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("red", "blue")}
    access = an_access(
        Access(tuple(ApiKey(id, digest, name) for name, (_, id, digest) in keys.items()))
    )
    async with (
        running(tmp_path, a_fast_pool(), workflows=FLOWS, access=access, reuse=KEPT) as kit,
        kit.http() as http,
    ):
        red = await answer_of(http, PROMPT, key=keys["red"][0])
        blue = await answer_of(http, PROMPT, key=keys["blue"][0])
        again = await answer_of(http, PROMPT, key=keys["blue"][0])
    assert [call_in(a)["reused"].partition(",")[0] for a in (red, blue, again)] == [
        "", "", "memory",
    ]  # fmt: skip


async def streamed_text(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    text = ""
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(c["text"] for c in event.get("choices", ()))
    return text


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_followers_have_the_whole_answer_when_the_leaders_client_leaves(
    tmp_path: Path, is_streamed: bool
) -> None:
    slow = a_pool("sim-slow", "slow", step_s=0.03, prefill_s=0.1)
    body = {**PROMPT, "model": "slow", "max_tokens": 40, "ignore_eos": True}
    async with (
        running(tmp_path, slow, workflows=(), reuse=ReuseLimits()) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url) as http,
    ):

        async def ask() -> str:
            if is_streamed:
                return await streamed_text(http, body)
            return str((await answer_of(http, body))["choices"][0]["text"])

        alone = await ask()
        leader = asyncio.create_task(ask())
        await until_busy(slow)
        followers = [asyncio.create_task(ask()) for _ in range(3)]
        await asyncio.sleep(0.15)
        leader.cancel()
        texts = await asyncio.gather(*followers)
        await until(lambda: len(kit.records.receipts) == 5, within_s=5)
        receipts = list(kit.records.receipts.values())
        dispatched = slow.orchestrator.picture(0.0).dispatched
    assert texts == [alone] * 3
    assert dispatched == 2, "the leader's call went on for the others"
    assert sorted(r.status for r in receipts) == ["cancelled", *["done"] * 4]


async def test_a_call_that_nobody_reads_any_more_is_cancelled(tmp_path: Path) -> None:
    slow = a_pool("sim-slow", "slow", step_s=0.05)
    body = {**PROMPT, "model": "slow", "max_tokens": 2000, "ignore_eos": True}
    async with (
        running(tmp_path, slow, workflows=(), reuse=KEPT) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        asked = [asyncio.create_task(streamed_text(http, body)) for _ in range(2)]
        await until_busy(slow)
        await asyncio.sleep(0.1)
        for task in asked:
            task.cancel()
        await until(lambda: len(kit.records.receipts) == 2, within_s=5)
        assert slow.orchestrator.picture(0.0).dispatched == 1
        assert {r.status for r in kit.records.receipts.values()} == {"cancelled"}


async def test_a_follower_goes_on_when_the_leader_passes_its_own_deadline(tmp_path: Path) -> None:
    slow = a_pool("sim-slow", "slow", step_s=0.02)
    body = {**PROMPT, "model": "slow", "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with (
        running(tmp_path, slow, workflows=(), reuse=KEPT) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        hasty = asyncio.create_task(
            http.post("/v1/completions", json=body, headers={"X-CATO-Deadline-Ms": "300"})
        )
        await until_busy(slow)
        text = await streamed_text(http, body)
        await hasty
        alone = await streamed_text(http, {**body, "seed": 1})
        statuses = [r.status for r in kit.records.receipts.values()]
    assert text == alone
    assert statuses == ["deadline_exceeded", "done", "done"]


async def test_an_urgent_call_does_not_wait_for_one_that_may_begin_later(tmp_path: Path) -> None:
    slow = a_pool("sim-slow", "slow", prefill_s=0.3)
    body = {**PROMPT, "model": "slow"}
    async with running(tmp_path, slow, workflows=(), reuse=KEPT) as kit, kit.http() as http:
        patient = asyncio.create_task(answer_of(http, {**body, "cato": {"sla": "batch"}}))
        await until_busy(slow)
        urgent = await answer_of(http, body)
        first = await patient
    assert call_in(first)["reused"] == call_in(urgent)["reused"] == ""
