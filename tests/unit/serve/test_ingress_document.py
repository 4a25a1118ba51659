"""The OpenAPI document: complete and valid. That it is true is asked by `test_ingress_fuzz.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, served
from jsonschema import Draft202012Validator

import cato.serve.ingress

PATHS = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
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
    "/v1/files",
    "/v1/files/{file_id}",
    "/v1/files/{file_id}/content",
    "/v1/batches",
    "/v1/batches/{batch_id}",
    "/v1/batches/{batch_id}/cancel",
    "/v1/admin/rollouts",
    "/v1/admin/rollouts/promote",
    "/v1/admin/rollouts/rollback",
    "/v1/admin/tenants",
    "/v1/admin/tenants/{tenant}",
    "/v1/admin/keys",
    "/v1/admin/keys/{key}",
    "/v1/admin/keys/{key}/rotate",
    "/v1/admin/keys/{key}/end",
    "/v1/admin/audit",
    "/health",
    "/livez",
    "/readyz",
    "/metrics",
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("workflows")
    with served(folder, a_fast_pool(), workflows=(COMPLETION, GENERATION)) as url:
        found: dict[str, Any] = httpx.get(f"{url}/openapi.json", timeout=20).json()
    return found


def test_every_path_is_there_and_says_what_it_answers(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == PATHS
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], path
            assert set(operation["responses"]) >= {"200", "default"}
            assert "422" not in operation["responses"]
            bodiless = ("/v1/health", "/v1/batches/{batch_id}/cancel", "/v1/admin/keys/{key}/end")
            if method == "post" and path not in bodiless:
                (content,) = operation["requestBody"]["content"].values()
                assert content["schema"], path
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema), name


def test_every_operation_of_the_data_belongs_to_a_route() -> None:
    folder = Path(cato.serve.ingress.__file__).parent
    code = "".join(p.read_text(encoding="utf-8") for p in folder.rglob("*.py"))
    data = yaml.safe_load((folder / "openapi.yaml").read_text(encoding="utf-8"))
    assert set(data["operations"]) == set(re.findall(r"\bdocument\.([A-Z_]+)\b", code))
