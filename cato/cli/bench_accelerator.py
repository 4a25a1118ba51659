"""`cato bench accelerator`: all measurements that need a real accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cato.cli.client import fail
from cato.cli.measuring import command_line, console, live_facts, measuring, shown, vllm_version
from cato.cli.outputs import writable_folder


def _in_writable_folder(path: Path) -> Path:
    """Callback of an option; the run makes the folder."""
    writable_folder(path.parent)
    return path


Report = Annotated[
    Path,
    typer.Option(
        "--json", help="The report, written after every step.", callback=_in_writable_folder
    ),
]


def accelerator(
    files: Annotated[list[str], typer.Argument(help="Deployment files with vLLM engines.")],
    json_file: Report = Path("accelerator.json"),
    only: Annotated[str, typer.Option(help="Letters of the items to measure, such as a,c.")] = "",
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Minutes: skip items that do not fit and stop one that overruns."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="The smallest run, to see that all items work.")] = (
        False
    ),
    seed: Annotated[int, typer.Option(help="Seed of prompts, orders and tasks.")] = 100,
    models: Annotated[
        Path | None, typer.Option(help="Folder with the models; MODELS/NAME replaces a `source`.")
    ] = None,
    profiles: Annotated[
        Path | None, typer.Option(help="Folder for the measured profiles, MODEL@ACCELERATOR.yaml.")
    ] = None,
) -> None:
    """All measurements that need a real accelerator, each with its minutes.

    a the engine alone: profile and sleep; b a profile through CATO and its predictions; c overhead
    per call; d schedulers on a mix; e an engine killed under streams; f two models in one slot;
    g adapters in one batch; h prompts from host memory. Items that the device does not support are
    skipped and reported. Run it again with the same --json to measure the missing items.
    """
    command = command_line()
    with measuring() as folder:
        from cato.lab.accelerator.plan import letters_of
        from cato.lab.accelerator.report import tables
        from cato.lab.accelerator.run import Accelerator, Settings, is_measured

        settings = Settings(
            tuple(files), json_file, letters_of(only), budget, quick, seed, models, profiles
        )
        facts = live_facts() | {"vllm": vllm_version()}
        with shown() as (bar, say):
            found = Accelerator(settings, folder, command, lambda: facts, bar, say)
            try:
                report = found.run()
            except KeyboardInterrupt:
                console.print(tables(found.report))
                raise
    console.print(tables(report))
    if not is_measured(report):
        fail("nothing could be measured here; the table has the reason for each item")
    console.print(f"Wrote {json_file}.", highlight=False, markup=False)
    if any(step["status"] == "failed" for step in report["steps"]):
        raise typer.Exit(1)
