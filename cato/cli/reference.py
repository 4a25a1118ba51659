"""Writes `REFERENCE.md` from the command line's own help and the schema of workflow files.

python -m cato.cli.reference
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperGroup, TyperOption

from cato.cli import VERBS, command_of_verb
from cato.workflows.json_schema import workflow_json_schema

HERE = Path(__file__).parent
TARGET = HERE / "REFERENCE.md"
HEAD = """# Reference

Written by `python -m cato.cli.reference`; change the code that it reads.
"""


def text() -> str:
    """The whole document."""
    return "\n".join([HEAD, *_commands(), *_workflow_keys()]) + "\n"


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


def _keys(title: str, part: dict[str, Any]) -> Iterator[str]:
    yield f"### {title}\n"
    if part.get("description"):
        yield " ".join(part["description"].split()) + "\n"
    yield "| key | default | |\n|---|---|---|"
    required = set(part.get("required", ()))
    for key, value in part["properties"].items():
        known = json.dumps(value["default"]) if value.get("default") is not None else ""
        default = "required" if key in required else known and f"`{known}`"
        yield f"| `{key}` | {default} | {_cell(value.get('description', ''))} |"
    yield ""


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
