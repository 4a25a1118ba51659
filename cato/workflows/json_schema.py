"""The JSON Schema of a workflow file, for editors: completion, hints and early warnings.

`python -m cato.workflows.json_schema` writes it to `workflows/workflow.schema.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cato.workflows.schema import WorkflowPart

SCHEMA_FILE = Path("workflows/workflow.schema.json")


def workflow_json_schema() -> dict[str, Any]:
    """The JSON Schema. It cannot express the loader's checks of the graph and the templates."""
    schema = WorkflowPart.model_json_schema()
    _tidy(schema)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "CATO workflow"}
    return {**head, **schema}


def write_json_schema(path: Path = SCHEMA_FILE) -> None:
    """Write the schema to `path`."""
    text = json.dumps(workflow_json_schema(), indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _tidy(value: Any) -> None:
    """Remove pydantic's generated titles, null alternatives, and line breaks."""
    if isinstance(value, list):
        for item in value:
            _tidy(item)
    if not isinstance(value, dict):
        return
    if isinstance(value.get("title"), str):
        del value["title"]
    if isinstance(value.get("description"), str):
        value["description"] = " ".join(value["description"].split())
    options = value.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options:
        options.remove({"type": "null"})
        value.pop("default", None)
        if len(options) == 1:
            del value["anyOf"]
            value.update(options[0])
    for item in value.values():
        _tidy(item)


if __name__ == "__main__":
    write_json_schema()
