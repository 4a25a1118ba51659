"""Finding a deployment's files: `workflows/`, `profiles/` and code indexes."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import cato
from cato.core.errors import ConfigError, Problem

HOME_VARIABLE = "CATO_HOME"
"""The folder for relative paths that the current folder does not have."""

STDLIB_INDEX = "stdlib"
"""As the folder of an index: the sources of Python's standard library, so that a fresh checkout
has code to retrieve from. Write `./stdlib` for a folder of that name."""


def resolve(path: str) -> Path:
    """The absolute path of the existing file or folder `path`; raise `ConfigError`.

    A relative path is tried in the current folder, in `$CATO_HOME`, and among the files shipped
    with `cato`, so that replicas find the same files as the command line.
    """
    tried: list[Path] = []
    for base in _bases():
        try:
            found = base / Path(path).expanduser()
            if found not in tried:
                tried.append(found)
            if found.exists():
                return found.resolve()
        except (OSError, RuntimeError, ValueError) as exc:  # unknown user; name too long
            raise ConfigError((Problem(path, "", "", f"not a usable path: {exc}"),)) from exc
    places = ", ".join(str(p) for p in tried)
    raise ConfigError((Problem(path, "", "", f"not found; tried {places}"),))


def resolve_index(folder: str) -> Path:
    """The folder of code that an index reads; `stdlib` names Python's own sources."""
    if folder == STDLIB_INDEX:
        return Path(sysconfig.get_paths()["stdlib"])
    found = resolve(folder)
    if not found.is_dir():
        raise ConfigError((Problem(folder, "", "", "an index needs a folder; this is a file"),))
    return found


def _bases() -> list[Path]:
    """The folders that relative paths are tried in, in order."""
    bases = [Path.cwd()]
    home = os.environ.get(HOME_VARIABLE)
    if home:
        bases.append(Path(home).expanduser())
    return [*bases, shipped()]


def shipped() -> Path:
    """The folder with this version's `workflows`, `profiles` and `deployments`: inside the package
    for a wheel, else the source checkout."""
    package = Path(cato.__file__).resolve().parent
    in_wheel = package / "shipped"
    return in_wheel if in_wheel.is_dir() else package.parent
