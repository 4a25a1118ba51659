"""`/docs`: renders the OpenAPI document as one page without external resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>CATO API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="ui/page.css">
</head>
<body class="docs">
<header>
  <h1>CATO API</h1>
  <p><a href="ui">status page</a> · <a href="openapi.json">openapi.json</a></p>
</header>
<main>
"""
TITLES = {
    "tasks": "Tasks: workflows with an SLA",
    "openai": "OpenAI-compatible API",
    "anthropic": "Anthropic-compatible API",
    "fim": "Completion for editors",
    "operations": "For operators",
}


def page(document: Mapping[str, Any]) -> str:
    """The HTML page for an OpenAPI document."""
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = str((operation.get("tags") or ["others"])[0])
            groups.setdefault(tag, []).append(_operation(document, method, path, operation))
    body = "".join(
        f"<section><h2>{escape(TITLES.get(tag, tag.capitalize()))}</h2>{''.join(parts)}</section>\n"
        for tag, parts in groups.items()
    )
    about = escape(f"{document['info']['description']} Version {document['info']['version']}.")
    return f"{HEAD}<p>{about}</p>\n{body}</main>\n</body>\n</html>\n"


def _operation(
    document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]
) -> str:
    about = escape(" ".join(str(operation.get("description", "")).split()))
    rows = [*_parameters(operation), *_fields(document, operation)]
    table = ""
    if rows:
        table = (
            '<table><thead><tr><th scope="col">name</th><th scope="col">in</th>'
            f'<th scope="col">type</th><th scope="col"></th></tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table>"
        )
    return (
        f'<details class="card"><summary><span class="code">{method.upper()} {escape(path)}</span> '
        f'<span class="soft">{about}</span></summary>{table}</details>'
    )


def _parameters(operation: Mapping[str, Any]) -> Iterator[str]:
    for parameter in operation.get("parameters", ()):
        where = str(parameter["in"])
        yield _row(
            str(parameter["name"]),
            where,
            _type(parameter.get("schema", {})),
            str(parameter.get("description", "")),
            is_required=bool(parameter.get("required")),
        )


def _fields(document: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    for kind in schema.get("anyOf", [schema]):
        kind = _followed(document, kind)
        required = kind.get("required", ())
        for name, field in kind.get("properties", {}).items():
            about = str(_followed(document, field).get("description", ""))
            yield _row(name, "body", _type(field), about, is_required=name in required)


def _followed(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema itself, or the one behind its `$ref`."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found: Mapping[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema:
        return " | ".join("null" if v is None else str(v) for v in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _row(name: str, where: str, type_: str, about: str, *, is_required: bool) -> str:
    mark = " <strong>*</strong>" if is_required else ""
    return (
        f'<tr><td class="code">{escape(name)}{mark}</td><td>{escape(where)}</td>'
        f"<td>{escape(type_)}</td><td>{escape(' '.join(about.split()))}</td></tr>"
    )
