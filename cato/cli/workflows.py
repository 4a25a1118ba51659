"""`cato workflows`: checking workflow files before they are deployed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cato.core.errors import ConfigError
from cato.workflows.json_schema import workflow_json_schema
from cato.workflows.load import load_workflow, load_workflows

app = typer.Typer(no_args_is_help=True, help="Check workflow files; print their JSON Schema.")


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(help="Workflow files, or folders of them.")],
) -> None:
    """Check workflow files and print every problem; exit code 1 when there is one."""
    console = Console(soft_wrap=True, highlight=False)
    is_good = True
    for path in paths:
        try:
            loaded = list(load_workflows(path).values()) if path.is_dir() else [load_workflow(path)]
        except ConfigError as error:
            is_good = False
            for problem in error.problems:
                console.print(str(problem), style="red", markup=False)
            continue
        if not loaded:
            is_good = False
            console.print(f"{path}: no workflow file (*.yaml) in it", style="red", markup=False)
        for workflow in loaded:
            console.print(
                f"{path}: {workflow.name}: {len(workflow.nodes)} nodes, {workflow.slo.metric.value}"
                f" {workflow.slo.target_s * 1000:g} ms",
                style="green",
                markup=False,
            )
    raise typer.Exit(0 if is_good else 1)


@app.command()
def schema() -> None:
    """Print the JSON Schema of workflow files, for editors."""
    print(json.dumps(workflow_json_schema(), indent=2, ensure_ascii=False))
