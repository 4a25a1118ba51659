"""`cato init`: copy the shipped files to a folder for editing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cato.cli.client import fail
from cato.config.paths import shipped
from cato.core.words import counted

# The files that people edit; those of benchmarks and drills are not copied.
PARTS = (
    "deployments/*.yaml",
    "deployments/README.md",
    "deployments/balancer.cfg",
    "deployments/clients/*",
    "deployments/kubernetes/**/*",
    "deployments/monitoring/*",
    "profiles/*.yaml",
    "workflows/**/*",
)
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def init(
    folder: Annotated[Path, typer.Argument(help="Target folder; created when missing.")],
) -> None:
    """Copy the shipped deployments, workflows, profiles and client files to a folder, without
    overwriting any file. Run in that folder, `cato serve` uses them."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    source, kept, written = shipped(), 0, 0
    copied = _copied(source)
    for path in sorted(copied):
        target = folder / path.relative_to(source)
        if target.exists():
            kept += 1
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            if path.suffix == ".md":
                target.write_text(_without_dead_links(path, source, copied), encoding="utf-8")
        except OSError as error:
            with suppress(OSError):
                target.unlink()  # the next run would keep a part of a file
            fail(f"{target}: {error.strerror}")
        written += 1
    console.print(f"{folder}: wrote {counted(written, 'file')}", markup=False)
    if kept:
        console.print(f"kept {counted(kept, 'existing file')}", style="yellow", markup=False)
    console.print(
        f"\nNext:\n  cd {shlex.quote(str(folder))}\n"
        "  cato check deployments/local-cpu.yaml\n"
        "  cato serve deployments/local-cpu.yaml",
        markup=False,
    )


def _copied(source: Path) -> frozenset[Path]:
    found = (path for pattern in PARTS for path in source.glob(pattern))
    return frozenset(path for path in found if path.is_file() and path.suffix != ".pyc")


def _without_dead_links(document: Path, source: Path, copied: Collection[Path]) -> str:
    """The document; a link to a file that is not copied becomes its words and the file's path.

    Paths of this installation would be dead for everyone else who reads the copy.
    """
    folders = {folder for path in copied for folder in path.parents}

    def kept(link: re.Match[str]) -> str:
        words, to = link[1], link[2]
        target = Path(os.path.normpath(document.parent / to))
        if "://" in to or target in copied or target in folders:
            return link[0]
        path = f"{target.relative_to(source)}{'/' if to.endswith('/') else ''}"
        name = f"`{path}` of CATO's sources"
        return name if words.strip("`/") in path else f"{words} ({name})"

    return LINK.sub(kept, document.read_text(encoding="utf-8"))
