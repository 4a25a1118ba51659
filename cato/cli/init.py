"""`cato init`: an editable set of the shipped files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cato.cli.client import fail
from cato.config.paths import shipped

# For people: what benchmarks and drills read stays where it is.
PARTS = (
    "deployments/*.yaml",
    "deployments/README.md",
    "deployments/clients/*",
    "deployments/monitoring/*",
    "profiles/*.yaml",
    "workflows/**/*",
)


def init(
    folder: Annotated[Path, typer.Argument(help="The folder to write; made when missing.")],
) -> None:
    """Write deployment files, workflows, profiles and client files to a folder; no file that is
    there is changed. In that folder `cato serve` uses them."""
    console = Console(soft_wrap=True, highlight=False)
    source, kept, written = shipped(), 0, 0
    for pattern in PARTS:
        for path in sorted(p for p in source.glob(pattern) if p.is_file()):
            target = folder / path.relative_to(source)
            if target.exists():
                kept += 1
                continue
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            except OSError as error:
                fail(f"{target}: {error.strerror}")
            written += 1
    console.print(f"{folder}: wrote {written} files", markup=False)
    if kept:
        console.print(f"left {kept} that were there as they are", style="yellow", markup=False)
    console.print(
        f"\nNext:\n  cd {folder}\n"
        "  cato check deployments/local-cpu.yaml\n"
        "  cato serve deployments/local-cpu.yaml",
        markup=False,
    )
