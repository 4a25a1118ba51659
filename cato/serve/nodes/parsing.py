"""Parsing in processes that can be stopped.

Grammars are quadratic and worse in texts that nobody writes: 64 kB of `A<` keep C#'s for a minute,
in one call that holds the GIL and asks nobody whether it may go on. So texts are parsed by a small
process of their own, which the kernel ends when a text has used its CPU time. Long texts have a
lane of their own: what an editor sends with every key is short, and does not wait behind them.
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
from typing import Any, cast

from cato.serve.nodes.parsing_worker import read_message, write_message

log = logging.getLogger("cato.nodes")

SHORT_CHARS = 16_384
# About five times what code of this size takes to parse and to walk: 16 kB 16 ms, 256 kB 100 ms,
# and 250 ms where it is of another language than it says.
SHORT_CPU_S = 0.1
LONG_CPU_S = 0.5
# Long texts give way to what streams tokens on the same cores.
LONG_NICE = 10
# In a lane, before its turn: beyond that a text is taken as one that cannot be parsed.
WAIT_S = 1.0
# A worker that does not answer for so long was stopped, or its machine is out of memory.
ANSWER_WITHIN_S = 10.0

Job = Mapping[str, object]
"""`{"what": "analyze" | "validate", ...}` and the arguments of the function that does it."""

_WORKER = "from cato.serve.nodes.parsing_worker import main; main()"


class Lane:
    """One worker, started by the first text, and the texts that wait for it."""

    def __init__(self, cpu_s: float, nice: int = 0) -> None:
        self._cpu_s, self._nice = cpu_s, nice
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parsing")
        # Of the thread alone.
        self._worker: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.begun = 0  # texts, modulo what fits in their number

    @property
    def pid(self) -> int | None:
        """Of the worker, while it runs."""
        return None if self._worker is None else self._worker.pid

    async def run(self, job: Job) -> dict[str, object] | None:
        """The result of `job`; None when it took too much CPU time, or waited for too long.

        Cancelled before its turn it is not begun; afterwards its CPU time is its end.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._do, job, time.monotonic())

    def _do(self, job: Job, asked_s: float) -> dict[str, object] | None:
        if time.monotonic() - asked_s > WAIT_S:
            log.info("a text waited for %g s and is not parsed", WAIT_S)
            return None
        message = json.dumps(job).encode()
        for _ in range(2):  # the worker may have died while it had nothing to do
            try:
                return self._answer(message)
            except TimeoutError:
                log.warning("a parser did not answer for %g s", ANSWER_WITHIN_S)
                self._end()
                break
            except (OSError, ValueError) as error:
                log.warning("a parser ended: %s", error)
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
            if number == self.begun:  # or one that died after its answer
                return cast("dict[str, object] | None", json.loads(answer))

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_WITHIN_S)
        self._socket = ours
        with theirs:
            self._worker = subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(self._cpu_s), str(self._nice)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for us; our end is its end of file
            )

    def close(self) -> None:
        """End the worker; another text would start another."""
        self._thread.submit(self._end).result()

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._worker.pid, signal.SIGKILL)
            self._worker.wait()
        self._socket = self._worker = None


_SHORT, _LONG = Lane(SHORT_CPU_S), Lane(LONG_CPU_S, LONG_NICE)


async def parsed(what: str, source: str, **fields: Any) -> dict[str, object] | None:
    """What `cato.serve.nodes.parsing_worker` makes of `source`; None when that takes too long."""
    lane = _SHORT if len(source) <= SHORT_CHARS else _LONG
    return await lane.run({"what": what, "source": source, **fields})
