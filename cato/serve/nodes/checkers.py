"""Checkers: run a compiler or linter on code that a model wrote.

The operator configures the command; neither requests nor workflows can change it. It runs without a
shell, in its own folder and process group, with limits on CPU time, memory and file sizes. The
whole group is killed when the command ends, times out or is cancelled.

Compilers read files that the code includes. So only messages about the code itself are kept, and
the command inherits no environment variable but `PATH`.

A command that fails without naming a place in the code may not work on this host: too little
memory, a missing file. It is then tried on a correct program, and has no verdict if it fails there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cato.core.checkers import FILE, SAMPLES, CheckerSpec, file_name
from cato.serve.nodes.languages import as_bytes

log = logging.getLogger("cato.nodes")

# Per ingress replica: compilers share its cores with token streaming.
AT_ONCE = 2
MAX_ERRORS = 20
_MAX_OUTPUT = 64 * 1024
_MAX_MESSAGE_CHARS = 300
_MAX_FILE_BYTES = 64 << 20
# How long a checker is believed to work, or not to, after it was tried.
_TRIED_AGAIN_S = 60.0
# Exit statuses of shells, and of our launcher, for a program that cannot be run.
_CANNOT_RUN = (126, 127)

# Sets its own limits and execs the command: code between fork and exec is unsafe with threads.
# The alarm outlives exec, so that the command ends in time even if this process is killed.
_LAUNCHER = """
import os, resource as r, signal, sys
seconds, memory, size = map(int, sys.argv[1:4])
os.nice(10)
for kind, most in ((r.RLIMIT_CORE, 0), (r.RLIMIT_CPU, seconds), (r.RLIMIT_FSIZE, size),
                   (r.RLIMIT_AS, memory)):
    r.setrlimit(kind, (most, most))
signal.alarm(seconds + 1)
try:
    os.execvp(sys.argv[4], sys.argv[4:])
except OSError as error:
    print(error)
    os._exit(127)
"""


@dataclass(frozen=True, slots=True)
class _Said:
    """What a checker said of some code; `errors` is None without a verdict, for that `reason`.

    `failed` is set if it ended with errors but named no place in the code.
    """

    errors: list[dict[str, object]] | None
    reason: str = ""
    failed: bool = False


class Checkers:
    """The deployment's checkers by name."""

    def __init__(self, specs: Mapping[str, CheckerSpec]) -> None:
        self._specs = dict(specs)
        self._trials: dict[str, tuple[float, _Said]] = {}  # when, and what came of it
        self._logged: dict[str, _Said] = {}  # the last trial that the log told of
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="checker")

    def has(self, name: str) -> bool:
        return name in self._specs

    def of(self, names: Sequence[str], language: str | None) -> tuple[str, ...]:
        """The checkers in `names` that check `language`."""
        return tuple(n for n in names if n in self._specs and self._specs[n].language == language)

    async def errors(self, name: str, code: str) -> list[dict[str, object]] | None:
        """The errors that checker `name` finds in `code`; None without a verdict."""
        said = await self._said(name, code)
        if said.errors is None:
            log.warning("checker %s: %s", name, said.reason)
        elif said.failed:
            trial = await self._trial(name)
            if trial.failed or trial.errors is None:
                if self._logged.get(name) is not trial:
                    log.warning("checker %s does not work here: %s", name, trial.reason)
                self._logged[name] = trial
                return None
        return said.errors

    async def trouble(self, name: str) -> str:
        """Why checker `name` does not work on this host; empty if it does."""
        trial = await self._trial(name)
        if trial.errors:
            wrong = trial.reason or str(trial.errors[0]["message"])
            return f"finds a correct program wrong: {wrong}"
        return trial.reason

    async def _trial(self, name: str) -> _Said:
        """What it says of a correct program, now or a moment ago."""
        tried_s, said = self._trials.get(name, (-math.inf, _Said(None)))
        if time.monotonic() - tried_s > _TRIED_AGAIN_S:
            said = await self._said(name, SAMPLES[self._specs[name].language])
            self._trials[name] = time.monotonic(), said
        return said

    async def _said(self, name: str, code: str) -> _Said:
        run = _Run(name, self._specs[name])
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, run, code, time.monotonic())
        finally:
            run.end()


