"""The command line: one module per command, imported on use so that `--help` is fast."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command as command_of

import cato
from cato.core.errors import ConfigError

# Command -> its line in `cato --help`. The module `cato.cli.<command>` has a function of the same
# name or, for a command with subcommands, a Typer application `app`.
VERBS = {
    "serve": "Run a deployment file on this machine.",
    "check": "Check a deployment file and everything it names, without starting anything.",
    "init": "Copy the shipped deployments, workflows, profiles and client files to a folder.",
    "down": "Remove CATO from a Ray cluster.",
    "drain": "Move a host's replicas elsewhere: maintenance, spot notices, preStop hooks.",
    "status": "Show deployments, replicas and loaded models.",
    "task": "Run a task and print its answer.",
    "explain": "Show how a task met or missed its SLA: nodes, budgets, replicas, reasons.",
    "profile": "Measure a running deployment and write its profiles.",
    "simulate": "Run an experiment, or your own scenario, in virtual time.",
    "plan": "Find how many replicas a scenario needs to meet its SLAs.",
    "models": "Add, list, measure and remove models of shared pools.",
    "rollout": "Roll out a new version of a model, step by step.",
    "replay": "Replay a recorded pool under other schedulers.",
    "top": "Watch the fleet, attainment and decisions in the terminal.",
    "keys": "Make, list, rotate and revoke API keys; limit tenants; show usage.",
    "bench": "Measure CATO against other ways to serve the same engine.",
    "chaos": "Inject faults into an application and check every answer.",
    "workflows": "Check workflow files; print their JSON Schema.",
}


def command_of_verb(verb: str) -> Any:
    """The command of one of `VERBS`; imports its module."""
    module = import_module(f"cato.cli.{verb}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False)
        app.command()(getattr(module, verb))
    command = command_of(app)
    command.name = verb
    _join_lines(command)
    return command


def _join_lines(command: Any) -> None:
    """Let the terminal break the lines of help texts; it would keep those of the docstrings."""
    for one in (command, *getattr(command, "commands", {}).values()):
        paragraphs = cleandoc(one.help or "").split("\n\n")
        one.help = "\n\n".join(" ".join(p.split()) for p in paragraphs)


class _LazyVerbs(TyperGroup):
    """Lists every command as a stub and imports a module only when its command is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for verb, line in VERBS.items():
            self.add_command(TyperCommand(verb, help=line))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else command_of_verb(name), rest


app = typer.Typer(
    cls=_LazyVerbs, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"cato {cato.__version__}")
        raise typer.Exit


@app.callback()
def _cato(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """CATO: coding assistants with SLAs, on your own models."""


def main() -> None:
    """Run the command line. A wrong file or setting ends it with its problems and code 2; a file or
    output that cannot be used ends it with one line and code 1. Characters that the terminal's
    encoding lacks are shown as `?`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        _end(error)


def _end(error: OSError) -> NoReturn:
    with suppress(OSError):
        if error.errno != errno.EPIPE:  # nobody reads the output any more: `cato keys list | head`
            print(error, file=sys.stderr, flush=True)
    # The interpreter flushes both once more at its end, and would report the error again.
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(null, stream.fileno())
    sys.exit(1)
