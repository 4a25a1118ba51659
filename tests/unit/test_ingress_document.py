"""The OpenAPI document: complete, valid, and true of whatever a server answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, running
from jsonschema import Draft202012Validator
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

PATHS = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/embeddings",
    "/v1/fim/completions",
    "/v1/health",
    "/v1beta/server_setting",
    "/v1/events",
    "/infill",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/tasks",
    "/v1/tasks/{task}",
    "/v1/tasks/{task}/sla",
    "/v1/requests/{request_id}",
    "/v1/usage",
    "/health",
    "/livez",
    "/readyz",
    "/metrics",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in a thread of its own, as the tests below are not asynchronous."""
    loop = asyncio.new_event_loop()
    started: asyncio.Future[str] = loop.create_future()
    stop = asyncio.Event()

    async def serve() -> None:
        folder = tmp_path_factory.mktemp("workflows")
        pool = a_fast_pool()
        async with (
            running(folder, pool, workflows=(COMPLETION, GENERATION)) as kit,
            kit.server() as url,
        ):
            started.set_result(url)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    yield asyncio.run_coroutine_threadsafe(asyncio.wait_for(started, 10), loop).result()
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def api(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def test_every_path_is_there_and_says_what_it_answers(api: Any) -> None:
    document = api.raw_schema
    assert set(document["paths"]) == PATHS
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], path
            assert set(operation["responses"]) >= {"200", "default"}
            assert "422" not in operation["responses"]
            if method == "post" and path not in ("/v1/health",):
                assert operation["requestBody"]["content"]["application/json"]["schema"], path
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema), name


@pytest.mark.slow
def test_whatever_is_asked_the_answer_is_in_the_document(api: Any) -> None:
    for found in api.get_all_operations():
        check(found.ok())


def check(operation: Any, examples: int = 25) -> None:
    """Ask what the document allows of `operation`, and what it does not."""

    @given(operation.as_strategy())
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        response = case.call(timeout=20)
        assert response.status_code < 500, response.text
        case.validate_response(
            response, checks=(response_schema_conformance, content_type_conformance)
        )

    ask()
