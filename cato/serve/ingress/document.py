"""Builds the OpenAPI document from `openapi.yaml`.

Routes refer to their entry by name, such as `document.CHAT`. A new route needs an entry in
`operations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_DATA: Mapping[str, Any] = yaml.load(
    resources.files(__package__).joinpath("openapi.yaml").read_text("utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
_ADMIN_PATH = "/v1/admin/"


def __getattr__(name: str) -> Any:
    """An entry of `operations`: a route's arguments, or its responses."""
    try:
        return _DATA["operations"][name]
    except KeyError:
        raise AttributeError(f"openapi.yaml has no operation {name}") from None


def install(app: FastAPI) -> None:
    """Make `app.openapi()` return the whole document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    for path, operations in document["paths"].items():
        error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        for method, operation in operations.items():
            _name_errors(operation, error)
            if method == "post" and not path.startswith(_ADMIN_PATH):
                operation["parameters"] = [*operation.get("parameters", ()), *_DATA["hints"]]
    document["components"] = {"schemas": _DATA["schemas"], "securitySchemes": _DATA["security"]}
    document["security"] = [{name: []} for name in _DATA["security"]]
    document["servers"] = _DATA["servers"]
    return document


def _name_errors(operation: dict[str, Any], schema: str) -> None:
    """Declare the errors of an operation. Invalid requests get 400, so 422 is removed."""
    responses = operation["responses"]
    responses.pop("422", None)
    responses["default"] = {
        "description": "The request failed; see the header `X-CATO-Problem` for details.",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }
