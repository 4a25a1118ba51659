"""`cato workflows`: check workflow files before they are deployed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cato.cli.client import fail
from cato.cli.cluster import served_here
from cato.cli.outputs import print_json
from cato.config.deploy_file import DeployFile, load_deploy_file
from cato.config.lines import with_lines
from cato.core.baseline import warning
from cato.core.errors import ConfigError
from cato.core.estimates import Baselines, ByModel, estimates_of
from cato.core.ids import TaskName
from cato.core.topology import model_called
from cato.core.words import counted
from cato.core.workflow import Workflow
from cato.serve.preflight import models_of, problems_of_names
from cato.workflows.json_schema import workflow_json_schema
from cato.workflows.load import load_workflow, read_workflows

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Check workflow files; print their JSON Schema.",
)


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(help="Workflow files, or folders of them.")],
    store: Annotated[
        str | None,
        typer.Option(
            help="Metadata store with measured baselines: a path or a postgresql:// URL.",
            show_default="the one of this machine, if there is one",
        ),
    ] = None,
    deployment: Annotated[
        str | None,
        typer.Option(
            help="The deployment file with the models and indexes that the workflows name; by "
            "default that of this host's `cato serve`."
        ),
    ] = None,
) -> None:
    """Check workflow files and print every problem; exit code 1 if there is any.

    A target below the measured baseline of its task is a warning.
    """
    measured = _measured(store)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    is_good = True
    deploy = _deployment(deployment)
    for path in paths:
        try:
            loaded = _loaded(path)
            if deploy is not None and (problems := problems_of_names(deploy, loaded)):
                raise ConfigError(tuple(problems))
        except ConfigError as error:
            is_good = False
            for problem in with_lines(error.problems):
                console.print(str(problem), style="red", markup=False)
            continue
        if not loaded:
            is_good = False
            console.print(f"{path}: contains no workflow (*.yaml)", style="red", markup=False)
        for workflow in loaded.values():
            console.print(
                f"{path}: {workflow.name}: {counted(len(workflow.nodes), 'node')}, "
                f"{workflow.slo.metric.value} {workflow.slo.target_s * 1000:g} ms",
                style="green",
                markup=False,
            )
            by_model = measured.get(workflow.name, {})
            known = estimates_of(workflow, by_model, partial(_called, deploy, by_model))
            if low := warning(workflow, known):
                console.print(f"{path}: {low}", style="yellow", markup=False)
    raise typer.Exit(0 if is_good else 1)


def _loaded(path: Path) -> dict[Path, Workflow]:
    """The workflows of a file or folder, by file; raise `ConfigError`."""
    if not path.is_dir():
        return {path: load_workflow(path)}
    loaded, problems = read_workflows(path)
    if problems:
        raise ConfigError(problems)
    return loaded


def _called(deploy: DeployFile | None, by_model: ByModel, name: str) -> str:
    """The name in baselines of the model that is named so. Without a deployment file aliases are
    not known: then it is the only model that there are baselines of."""
    if deploy is not None:
        model = model_called(name, models_of(deploy.topology))
        return name if model is None else model.called(name)
    measured = {model for _, model in by_model if model}
    return measured.pop() if len(measured) == 1 else name


def _measured(named: str | None) -> Mapping[TaskName, ByModel]:
    """Baselines from the named store, else from this machine's; empty when it has no store."""
    # Imported here, because most commands need no database.
    from cato.cli.store import opened_store
    from cato.store.location import default_location

    location = named or default_location()
    if "://" not in location and not Path(location).expanduser().exists():
        if named is not None:
            fail(f"there is no metadata store at {location}")
        return {}
    baselines = Baselines()
    with opened_store(location) as store:
        baselines.restore(store.learnt().means)
    return baselines.table()


def _deployment(named: str | None) -> DeployFile | None:
    """The named deployment file, else that of this host's `cato serve`; None without either."""
    here = None if named else served_here()
    if named is None and here is None:
        return None
    try:
        return load_deploy_file(named or (here.file if here else ""))
    except ConfigError as error:
        if named is None:  # edited since it was deployed: `cato check` reports its problems
            return None
        fail(str(ConfigError(with_lines(error.problems))))


@app.command()
def schema() -> None:
    """Print the JSON Schema of workflow files, for editors."""
    print_json(workflow_json_schema())
