"""Where a host keeps what CATO makes at run time, and where a model's files are."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cato.config.paths import resolve
from cato.core.errors import ConfigError
from cato.demo import demo_model_path

RUN_DIR_VARIABLE = "CATO_RUN_DIR"
"""Names the folder for sockets, logs of engines and code indexes. Keep it short: a Unix socket's
path has at most 107 bytes."""

DEMO_SOURCE = "demo"


def run_dir() -> Path:
    """The folder for sockets, logs and indexes of this host and user; made when missing."""
    default = Path(tempfile.gettempdir()) / f"cato-{os.getuid()}"
    folder = Path(os.environ.get(RUN_DIR_VARIABLE) or default)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


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
