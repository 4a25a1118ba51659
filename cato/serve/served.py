"""Registry of running `cato serve` processes on this host, so that commands find them.

Each has a small file named after its mark, valid while the process lives. The next reader removes
files of killed processes.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from cato.serve.keeper import is_left, marked

_PREFIX = "served-"
_GCS_ADDRESS = "--gcs-address="


@dataclass(frozen=True, slots=True)
class Served:
    """One running `cato serve`.

    `address` is its Ray cluster's address, `auth_mode` that cluster's authentication mode, `file`
    the deployment file.
    """

    mark: str
    url: str
    file: str
    address: str
    auth_mode: str = ""


def record(run_dir: Path, served: Served) -> None:
    """Write its file; may raise OSError."""
    path = _path(run_dir, served.mark)
    new = path.with_suffix(".new")
    try:
        new.write_text(json.dumps(asdict(served)), encoding="utf-8")
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()  # a full disk leaves an empty one
        raise


def forget(run_dir: Path, mark: str) -> None:
    _path(run_dir, mark).unlink(missing_ok=True)


def running(run_dir: Path) -> list[Served]:
    """All running ones, newest first."""
    found = []
    for path in run_dir.glob(f"{_PREFIX}*.json"):
        try:
            served = Served(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # just removed, or written by another version
            continue
        if is_left(served.mark):
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            found.append(served)
    return sorted(found, key=lambda s: float(s.mark.partition(":")[2]), reverse=True)


def cluster_address(mark: str) -> str:
    """The address of the Ray cluster that the `cato serve` of `mark` started; empty if it joined an
    existing one."""
    for process in marked(mark.__eq__):
        with contextlib.suppress(psutil.Error):
            for word in process.cmdline():
                if word.startswith(_GCS_ADDRESS):  # a raylet's argument
                    return word.removeprefix(_GCS_ADDRESS)
    return ""


def _path(run_dir: Path, mark: str) -> Path:
    return run_dir / f"{_PREFIX}{mark.replace(':', '-')}.json"
