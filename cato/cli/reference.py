"""Writes `REFERENCE.md` from the command line's own help and the schemas of files.

python -m cato.cli.reference
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperGroup, TyperOption

from cato.cli import VERBS, command_of_verb
from cato.config.schema import EnginesArgs, IngressArgs
from cato.workflows.json_schema import workflow_json_schema

HERE = Path(__file__).parent
TARGET = HERE / "REFERENCE.md"
HEAD = """# Reference

Written by `python -m cato.cli.reference`; change the code that it reads.
"""


def text() -> str:
    """The whole document."""
    return "\n".join([HEAD, *_commands(), *_workflow_keys(), *_deployment_keys()]) + "\n"


def _commands() -> Iterator[str]:
    yield "## Command line\n"
    for verb, line in VERBS.items():
        command = command_of_verb(verb)
        yield f"### cato {verb}\n\n{line}\n"
        if isinstance(command, TyperGroup):
            for name, inner in command.commands.items():
                yield from _command(f"cato {verb} {name}", inner)
        else:
            yield from _command(f"cato {verb}", command)


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = " ".join(_argument(p) for p in command.params if isinstance(p, TyperArgument))
    yield f"`{name}{' ' + arguments if arguments else ''}`\n"
    if command.help:
        yield " ".join(command.help.split()) + "\n"
    options = [p for p in command.params if isinstance(p, TyperOption) and not p.hidden]
    options = [
        o for o in options if not {"--install-completion", "--show-completion"} & set(o.opts)
    ]
    if options:
        yield "| option | |\n|---|---|"
        for option in options:
            names = ", ".join(f"`{n}`" for n in (*option.opts, *option.secondary_opts))
            yield f"| {names} | {_cell(option.help or '')} |"
        yield ""


def _argument(argument: TyperArgument) -> str:
    name = (argument.name or "").upper()
    if argument.nargs == -1:
        name += "..."
    return name if argument.required else f"[{name}]"


def _workflow_keys() -> Iterator[str]:
    document: dict[str, Any] = workflow_json_schema()
    yield "## Workflow files\n"
    yield "Editors read them from `workflows/workflow.schema.json`.\n"
    yield from _keys("The file", document)
    for name, part in sorted(document.get("$defs", {}).items()):
        if part.get("properties"):
            yield from _keys(name.removesuffix("Part").lower(), part)


def _deployment_keys() -> Iterator[str]:
    yield "## Deployment files\n"
    yield (
        "A deployment file is a Ray Serve config file with two applications; these are their "
        "`args`. `cato check FILE` names every problem with its line.\n"
    )
    for name, model in (("engines", EnginesArgs), ("cato", IngressArgs)):
        document = model.model_json_schema()
        yield from _keys(f"args of the application `{name}`", document)
        for part_name, part in sorted(document.get("$defs", {}).items()):
            yield from _keys(part_name.removesuffix("Args"), part)


def _keys(title: str, part: dict[str, Any]) -> Iterator[str]:
    yield f"### {title}\n"
    if part.get("description"):
        yield " ".join(part["description"].split()) + "\n"
    yield "| key | type | default | |\n|---|---|---|---|"
    required = set(part.get("required", ()))
    for key, value in part["properties"].items():
        known = json.dumps(value["default"]) if value.get("default") is not None else ""
        default = "required" if key in required else known and f"`{known}`"
        about = _cell(value.get("description", ""))
        yield f"| `{key}` | {_cell(_type(value))} | {default} | {about} |"
    yield ""


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return name.removesuffix("Args").removesuffix("Part")
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_type(s) for s in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))]
        return " or ".join(k for k in dict.fromkeys(kinds) if k != "null")
    if "enum" in schema:
        return ", ".join(f"`{v}`" for v in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    match schema.get("type"):
        case "string" if "200ms" in schema.get("examples", ()):
            return "duration"
        case "array":
            return f"list of {_type(schema.get('items', {}))}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"name: {_type(schema['additionalProperties'])}"
        case kind:
            return {"string": "text", "boolean": "true, false", "object": "mapping"}.get(
                str(kind), str(kind or "any")
            )


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
