"""Files that a command writes: refused before its run when they cannot be written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer
from rich.console import Console

from cato.cli.client import fail


def writable_file(path: Path | None) -> Path | None:
    """Callback of an option: `path`, unless it cannot be written; raise `typer.BadParameter`.

    Opens an existing file and does not change it. Makes a new one and removes it again, since
    permissions alone do not tell whether that works.
    """
    if path is None:
        return None
    try:
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; name a file")
        if not path.exists():
            made = path.resolve()  # a link to a missing file must stay
            made.open("xb").close()
            made.unlink()
        elif path.is_file():  # opening a pipe would wait for its reader
            path.open("ab").close()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise typer.BadParameter(f"{path} cannot be written: {_reason(error)}") from error
    return path


def writable_folder(path: Path | None) -> Path | None:
    """Callback of an option: `path`, unless it cannot be made or written in; raise
    `typer.BadParameter`. Leaves no trace: the first file makes the folder."""
    if path is None:
        return None
    made: list[Path] = []
    try:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for folder in reversed(missing):
            folder.mkdir()
            made.append(folder)
        if not path.is_dir():
            raise typer.BadParameter(f"{path} is a file; name a folder")
        TemporaryFile(dir=path).close()
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {_reason(error)}") from error
    finally:
        with suppress(OSError):  # someone else uses it by now
            for folder in reversed(made):
                folder.rmdir()
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Also write the results to this file.", callback=writable_file),
]
Plots = Annotated[
    Path | None, typer.Option(help="Write plots to this folder.", callback=writable_folder)
]


def print_json(value: object) -> None:
    """Print a value for other programs; with escapes where the output's encoding is not Unicode."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, indent=2, ensure_ascii=not is_unicode))


def write_text(console: Console, path: Path, text: str) -> None:
    """Write and name the file; end the command when that fails. Print the results first: they
    took longer than the file does."""
    with _writing(path):
        path.write_text(text, encoding="utf-8")
    _tell(console, path)


def write_plots(console: Console, folder: Path, plot: Callable[[Path], Iterable[Path]]) -> None:
    """As `write_text`, for the files that `plot` writes to `folder`."""
    with _writing(folder):
        pictures = tuple(plot(folder))
    for path in pictures:
        _tell(console, path)


@contextmanager
def _writing(path: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:  # of a full device it does not name the file
        fail(f"{error.filename or path} cannot be written: {_reason(error)}")


def _tell(console: Console, path: Path) -> None:
    console.print(f"Wrote {path}.", highlight=False, markup=False)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
