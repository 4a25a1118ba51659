"""Where a host keeps what CATO makes at run time, and where a model's files are."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cato.config.paths import resolve
from cato.core.errors import ConfigError, Problem
from cato.demo import demo_model_path

RUN_DIR_VARIABLE = "CATO_RUN_DIR"
"""Names the folder for sockets, logs of engines and code indexes. Keep it short: a Unix socket's
path has at most 107 bytes."""

STATE_VARIABLE = "XDG_STATE_HOME"
"""Names the folder of users' lasting state; `~/.local/state` without it."""

DEMO_SOURCE = "demo"


def run_dir() -> Path:
    """The folder for sockets, logs and indexes of this host and user; made when missing.

    Raise `ConfigError` when it is not this user's alone: who can write there takes over engines.
    """
    default = Path(tempfile.gettempdir()) / f"cato-{os.getuid()}"
    folder = Path(os.environ.get(RUN_DIR_VARIABLE) or default)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    why_not = _why_not_ours(folder)
    if why_not:
        rule = f"{why_not}; remove it, or name another in {RUN_DIR_VARIABLE}"
        raise ConfigError((Problem(RUN_DIR_VARIABLE, "", str(folder), rule),))
    return folder


def state_dir() -> Path:
    """The folder for what must outlive a restart of the host; not made here."""
    named = os.environ.get(STATE_VARIABLE, "")
    # A relative path is to be ignored, says the XDG base directory specification.
    base = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "state"
    return base / "cato"


def _why_not_ours(folder: Path) -> str:
    found, link = folder.stat(), folder.lstat()
    if found.st_uid != os.getuid() or link.st_uid != os.getuid():
        return f"it belongs to another user ({found.st_uid})"
    if found.st_mode & 0o022:
        return "other users may write there"
    return ""


def model_path(source: str) -> str:
    """What the engine is told to load: a folder, or a Hugging Face id as it stands."""
    if source == DEMO_SOURCE:
        return str(demo_model_path())
    try:
        return str(resolve(source))
    except ConfigError:
        if source.startswith((".", "/", "~")):
            raise
        return source
