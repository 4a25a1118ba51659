"""Where the files of a deployment are: its `workflows/`, `profiles/` and code indexes."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import cato
from cato.core.errors import ConfigError, Problem

HOME_VARIABLE = "CATO_HOME"
"""Names the folder that relative paths start from, when they are not found where one stands."""

STDLIB_INDEX = "stdlib"
"""As a folder of an index: the sources of Python's standard library, so that a fresh checkout
has code to retrieve from. A folder of that name is written `./stdlib`."""


def resolve(path: str) -> Path:
    """The existing file or folder that `path` names, absolute; raise `ConfigError`.

    A relative path is tried in the current folder, in `$CATO_HOME`, and among the files that are
    shipped with `cato`, so that replicas find the same files as the command line.
    """
    tried: list[Path] = []
    for base in _bases():
        try:
            found = base / Path(path).expanduser()
            if found not in tried:
                tried.append(found)
            if found.exists():
                return found.resolve()
        except (OSError, RuntimeError, ValueError) as exc:  # no such user; name too long
            raise ConfigError((Problem(path, "", "", f"not a usable path: {exc}"),)) from exc
    places = ", ".join(str(p) for p in tried)
    raise ConfigError((Problem(path, "", "", f"not found; tried {places}"),))


def resolve_index(folder: str) -> Path:
    """The folder of code that an index reads; `stdlib` names Python's own sources."""
    if folder == STDLIB_INDEX:
        return Path(sysconfig.get_paths()["stdlib"])
    found = resolve(folder)
    if not found.is_dir():
        raise ConfigError((Problem(folder, "", "", "an index needs a folder, this is a file"),))
    return found


def _bases() -> list[Path]:
    """The folders that relative paths are tried in, in order."""
    bases = [Path.cwd()]
    home = os.environ.get(HOME_VARIABLE)
    if home:
        bases.append(Path(home).expanduser())
    return [*bases, shipped()]


def shipped() -> Path:
    """The folder with the `workflows`, `profiles` and `deployments` of this version: in a wheel a
    part of the package, else the source checkout that `cato` is installed from."""
    package = Path(cato.__file__).resolve().parent
    in_wheel = package / "shipped"
    return in_wheel if in_wheel.is_dir() else package.parent
