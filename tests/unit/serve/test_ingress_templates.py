"""A model whose chat template loses tools or system texts says so: at the start and to agents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, an_access, workflows_of
from test_keys import foreign

from cato.core.topology import TemplateFacts
from cato.lab.chaos.local_pools import LocalPools, LocalRecords
from cato.serve.ingress.app import create_app
from cato.serve.nodes.runner import NodeRunner
from cato.serve.pools import PoolInfo
from cato.serve.service import TaskService

DROPS = TemplateFacts(False, False, False, False)
NO_SYSTEM = TemplateFacts(True, False, False, False)
WHOLE = TemplateFacts(True, True, True, True)

TOOL = {"name": "read", "parameters": {"type": "object"}}
MESSAGES = [{"role": "user", "content": "x"}]
CHAT = (
    "/v1/chat/completions",
    {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}]},
)
RESPONSES = ("/v1/responses", {"input": "x", "tools": [{"type": "function", **TOOL}]})
MESSAGE = (
    "/v1/messages",
    {"messages": MESSAGES, "tools": [{"name": "read", "input_schema": {"type": "object"}}]},
)


class TemplatedPools(LocalPools):
    """Pools whose engines have told what their template does."""

    template: TemplateFacts | None = None

    def all(self) -> Sequence[PoolInfo]:
        return [replace(pool, template=self.template) for pool in super().all()]


@asynccontextmanager
async def an_app(folder: Path, template: TemplateFacts | None) -> AsyncIterator[Any]:
    pools = TemplatedPools(a_fast_pool())
    pools.template = template
    async with pools:
        service = TaskService(
            workflows_of(folder, COMPLETION, GENERATION), pools, NodeRunner({}),
            LocalRecords(pools), seed=1,
        )  # fmt: skip
        yield create_app(service, max_body_bytes=9999, ready=lambda: (True, ""), access=an_access())


def near(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.mark.parametrize("model", ["fast", "cato-generation"])
@pytest.mark.parametrize(("path", "body"), [CHAT, RESPONSES, MESSAGE])
async def test_tools_that_a_model_would_never_see_are_an_error_that_says_so(
    tmp_path: Path, path: str, body: dict[str, Any], model: str
) -> None:
    asked = {**body, "model": model, "max_tokens": 4}
    async with an_app(tmp_path, DROPS) as app, near(app) as http:
        answer = await http.post(path, json=asked)
        streamed = await http.post(path, json={**asked, "stream": True})
    for refused in (answer, streamed):
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert "'sim-fast' cannot be used with tools" in message
        assert "drops tools and system texts" in message


@pytest.mark.parametrize("template", [WHOLE, NO_SYSTEM, None])
async def test_tools_that_are_seen_or_may_be_pass(
    tmp_path: Path, template: TemplateFacts | None
) -> None:
    path, body = CHAT
    async with an_app(tmp_path, template) as app, near(app) as http:
        answer = await http.post(path, json={**body, "model": "fast", "max_tokens": 4})
    assert answer.status_code == 200


@pytest.mark.parametrize("change", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}])
async def test_who_asks_for_no_call_of_a_tool_is_answered(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path, body = CHAT
    async with an_app(tmp_path, DROPS) as app, near(app) as http:
        answer = await http.post(path, json={**body, **change, "model": "fast", "max_tokens": 4})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("template", "lost"),
    [(DROPS, "tools and system texts"), (NO_SYSTEM, "system texts"), (WHOLE, ""), (None, "")],
)
async def test_the_operator_reads_it_on_the_status_page_and_at_the_start(
    tmp_path: Path, template: TemplateFacts | None, lost: str
) -> None:
    async with an_app(tmp_path, template) as app, near(app) as http, foreign(app) as far:
        state, ready = (await http.get("/ui/state")).json(), (await http.get("/readyz")).json()
        told_others = (await far.get("/readyz")).json()
    note = f"the chat template of sim-fast drops {lost}: no agents" if lost else ""
    assert [pool["note"] for pool in state["pools"]] == [note]
    assert ready == {"status": "ready", **({"notes": [note]} if note else {})}
    assert told_others == {"status": "ready"}
