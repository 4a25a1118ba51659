"""`cato init`: copy the shipped files to a folder for editing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cato.cli.client import fail
from cato.config.paths import shipped

# The files that people edit; those of benchmarks and drills are not copied.
PARTS = (
    "deployments/*.yaml",
    "deployments/README.md",
    "deployments/clients/*",
    "deployments/monitoring/*",
    "profiles/*.yaml",
    "workflows/**/*",
)


def init(
    folder: Annotated[Path, typer.Argument(help="Target folder; created when missing.")],
) -> None:
    """Copy the shipped deployments, workflows, profiles and client files to a folder, without
    overwriting any file. Run in that folder, `cato serve` uses them."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
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
        console.print(f"kept {kept} existing files", style="yellow", markup=False)
    console.print(
        f"\nNext:\n  cd {folder}\n"
        "  cato check deployments/local-cpu.yaml\n"
        "  cato serve deployments/local-cpu.yaml",
        markup=False,
    )
