"""Ends what `cato serve` has started, however that ended itself.

Serve, Ray, HAProxy and the engines inherit a mark in their environment. A keeper process waits for
the end of `cato serve`, which it learns from a pipe that no kill leaves open. Then it asks Serve to
end in order, and kills whatever still carries the mark after a while: nothing keeps a port.

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
# Serve drains its replicas within this time; so long the keeper waits for it.
STOP_TIMEOUT_S = 60.0


def new_mark() -> str:
    """Names this process, and no other that will ever have its number."""
    return f"{os.getpid()}:{psutil.Process().create_time()}"


def start_keeper(mark: str, run: int) -> subprocess.Popen[bytes]:
    """A keeper for what carries `mark` and was started by the process `run`; it acts once its
    standard input is closed."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, mark, str(run)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # no Ctrl-C of ours reaches it
    )


def marked(is_wanted: Callable[[str], bool]) -> list[psutil.Process]:
    """This user's processes whose mark `is_wanted`."""
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
