"""Rollouts at the door: who gets which model, what is counted, and who may order one."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_kit import COMPLETION, Kit, a_pool, an_access, running, until, until_busy
from typer.testing import CliRunner

from cato.cli import app
from cato.core.receipt import TrafficArm
from cato.core.rollout import Rollout
from cato.core.rollout_book import RolloutOrder
from cato.core.tenancy import Access, ApiKey, Role
from cato.lab.chaos.local_pools import LocalPool
from cato.serve.access.keys import new_key

OLD, NEW = "coder-1", "coder-2"
PATH = "/v1/admin/rollouts"
HALF = {"shares": [0.5], "shadow_share": 0, "min_calls": 1_000_000, "max_calls": 1_000_000}


def two_pools() -> tuple[LocalPool, LocalPool]:
    return a_pool(OLD, "coder", "fast"), a_pool(NEW)


async def started(http: httpx.AsyncClient, name: str = "coder", **rule: Any) -> dict[str, Any]:
    body = {"name": name, "canary": NEW, "rule": HALF | rule}
    answer = await http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def asked(http: httpx.AsyncClient, session: str, model: str = "coder") -> dict[str, Any]:
    """A completion of `session`; its receipt."""
    body = {"model": model, "prompt": "def f(", "max_tokens": 3, "cato": {"receipt": True}}
    answer = await http.post("/v1/completions", json=body, headers={"X-CATO-Session": session})
    assert answer.status_code == 200, answer.text
    receipt: dict[str, Any] = answer.json()["cato"]
    return receipt


def model_of(receipt: dict[str, Any]) -> str:
    model: str = receipt["nodes"][0]["llm"]["model"]
    return model


def known(kit: Kit) -> Rollout:
    return kit.records.book.all["coder"]


def session_with(kit: Kit, arm: TrafficArm) -> str:
    def draws(session: str) -> bool:
        _, drawn = known(kit).draw(f"\0{session}", lambda _: True)
        return drawn is not None and drawn.arm is arm

    return next(s for s in map(str, range(100)) if draws(s))


async def test_sessions_are_split_and_keep_their_model(tmp_path: Path) -> None:
    async with running(tmp_path, *two_pools(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        await started(http)
        first = {str(n): model_of(await asked(http, str(n))) for n in range(30)}
        again = {str(n): model_of(await asked(http, str(n))) for n in range(30)}
        straight = {model_of(await asked(http, str(n), OLD)) for n in range(10)}
        (shown,) = (await http.get(PATH)).json()["data"]
    assert first == again
    assert set(first.values()) == {OLD, NEW}
    assert straight == {OLD}  # its own name is in no rollout
    calls = shown["stable_counts"]["calls"], shown["canary_counts"]["calls"]
    assert calls == tuple(2 * list(first.values()).count(m) for m in (OLD, NEW))


async def test_a_chat_without_a_session_name_keeps_its_model_from_turn_to_turn(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, *two_pools(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        await started(http)
        models: list[set[str]] = []
        for n in range(12):
            said = [{"role": "user", "content": f"Conversation {n}"}]
            used = set()
            for _ in range(3):
                body = {"model": "coder", "messages": said, "max_tokens": 2}
                answer = await http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                used.add(model_of(answer.json()["cato"]))
                said += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go"}]
            models.append(used)
    assert all(len(used) == 1 for used in models)
    assert set().union(*models) == {OLD, NEW}


async def test_the_nodes_of_tasks_follow_the_rollout_too(tmp_path: Path) -> None:
    async with running(tmp_path, *two_pools(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        await started(http, "fast")
        used = set()
        for n in range(20):
            body = {"inputs": {"prefix": "def f("}}
            answer = await http.post(
                "/v1/tasks/code-completion", json=body, headers={"X-CATO-Session": str(n)}
            )
            used.add(model_of(answer.json()["cato"]))
        assert used == {OLD, NEW}
        await http.post(f"{PATH}/promote", json={"name": "fast"})
        answer = await http.post("/v1/tasks/code-completion", json=body)
        assert model_of(answer.json()["cato"]) == NEW


async def test_what_a_canary_refuses_is_answered_by_the_stable_model(
    tmp_path: Path,
) -> None:
    full = a_pool(NEW, step_s=0.02, slots=1, max_queued=0)
    async with (
        running(tmp_path, a_pool(OLD, "coder"), full, workflows=(COMPLETION,)) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        await started(http)
        session = session_with(kit, TrafficArm.CANARY)
        body = {"model": NEW, "prompt": "a", "max_tokens": 3000, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as busy:
            await anext(busy.aiter_lines())
            receipt = await asked(http, session)
        await until(lambda: known(kit).canary_counts.calls == 1, within_s=5)
    assert (receipt["status"], model_of(receipt)) == ("done", OLD)
    assert f"{NEW} failed: " in " ".join(receipt["nodes"][0]["llm"]["reasons"])
    assert known(kit).canary_counts.errors == 1
    assert known(kit).canary_counts.met == 0


async def test_what_falls_back_is_a_new_call_for_the_bounds_of_the_other_pool(
    tmp_path: Path,
) -> None:
    full = a_pool(NEW, step_s=0.02, slots=1, max_queued=0)
    stable = a_pool(OLD, "coder", step_s=0.02, slots=1, max_queued=1)
    async with (
        running(tmp_path, stable, full, workflows=(COMPLETION,)) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url) as http,
        asyncio.TaskGroup() as group,
    ):
        await started(http)
        headers = {"X-CATO-Session": session_with(kit, TrafficArm.CANARY)}
        long = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True}
        busy = [
            group.create_task(http.post("/v1/completions", json=long | {"model": model}))
            for model in (OLD, NEW)
        ]
        await until_busy(stable)
        await until_busy(full)
        call = {"model": "coder", "prompt": "a", "max_tokens": 3, "cato": {"receipt": True}}
        ask = partial(http.post, "/v1/completions", json=call, headers=headers)
        waits = group.create_task(ask())
        await until(lambda: stable.orchestrator.queued == 1, within_s=5)
        refused = await ask()
        assert refused.status_code == 429, refused.text
        for task in busy:
            task.cancel()
        receipt = (await waits).json()["cato"]
    assert model_of(receipt) == OLD
    assert receipt["nodes"][0]["llm"]["attempts"] == 2


async def test_streams_under_way_survive_a_rollback(tmp_path: Path) -> None:
    slow = a_pool(NEW, step_s=0.02)
    async with (
        running(tmp_path, a_pool(OLD, "coder"), slow, workflows=(COMPLETION,)) as kit,
        kit.server() as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        await started(http)
        headers = {"X-CATO-Session": session_with(kit, TrafficArm.CANARY)}
        body = {"model": "coder", "prompt": "a", "max_tokens": 20, "stream": True}
        body |= {"ignore_eos": True, "cato": {"receipt": True}}
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            back = await http.post(f"{PATH}/rollback", json={"name": "coder"})
            assert back.json()["phase"] == "rolled-back"
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert model_of(await asked(http, headers["X-CATO-Session"])) == OLD
    (receipt,) = (r for r in kit.records.receipts.values() if r.output_tokens == 20)
    assert receipt.status == "done"


async def test_shadow_traffic_is_answered_by_both_and_seen_from_one(tmp_path: Path) -> None:
    async with running(tmp_path, *two_pools(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        await started(http, shadow_share=1.0)
        receipts = [await asked(http, str(n)) for n in range(5)]
        await until(lambda: known(kit).canary_counts.calls == 5, within_s=5)
        used = (await http.get("/v1/usage")).json()["data"]
    assert {model_of(r) for r in receipts} == {OLD}
    assert known(kit).stable_counts.calls == 5
    assert [(u["model"], u["requests"]) for u in used] == [(OLD, 5)]
    assert len(kit.records.receipts) == 5


async def test_shadow_traffic_is_bounded(tmp_path: Path) -> None:
    slow = a_pool(NEW, prefill_s=60.0)
    async with (
        running(tmp_path, a_pool(OLD, "coder"), slow, workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        await started(http, shadow_share=1.0)
        for n in range(12):
            await asked(http, str(n))

        async def all_begun() -> bool:
            return await slow.running() == 4

        await until(all_begun, within_s=5)
        assert known(kit).stable_counts.calls == 12


async def test_a_key_of_one_model_gets_no_other_by_a_rollout(tmp_path: Path) -> None:
    keys = [new_key() for _ in range(3)]
    rights = ({"models": (OLD,)}, {"models": ("coder",)}, {"role": Role.OPERATOR})
    access = Access(tuple(ApiKey(k[1], k[2], "a", **r) for k, r in zip(keys, rights, strict=True)))  # type: ignore[arg-type]
    (own, _, _), (alias, _, _), (operator, _, _) = keys
    async with (
        running(tmp_path, *two_pools(), workflows=(COMPLETION,), access=an_access(access)) as kit,
        kit.http() as http,
    ):
        http.headers["api-key"] = operator
        await started(http)
        seen = {}
        for secret in (own, alias):
            http.headers["api-key"] = secret
            seen[secret] = {model_of(await asked(http, str(n))) for n in range(20)}
        refused = [
            await http.get(PATH),
            await http.post(PATH, json={"name": "coder", "canary": NEW}),
            await http.post(f"{PATH}/promote", json={"name": "coder"}),
            await http.post(f"{PATH}/rollback", json={"name": "coder"}),
        ]
        state = (await http.get("/ui/state")).json()
    assert seen == {own: {OLD}, alias: {OLD, NEW}}
    assert [r.status_code for r in refused] == [403] * 4
    assert state["rollouts"] == []


async def test_a_promotion_from_the_shell_that_is_sent_twice_goes_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HAProxy does when an ingress dies before its answer."""
    async with (
        running(tmp_path, *two_pools(), workflows=(COMPLETION,)) as kit,
        kit.server() as url,
        kit.http() as http,
    ):
        before = await started(http, shares=[0.1, 0.2, 0.3])
        send = kit.records.order_rollout

        async def twice(order: RolloutOrder, by: str) -> Rollout:
            await send(order, by)
            return await send(order, by)

        monkeypatch.setattr(kit.records, "order_rollout", twice)
        words = ("rollout", "promote", "coder", "--url", url)
        told = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert told.exit_code == 0, told.output
    assert (before["stage"], known(kit).stage, known(kit).share) == (0, 1, 0.2)


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"name": "nobody", "canary": NEW}, 404, "nobody"),
        ({"name": "coder", "canary": "nobody"}, 404, "nobody"),
        ({"name": "coder", "canary": OLD, "rule": {"shadow_share": 0}}, 400, "already"),
        ({"name": "coder", "canary": OLD}, 400, "same replicas"),
        ({"name": "coder", "canary": NEW, "rule": {"share": 1}}, 400, "unknown field 'share'"),
        ({"name": "coder", "canary": NEW, "rule": {"shares": [0.5, 0.2]}}, 400, "increasing"),
        ({"name": "coder", "canary": NEW, "rule": {"shares": [1]}}, 400, "below 1"),
        ({"name": "coder", "canary": NEW, "rule": {"min_calls": 10**12}}, 400, "min_calls"),
        ({"name": "coder", "canary": NEW, "rule": {"hold_s": True}}, 400, "hold_s"),
        ({"name": ["coder"], "canary": NEW}, 400, "name"),
    ],
)
async def test_an_order_that_makes_no_sense_is_refused(
    tmp_path: Path, body: dict[str, Any], status: int, word: str
) -> None:
    async with running(tmp_path, *two_pools(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        answer = await http.post(PATH, json=body)
        assert kit.records.book.all == {}
    assert answer.status_code == status
    assert word in answer.text + answer.headers.get("X-CATO-Problem", "")


async def test_a_canary_without_a_replica_is_not_started(tmp_path: Path) -> None:
    old, new = two_pools()
    async with running(tmp_path, old, new, workflows=(COMPLETION,)) as kit, kit.http() as http:
        for id in new.ready:
            new.vanish(id)
        answer = await http.post(PATH, json={"name": "coder", "canary": NEW})
        assert kit.records.book.all == {}
    assert answer.status_code == 400
    assert "no replica" in answer.text