class _Run:
    """One run of a checker; `end` may be called from any thread, at any time."""

    def __init__(self, name: str, spec: CheckerSpec) -> None:
        self._name, self._spec = name, spec
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()

    def __call__(self, code: str, asked_s: float) -> _Said:
        if time.monotonic() - asked_s > self._spec.time_s:
            return _Said(None, "waited too long for other checks")
        folder = Path(tempfile.mkdtemp(prefix="cato-check-"))
        try:
            work = folder / "work"
            work.mkdir()
            file = file_name(self._spec.language, code)
            (work / file).write_bytes(as_bytes(code))
            status = self._status(work, folder / "output", file)
            if status is None:
                return _Said(None, f"was killed after {self._spec.time_s:g} s, or with its run")
            output = (folder / "output").read_bytes()[:_MAX_OUTPUT].decode("utf-8", "replace")
            output = output.replace(f"{work}/", "")  # some print the whole path
        except OSError as error:
            return _Said(None, str(error))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        printed = output.strip()[:_MAX_MESSAGE_CHARS]
        if status in _CANNOT_RUN or status < 0:
            return _Said(None, f"cannot run: {f'signal {-status}' if status < 0 else printed}")
        if status == 0:
            return _Said([])
        if found := errors_in(output, file, self._name):
            return _Said(found)
        how = f"exit status {status}"
        found = [{"line": 1, "column": 1, "message": f"{self._name}: {how}"}]
        return _Said(found, f"{how}: {printed}", failed=True)

    def _status(self, work: Path, output: Path, file: str) -> int | None:
        """The exit status; None if it timed out or was cancelled."""
        spec = self._spec
        limits = (math.ceil(spec.time_s), spec.memory_bytes, _MAX_FILE_BYTES)
        command = [word.replace(FILE, file) for word in spec.command]
        here = str(work)
        with output.open("wb") as out, self._lock:
            if self._over.is_set():
                return None
            self._process = process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, *map(str, limits), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=work,
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "HOME": here,
                    "TMPDIR": here,
                    "LC_ALL": "C.UTF-8",
                },
                start_new_session=True,
            )
        is_done = _ends_within(process.pid, spec.time_s)
        with self._lock:
            was_ended = self._over.is_set()
            self._kill()
            self._process = None
            status = process.wait()
        if was_ended:
            return None
        return status if is_done else None

    def end(self) -> None:
        """Kill the command, or prevent it from starting."""
        with self._lock:
            self._over.set()
            self._kill()

    def _kill(self) -> None:
        """Call with the lock, before reaping the leader: until then the group id stays ours."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)


def _ends_within(pid: int, seconds: float) -> bool:
    """Whether the child ends within `seconds`; does not reap it."""
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(fd)


# Output of checkers


def errors_in(output: str, file: str, checker: str) -> list[dict[str, object]]:
    """The errors in `file` that `output` reports, in the formats of common compilers; none if it is
    about other files, or about the checker itself."""
    found = list(islice(_places(output.splitlines(), re.escape(file)), MAX_ERRORS * 4))
    grave = [e for e in found if not str(e["message"]).lower().startswith("warning")] or found
    for error in grave:
        error["message"] = f"{checker}: {error['message']}"
    return grave[:MAX_ERRORS]


def _places(lines: Sequence[str], file: str) -> Iterator[dict[str, object]]:
    # gcc, javac, go, ruff, mypy: FILE:1:2: message; tsc, csc: FILE(1,2): message; go vet: with a
    # word before.
    direct = re.compile(rf"(?:\w+: )?(?:\./)?{file}[:(](\d+)(?:[:,](\d+))?\)?:?\s*(.*)")
    # Node: FILE:1; Python: File "FILE", line 1; rustc: --> FILE:1:2. The message is elsewhere.
    below = re.compile(rf'{file}:(\d+)$|\s*File "{file}", line (\d+)')
    rust = re.compile(rf"\s*--> {file}:(\d+):(\d+)")
    for i, line in enumerate(lines):
        if match := below.match(line):
            named = (
                later for later in lines[i:] if re.match(r"(\w+\.)*\w+(Error|Warning)\b", later)
            )
            yield _error(match[1] or match[2], None, next(named, "error"))
        elif match := direct.match(line):
            if not match[3].startswith("note"):
                yield _error(match[1], match[2], match[3])
        elif (match := rust.match(line)) and i and not lines[i - 1].startswith("warning"):
            yield _error(match[1], match[2], lines[i - 1])


def _error(line: str, column: str | None, message: str) -> dict[str, object]:
    return {
        "line": max(1, int(line)),
        "column": max(1, int(column or 1)),
        "message": message.strip()[:_MAX_MESSAGE_CHARS],
    }
