"""Keeper: stops everything that `cato serve` has started, even if `cato serve` was killed.

Serve, Ray, HAProxy and the engines inherit a mark in their environment. The keeper process notices
the end of `cato serve` by a pipe, which closes even on SIGKILL. It asks Serve to shut down, and
after a while kills every process that still has the mark, so that no port stays in use.

    python -m cato.serve.keeper MARK PID      # started by `cato serve`
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import psutil

MARK_VARIABLE = "CATO_SERVE_MARK"
# How long the keeper waits for Serve to drain its replicas.
STOP_TIMEOUT_S = 60.0


def new_mark() -> str:
    """A name for this process that stays unique when its process id is reused."""
    return f"{os.getpid()}:{psutil.Process().create_time()}"


def start_keeper(mark: str, run: int) -> subprocess.Popen[bytes]:
    """Start a keeper for processes with `mark` started by the process `run`; it acts once its
    standard input is closed."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, mark, str(run)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C does not reach it
    )


def marked(is_wanted: Callable[[str], bool]) -> list[psutil.Process]:
    """This user's processes with a mark for which `is_wanted` is true."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK_VARIABLE)
            if mark is not None and is_wanted(mark) and process.pid != os.getpid():
                found.append(process)
    return found


def is_left(mark: str) -> bool:
    """Whether the `cato serve` of `mark` is gone."""
    pid, _, created = mark.partition(":")
    try:
        return psutil.Process(int(pid)).create_time() != float(created)
    except (psutil.Error, ValueError):
        return True


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def main() -> None:
    mark, run = sys.argv[1:]
    sys.stdin.buffer.read()  # until `cato serve` ends
    for process in marked(mark.__eq__):
        if process.pid == int(run):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGINT)
                process.wait(STOP_TIMEOUT_S)
    kill(marked(mark.__eq__))


if __name__ == "__main__":
    main()
