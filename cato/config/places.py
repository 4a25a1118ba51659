"""Folders of a host: the run folder, the state folder, and a model's files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cato.config.paths import resolve
from cato.core.errors import ConfigError, Problem
from cato.demo import demo_model_path

RUN_DIR_VARIABLE = "CATO_RUN_DIR"
"""The folder for sockets, engine logs and code indexes. Keep it short: the path of a Unix socket
has at most 107 bytes."""

STATE_VARIABLE = "XDG_STATE_HOME"
"""The base folder of a user's persistent state; default `~/.local/state`."""

DEMO_SOURCE = "demo"


def run_dir() -> Path:
    """The folder for sockets, logs and indexes of this host and user; created when missing.

    Raise `ConfigError` when it cannot be made, or others can write there: they could take over
    engines.
    """
    default = Path(tempfile.gettempdir()) / f"cato-{os.getuid()}"
    folder = Path(os.environ.get(RUN_DIR_VARIABLE) or default)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        why_not = _why_not_ours(folder)
    except OSError as error:
        why_not = f"it cannot be used: {error.strerror}"
    if why_not:
        rule = f"{why_not}; remove it, or set {RUN_DIR_VARIABLE} to another folder"
        raise ConfigError((Problem(RUN_DIR_VARIABLE, "", str(folder), rule),))
    return folder


def state_dir() -> Path:
    """The folder for files that survive a restart of the host; not created here."""
    named = os.environ.get(STATE_VARIABLE, "")
    # The XDG base directory specification says to ignore a relative path.
    base = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "state"
    return base / "cato"


def _why_not_ours(folder: Path) -> str:
    found, link = folder.stat(), folder.lstat()
    if found.st_uid != os.getuid() or link.st_uid != os.getuid():
        return f"it belongs to another user ({found.st_uid})"
    if found.st_mode & 0o022:
        return "other users can write to it"
    return ""


def model_path(source: str) -> str:
    """The model for the engine to load: a folder, or a Hugging Face id unchanged."""
    if source == DEMO_SOURCE:
        return str(demo_model_path())
    try:
        return str(resolve(source))
    except ConfigError:
        if source.startswith((".", "/", "~")):
            raise
        return source


def source_for_others(source: str) -> str:
    """`source` for processes that run in other folders: a path that is here becomes absolute.

    A name such as `demo` or `Qwen/Qwen2.5-Coder-7B` stays, and so does a path that is not here:
    engines may find it elsewhere (`model_path`).
    """
    path = os.path.expanduser(source)
    return os.path.abspath(path) if "/" in path and os.path.exists(path) else path
