"""What a tenant did is its own: receipts, metrics, and what engines have cached of its prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, an_access, running
from store_kit import a_receipt
from test_keys import a_key, bearer
from typer.testing import CliRunner

from cato.cli import app as cli
from cato.control.profiler import Profiler
from cato.core.receipt import SlaReceipt
from cato.core.tenancy import Access, Role
from cato.serve.access.control import AccessControl
from cato.serve.ingress.app import create_app
from cato.store.records import KeptReceipt
from cato.store.store import MetadataStore

ANN, ANNS_KEY = a_key("ann")
BOB, BOBS_KEY = a_key("bob")
OPS, OPS_KEY = a_key("ops", role=Role.OPERATOR)
KEYS = Access((ANNS_KEY, BOBS_KEY, OPS_KEY))
LONG = "def f(x):\n" + "    return x\n" * 400
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "fast", "prompt": LONG},
    "/v1/chat/completions": {"model": "fast", "messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"model": "fast", "input": LONG},
    "/v1/messages": {
        "model": "fast", "messages": [{"role": "user", "content": LONG}], "max_tokens": 8
    },
    "/v1/fim/completions": {"model": "fast", "prompt": LONG},
    "/v1/tasks/code-completion": {"inputs": {"prefix": LONG}},
    "/v1/tasks/code-generation": {"inputs": {"instruction": LONG}},
}  # fmt: skip


@asynccontextmanager
async def clients(
    folder: Path, access: AccessControl | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    access = access or an_access(KEYS)
    async with running(folder, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as kit:
        app = create_app(
            kit.service,
            max_body_bytes=100_000,
            ready=lambda: (True, ""),
            access=access,
            **settings,
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http


async def cached_tokens(http: httpx.AsyncClient, path: str, secret: str, **extra: Any) -> int:
    """What the engine had in its cache of the prompt of one call."""
    answer = await http.post(path, json={**ASKED[path], **extra}, headers=bearer(secret))
    assert answer.status_code == 200, answer.text
    id = answer.headers["x-request-id"]
    receipt = (await http.get(f"/v1/requests/{id}", headers=bearer(secret))).json()
    return sum(n["llm"]["cached_prompt_tokens"] for n in receipt["nodes"] if n["llm"])


@pytest.mark.parametrize("path", sorted(ASKED))
async def test_the_cache_tells_nothing_of_another_tenants_prompts(
    tmp_path: Path, path: str
) -> None:
    async with clients(tmp_path) as http:
        assert await cached_tokens(http, path, ANN) == 0
        assert await cached_tokens(http, path, ANN) > 0
        assert await cached_tokens(http, path, BOB) == 0
    async with clients(tmp_path, shared_prompts=True) as http:
        assert await cached_tokens(http, path, ANN) == 0
        assert await cached_tokens(http, path, BOB) > 0


async def test_a_salt_of_a_tenants_own_separates_more_and_reaches_no_other(
    tmp_path: Path,
) -> None:
    path = "/v1/completions"
    async with clients(tmp_path) as http:
        assert await cached_tokens(http, path, ANN, cache_salt="x") == 0
        assert await cached_tokens(http, path, ANN, cache_salt="x") > 0
        assert await cached_tokens(http, path, ANN) == 0
        assert await cached_tokens(http, path, BOB, cache_salt="x") == 0


async def test_receipts_are_a_tenants_own_also_under_an_id_that_another_chose(
    tmp_path: Path,
) -> None:
    async with clients(tmp_path) as http:
        asked = {"model": "fast", "prompt": "x"}
        for secret in (ANN, BOB):
            headers = bearer(secret) | {"x-request-id": "mine"}
            assert (await http.post("/v1/completions", json=asked, headers=headers)).is_success

        async def seen(secret: str, id: str) -> Any:
            answer = await http.get(f"/v1/requests/{id}", headers=bearer(secret))
            return answer.json().get("tenant"), answer.status_code

        headers = bearer(BOB) | {"x-request-id": "bobs"}
        await http.post("/v1/completions", json=asked, headers=headers)
        assert await seen(ANN, "mine") == ("ann", 200)
        assert await seen(BOB, "mine") == ("bob", 200)
        assert (await seen(ANN, "bobs"))[1] == 404
        assert await seen(OPS, "bobs") == ("bob", 200)


async def test_metrics_are_for_operators_and_a_tenant_reads_its_usage(tmp_path: Path) -> None:
    async with clients(tmp_path) as http:
        for secret in (ANN, BOB):
            await http.post(
                "/v1/completions", json=ASKED["/v1/completions"], headers=bearer(secret)
            )
        refused = [await http.request(m, "/metrics", headers=bearer(ANN)) for m in ("GET", "HEAD")]
        metrics = await http.get("/metrics", headers=bearer(OPS))
        used = {
            secret: (await http.get("/v1/usage", headers=bearer(secret))).json()["data"]
            for secret in (ANN, OPS)
        }
    assert [r.status_code for r in refused] == [403, 403]
    assert refused[0].json()["error"]["code"] == "operators_only"
    assert metrics.status_code == 200
    assert {u["tenant"] for u in used[ANN]} == {"ann"}
    assert {u["tenant"] for u in used[OPS]} == {"ann", "bob"}


def of_tenant(tenant: str) -> SlaReceipt:
    return replace(a_receipt(id="mine"), tenant=tenant)


async def test_the_store_keeps_receipts_of_one_id_for_each_tenant(tmp_path: Path) -> None:
    store = MetadataStore.open(tmp_path / "metadata.db")
    store.write([KeptReceipt(of_tenant("ann"), 1.0), KeptReceipt(of_tenant("bob"), 2.0)])
    store.write([KeptReceipt(of_tenant("ann"), 3.0)])
    found = {who: store.receipt("mine", who) for who in ("ann", "bob", "eve", None)}
    store.close()
    assert found["eve"] is None
    assert [found[w]["tenant"] for w in ("ann", "bob", None)] == ["ann", "bob", "ann"]  # type: ignore[index]

    profiler = Profiler(tmp_path / "metadata.db")
    await profiler.record(((of_tenant("eve"), ()),))
    theirs = [await profiler.receipt("mine", who) for who in ("ann", "eve", None)]
    await profiler.close()
    assert [t and t["tenant"] for t in theirs] == ["ann", "eve", "eve"]


def test_an_operators_key_is_made_and_shown_as_one(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata.db")
    made = ("keys", "create", "--tenant", "ops", "--role", "operator", "--store", path)
    assert CliRunner().invoke(cli, made).exit_code == 0
    store = MetadataStore.open(path)
    (key,) = store.api_keys()
    store.close()
    assert key.role is Role.OPERATOR
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ("keys", "list", "--store", path))
    assert "operator" in shown.output
