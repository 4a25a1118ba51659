"""The command line. One module a verb, imported when it is used, so that `--help` is fast."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command as command_of

# Verb -> its line in `cato --help`; `cato.cli.<verb>` holds the Typer application `app`.
VERBS = {
    "task": "Run a task and print its answer.",
    "explain": "Show how a task met or missed its SLA: nodes, budgets, replicas, reasons.",
    "workflows": "Check workflow files; print their JSON Schema.",
}


class _LazyVerbs(TyperGroup):
    """Knows every verb by name, and loads one only when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in: name and line for lists of commands."""
        return TyperCommand(cmd_name, help=VERBS[cmd_name]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself, about to be called."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            command = command_of(import_module(f"cato.cli.{name}").app)
            command.name = name
        return name, command, rest


app = typer.Typer(
    cls=_LazyVerbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _cato() -> None:
    """CATO: coding assistants with SLAs, on your own models."""


def main() -> None:
    app()
