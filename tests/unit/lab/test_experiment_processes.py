"""The processes of a parallel experiment end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kits.processes import is_alive

RUN = """
import sys
from cato.sim.experiment import run_all, silent
from lab_jobs import busy
if __name__ == "__main__":
    run_all(busy, [sys.argv[1]] * 4, silent, 2)
"""
JOBS = """
import os, time
from pathlib import Path
def busy(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(120)
"""
PATIENCE_S = 60.0


def test_they_end_when_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "lab_jobs.py").write_text(JOBS)
    (tmp_path / "run.py").write_text(RUN)
    seen = tmp_path / "pids"
    seen.mkdir()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, str(tmp_path / "run.py"), str(seen)]
    with subprocess.Popen(command, env=env) as run:
        until_s = time.monotonic() + PATIENCE_S
        while len(list(seen.iterdir())) < 2 and time.monotonic() < until_s:
            time.sleep(0.1)
        pids = [int(p.name) for p in seen.iterdir()]
        assert len(pids) == 2
        run.send_signal(signal.SIGKILL)
    until_s = time.monotonic() + PATIENCE_S
    while any(map(is_alive, pids)) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not any(map(is_alive, pids))
