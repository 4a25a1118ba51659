"""Lanes: run third-party code that cannot be interrupted in processes that can be killed.

Such code may take minutes in one call while it holds the GIL. A lane is one small process that runs
one job after another; the kernel kills it when a job has used up its CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from cato.serve.lane_worker import read_message, write_message

log = logging.getLogger("cato.lanes")

# A worker silent for this long was stopped, or the machine is out of memory.
ANSWER_WITHIN_S = 10.0

Job = Mapping[str, object]
"""A worker's job as JSON; its `cpu_s` overrides the lane's CPU time."""


class Lane:
    """One worker process, started by the first job, and its queue of jobs.

    `worker` is a module whose `main` calls `cato.serve.lane_worker.work`. A job that has waited
    longer than `wait_s` is dropped.
    """

    def __init__(
        self,
        worker: str,
        cpu_s: float,
        *,
        nice: int = 0,
        wait_s: float = 1.0,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        self._module, self._cpu_s, self._nice = worker, cpu_s, nice
        self._wait_s, self._answer_within_s = wait_s, answer_within_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lane")
        # Used by the thread alone.
        self._worker: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.begun = 0  # number of jobs begun, modulo 2**32

    @property
    def pid(self) -> int | None:
        """The worker's process id, while it runs."""
        return None if self._worker is None else self._worker.pid

    async def run(self, job: Job) -> dict[str, object] | None:
        """The result of `job`; None if it used too much CPU time or waited too long.

        Cancelling a waiting job drops it; a running one continues up to its CPU limit.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._do, job, time.monotonic())

    def _do(self, job: Job, asked_s: float) -> dict[str, object] | None:
        if time.monotonic() - asked_s > self._wait_s:
            log.info("%s: a job waited for %g s and was dropped", self._module, self._wait_s)
            return None
        message = json.dumps(job).encode()
        for _ in range(2):  # the worker may have died while idle
            try:
                return self._answer(message)
            except TimeoutError:
                log.warning("%s did not answer for %g s", self._module, self._answer_within_s)
                self._end()
                break
            except (OSError, ValueError) as error:
                log.warning("%s ended: %s", self._module, error)
                self._end()
        return None

    def _answer(self, message: bytes) -> dict[str, object] | None:
        if self._socket is None:
            self._start()
        assert self._socket is not None
        self.begun = (self.begun + 1) % (1 << 32)
        write_message(self._socket, self.begun, message)
        while True:
            number, answer = read_message(self._socket)
            if number == self.begun:  # skip the `null` of a worker that died after its answer
                return cast("dict[str, object] | None", json.loads(answer))

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(self._answer_within_s)
        self._socket = ours
        with theirs:
            self._worker = subprocess.Popen(
                [sys.executable, "-c", f"from {self._module} import main; main()",
                 str(self._cpu_s), str(self._nice)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # no Ctrl-C; it ends with our end of the socket
            )  # fmt: skip

    def close(self) -> None:
        """Stop the worker; a later job starts another."""
        self._thread.submit(self._end).result()

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._worker.pid, signal.SIGKILL)
            self._worker.wait()
        self._socket = self._worker = None
