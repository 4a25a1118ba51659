"""Agents of other projects, installed once, in exact versions, into a folder that git ignores.

Node comes as a package, too: some agents want a newer one than machines have.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "agents"
INSTALL_S = 1200
# Of what a package manager said, the part that a reader of a skipped test needs.
LAST_CHARS = 300


class NotInstalledError(Exception):
    """Why an agent is not there."""


@dataclass(frozen=True)
class Npm:
    """A package with a program `command`."""

    package: str
    version: str
    command: str


@dataclass(frozen=True)
class Pip:
    """A package of Python's, in an environment of its own."""

    package: str
    version: str
    command: str


NODE = Npm("node", "22.23.3", "node")


def program(source: Npm | Pip) -> Path:
    """Where the agent's program is; installs it when it is not. Raise `NotInstalledError`."""
    if isinstance(source, Pip):
        return _python(source)
    if source is not NODE:
        program(NODE)  # npm runs scripts of packages with it
    return _npm(source)


def node_folder() -> Path:
    """The folder of the `node` with which agents run."""
    return program(NODE).parent


@functools.cache
def _npm(source: Npm) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalledError("npm is not there")

    def install(folder: Path) -> None:
        (folder / "package.json").write_text('{"private": true}')
        path = os.environ["PATH"]
        if source is not NODE:
            path = f"{node_folder()}{os.pathsep}{path}"
        asked = f"{source.package}@{source.version}"
        quiet = ("--no-audit", "--no-fund", "--loglevel=error")
        _run([npm, "install", "--save-exact", *quiet, asked], folder, PATH=path)

    return _made(source, install) / "node_modules" / ".bin" / source.command


@functools.cache
def _python(source: Pip) -> Path:
    def install(folder: Path) -> None:
        _run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], folder)
        pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "-q"]
        asked = f"{source.package}=={source.version}"
        _run([*pip, "--disable-pip-version-check", asked], folder)

    return _made(source, install) / "venv" / "bin" / source.command


def _made(source: Npm | Pip, install: Callable[[Path], None]) -> Path:
    """The folder of this version; one that was not finished is made again."""
    folder = CACHE / f"{source.command}-{source.version}"
    is_done = folder / "installed.json"
    if not is_done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        install(folder)
        is_done.write_text(json.dumps({"package": source.package, "version": source.version}))
    return folder


def _run(argv: list[str], folder: Path, **env: str) -> None:
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )
    except subprocess.TimeoutExpired as exc:
        raise NotInstalledError(f"{Path(argv[0]).name} took over {INSTALL_S} s") from exc
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-LAST_CHARS:]
        raise NotInstalledError(f"{Path(argv[0]).name} could not install it: {said}")
