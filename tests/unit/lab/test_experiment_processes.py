"""The processes of a parallel experiment: results as they come, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kits.processes import is_alive

RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from cato.sim.experiment import run_all, silent
from lab_jobs import busy
if __name__ == "__main__":
    run_all(busy, [sys.argv[1]] * 4, silent, 2)
"""
IN_TURN = """
import sys
from cato.sim.experiment import run_all, silent
from lab_jobs import after
if __name__ == "__main__":
    kept, done = [], []
    folder = sys.argv[1]
    jobs = [(folder, "d"), (folder, ""), (folder, "b"), (folder, "c")]
    progress = lambda now, of: done.append((now, of))
    print(run_all(after, jobs, progress, 2, lambda number, name: kept.append(number)))
    print(kept, done[0], done[-1])
"""
JOBS = """
import os, time
from pathlib import Path
def after(job):
    folder, other = job
    mine = {"d": "a", "": "b", "b": "c", "c": "d"}[other]
    while other and not Path(folder, other).exists():
        time.sleep(0.01)
    Path(folder, mine).touch()
    return mine
def busy(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(120)
"""
PATIENCE_S = 60.0


def command_of(program: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """A command that runs `program` with the folder `seen` as its argument, and its environment."""
    (folder / "lab_jobs.py").write_text(JOBS)
    (folder / "run.py").write_text(program)
    (folder / "seen").mkdir()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    return [sys.executable, str(folder / "run.py"), str(folder / "seen")], env


def test_a_slow_job_does_not_hide_what_others_have_found(tmp_path: Path) -> None:
    """The first job waits for the last one; each result is kept as soon as it is there."""
    command, env = command_of(IN_TURN, tmp_path)
    printed = subprocess.check_output(command, env=env, text=True, timeout=PATIENCE_S)
    assert printed.splitlines() == ["['a', 'b', 'c', 'd']", "[1, 2, 3, 0] (0, 4) (4, 4)"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_they_end_when_it_is_killed_or_interrupted(tmp_path: Path, end: signal.Signals) -> None:
    command, env = command_of(RUN, tmp_path)
    seen = tmp_path / "seen"
    with subprocess.Popen(command, env=env) as run:
        until_s = time.monotonic() + PATIENCE_S
        while len(list(seen.iterdir())) < 2 and time.monotonic() < until_s:
            time.sleep(0.1)
        pids = [int(p.name) for p in seen.iterdir()]
        assert len(pids) == 2
        run.send_signal(end)
        run.wait(PATIENCE_S)  # their jobs take longer
    until_s = time.monotonic() + PATIENCE_S
    while any(map(is_alive, pids)) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not any(map(is_alive, pids))
