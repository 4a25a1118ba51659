"""Runs a helper process beside a measurement; it prints a line when ready and ends with us."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

END_TIMEOUT_S = 30.0


@contextlib.contextmanager
def companion(module: str, *arguments: str) -> Iterator[str]:
    """Run `module` with `arguments`; yields its first line of output, "" if it exited."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,  # its end of file ends the process, even if we crash
        stdout=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process.stdout.readline().decode().strip()
    finally:
        process.stdin.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
