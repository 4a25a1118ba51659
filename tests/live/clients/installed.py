"""Clients of other projects, installed once, in exact versions, into a folder that git ignores.

As a script it installs all of them: `make test` does that beside its first tests.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CACHE = HERE.parents[2] / ".cache" / "clients"
# Of what a package manager said, the part that a reader of a skipped test needs.
LAST_CHARS = 300
INSTALL_S = 1200


@functools.cache
def npm_folder() -> Path:
    """The folder with `node_modules`; skips the test when npm cannot make one."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("npm and node are not installed")
    names = ("package.json", "package-lock.json")

    def install(folder: Path) -> None:
        for name in names:
            shutil.copy(HERE / name, folder)
        # Not `npm ci`: it wants the builds of some clients for all other platforms in the lock.
        run([npm, "install", "--no-audit", "--no-fund"], folder)

    return _made("npm", [HERE / name for name in names], install)


@functools.cache
def python_folder(name: str) -> Path:
    """A virtual environment with what `python-{name}.txt` names; skips when pip cannot make it."""
    requirements = HERE / f"python-{name}.txt"

    def install(folder: Path) -> None:
        # Python's own scripts name their interpreter by its path: this one must not move.
        run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], folder)
        pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "-q"]
        # The file names all packages: nothing is left to resolve.
        pip += ["--disable-pip-version-check", "--no-deps", "--no-compile"]
        run([*pip, "-r", str(requirements)], folder)

    return _made(name, [requirements], install) / "venv"


def _made(name: str, inputs: list[Path], install: Callable[[Path], None]) -> Path:
    """The folder of this version of `inputs`; one that was not finished is made again."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()[:12]
    folder = CACHE / f"{name}-{digest}"
    is_done = folder / "installed"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the script may be installing it
        if not is_done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            install(folder)
            is_done.touch()
    return folder


def run(argv: list[str], folder: Path) -> None:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-LAST_CHARS:]
        pytest.skip(f"{Path(argv[0]).name} could not install the clients: {said}")


if __name__ == "__main__":
    for file in sorted(HERE.glob("python-*.txt")):
        with suppress(pytest.skip.Exception):  # its tests say so
            python_folder(file.stem.removeprefix("python-"))
    with suppress(pytest.skip.Exception):
        npm_folder()
